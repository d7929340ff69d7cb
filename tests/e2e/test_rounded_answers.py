"""Answers of a target with rounded weights are those of the rounded model, by whatever layers it is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_heads
import torch
from tiny_models import tiny_llama
from torch import nn
from transformers import AutoModelForCausalLM

from specserve.config import parse
from specserve.local import LocalEngine, load_parts
from specserve.models._float8 import Float8Product, Float8Rows
from specserve.models._int8_digits import Int8Digits
from specserve.types import Request, RequestId, Sampling

TOKENS = 24
PROMPTS = [tuple(3 + (j * step) % 200 for j in range(20)) for step in (7, 11, 17)]
WORDS = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [tiny_llama(tmp_path_factory.mktemp(name), seed=seed) for name, seed in (("target", 1), ("draft", 2))]


def float8(rows: torch.Tensor) -> torch.Tensor:
    """Each row's numbers at 4 significant bits, as float8_e4m3fn has them below a power of two of its own."""
    scale = torch.exp2(torch.floor(torch.log2(rows.abs().amax(dim=-1, keepdim=True).clamp_min(2.0**-100))) - 7)
    return (rows / scale).to(torch.float8_e4m3fn).float() * scale


def int8(rows: torch.Tensor) -> torch.Tensor:
    scale = rows.abs().amax(dim=-1, keepdim=True) / 127
    return (rows / scale).round() * scale


def rounded_by_hand(folder: Path, quantization: str) -> nn.Module:
    """transformers' float32 model with all weights of matrix products rounded; fp8 rounds what they read as well."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Linear) and quantization == "fp8":
            module.weight.copy_(float8(module.weight))
            module.register_forward_pre_hook(lambda _, rows: float8(rows[0]))
        elif isinstance(module, nn.Linear) and quantization == "int8":
            module.weight.copy_(int8(module.weight))
    return model


def lacking(model: nn.Module, answers: list[tuple[int, ...]]) -> torch.Tensor:
    """How far each answered token is behind the one that the model, reading the same answer, likes best."""
    found = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        logits = model(input_ids=torch.tensor([(*prompt, *answer)])).logits[0, len(prompt) - 1 : -1]
        found.append(logits.amax(dim=-1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0])
    return torch.cat(found)


def answers(folders: list[Path], depth: int, **target: Any) -> list[tuple[int, ...]]:
    common = {"device": "cpu", "kv_blocks": 200}
    config = {
        "target": {"source": str(folders[0]), **common, **target},
        "draft": {"model": {"source": str(folders[1]), **common}},
        "engine": {"depth": depth, "max_batch_tokens": 128, "prefill_chunk": 48},
    }
    requests = [
        Request(RequestId(f"r{at}"), prompt, TOKENS, Sampling(temperature=0), ignore_eos=True)
        for at, prompt in enumerate(PROMPTS)
    ]
    with LocalEngine(config) as engine:
        return [tuple(each.tokens) for each in engine.complete(requests)]


@pytest.mark.parametrize("depth", [0, 4])
def test_greedy_answers_are_the_rounded_models(folders, depth: int) -> None:
    """In float32, where weights are written out: the model as computed by hand, token by token, and not the exact one.

    Where two tokens are as good as equal, the order of additions may choose either.
    """
    found = answers(folders, depth, quantization="fp8")
    assert lacking(rounded_by_hand(folders[0], "fp8"), found).max() < 0.02
    assert lacking(rounded_by_hand(folders[0], "none"), found).max() > 0.05


@pytest.mark.parametrize(("quantization", "kept"), [("fp8", Float8Product), ("int8", Int8Digits)])
def test_greedy_answers_of_layers_that_keep_bytes(folders, quantization, kept, monkeypatch) -> None:
    """Those that a GPU would run, in bfloat16: as near to the rounded model as written-out weights, drafts or not."""
    calls = []
    forward = kept.forward
    monkeypatch.setattr(kept, "forward", lambda self, rows: calls.append(len(rows)) or forward(self, rows))
    by_hand = rounded_by_hand(folders[0], quantization)
    written = lacking(by_hand, answers(folders, 0, quantization=quantization, dtype="bfloat16"))
    assert not calls
    monkeypatch.setattr(kept, "serves", staticmethod(lambda dtype, device: dtype == torch.bfloat16))
    for depth in (0, 4):
        calls.clear()
        found = answers(folders, depth, quantization=quantization, dtype="bfloat16")
        assert calls
        assert lacking(by_hand, found).max() < 0.25
        assert lacking(by_hand, found).mean() <= written.mean() + 0.005


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_draft_head_may_be_rounded(tmp_path, kind: str, quantization: str) -> None:
    """Its layers are, and the target's answers are what they were."""
    target = tiny_heads.few_words(tmp_path / "target", WORDS, layers=4)
    more = {} if kind == "eagle" else {"read": (0, 1, 3), "spoken": 9}
    head = getattr(tiny_heads, kind)(tmp_path / "head", vocab_size=WORDS, **more)
    common = {"device": "cpu", "kv_blocks": 200}
    requests = [
        Request(RequestId(f"r{at}"), (1, 2 + at, 5), TOKENS, Sampling(temperature=0), ignore_eos=True)
        for at in range(3)
    ]

    def settings(depth: int, **model: Any) -> Any:
        draft = {"speculator": "eagle", "model": {"source": str(head), **common, **model}}
        return parse({"target": {"source": str(target), **common}, "draft": draft, "engine": {"depth": depth}})

    def told(config: Any) -> tuple[list[tuple[int, ...]], int]:
        with LocalEngine(config, parts=load_parts(config)) as engine:
            done = engine.complete(requests)
            return [tuple(each.tokens) for each in done], sum(each.stats.rounds for each in done)

    plain, rounds = told(settings(0))
    config = settings(3, quantization=quantization)
    found, fewer = told(config)
    assert found == plain
    assert fewer < rounds
    info = load_parts(config).draft
    assert info is not None
    assert info.quantization == quantization


def test_a_rounded_head_is_made_of_rounded_layers(tmp_path) -> None:
    """All of its matrices, the one for the ids that it speaks of among them."""
    from specserve.config import ModelConfig
    from specserve.models import eagle, loading

    target = tiny_heads.few_words(tmp_path / "target", WORDS, layers=4)
    head = tiny_heads.eagle3(tmp_path / "head", vocab_size=WORDS, read=(0, 1, 3), spoken=9)
    config = ModelConfig(source=str(head), target=str(target), quantization="fp8", device="cpu")
    network = eagle.build(config, loading.prepare(config, lambda _: None))._network
    layers = [name for name, module in network.named_modules() if isinstance(module, Float8Rows)]
    assert len(layers) == 9
    assert {"fc", "head.part", "layers.0.self_attn.q_proj", "layers.0.mlp.down_proj"} <= set(layers)
