"""What `quantization: auto` comes to: bytes for drafts where a step in C reads them, nothing for anybody else."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import tiny_llama
from transformers import GPT2Config, GPT2LMHeadModel

from specserve.config import EngineConfig, ModelConfig
from specserve.models import _panels, loading
from specserve.models._quantization import decided
from specserve.models._worker import load_backend

needs_compiler = pytest.mark.skipif(_panels.kernels() is None, reason="needs a C compiler with OpenMP")


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), seed=1)


def choice(folder: Path, role: str = "draft", backend: str = loading.PAGED, **settings: object) -> str:
    return decided(ModelConfig(source=str(folder), device="cpu", **settings), role, folder, backend).quantization


@needs_compiler
def test_a_draft_of_the_kind_that_c_knows_has_bytes(llama) -> None:
    """And so has a head, which is of that kind; the worker says it."""
    assert choice(llama) == choice(llama, backend=loading.HEAD) == "int8"
    _, info = load_backend(ModelConfig(source=str(llama), device="cpu", kv_blocks=64), "draft", EngineConfig())
    assert info.quantization == "int8"


def test_a_target_stays_as_it_is(llama) -> None:
    assert choice(llama, role="target") == "none"
    _, info = load_backend(ModelConfig(source=str(llama), device="cpu", kv_blocks=64), "target", EngineConfig())
    assert info.quantization == "none"


@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, {"tensor_parallel": 2}, {"backend": loading.TRANSLATED}], ids=str
)
def test_a_draft_that_would_gain_nothing_stays_as_it_is(llama, settings: dict) -> None:
    assert choice(llama, **settings) == "none"


def test_a_draft_of_another_kind_stays_as_it_is(tmp_path) -> None:
    """Its matrices may be no linear layers, which int8 is refused for."""
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)).save_pretrained(tmp_path)
    assert choice(tmp_path) == "none"


def test_without_a_compiler_nothing_is_rounded(llama, monkeypatch) -> None:
    monkeypatch.setattr(_panels, "kernels", lambda: None)
    assert choice(llama) == "none"


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_what_is_said_is_what_is_done(llama, quantization: str) -> None:
    for role in ("draft", "target"):
        assert choice(llama, role, quantization=quantization) == quantization
