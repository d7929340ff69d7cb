"""The short way through Llama and its kin gives what the model's own modules give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_causal import CONFIGS, SMALL, paged, ragged, random_tokens
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from specserve.models import _flat_decoder, _panels
from specserve.models._native_decoder import NativeDecoder
from specserve.models.paged_transformers import PagedTransformers

FLAT = ["llama", "llama_yarn", "mistral_window", "qwen3"]


def batches() -> list:
    """A prompt; then a longer row beside another's prompt, in scattered blocks."""
    first, second = random_tokens(1, 22), random_tokens(2, 9)
    scattered = [31, 2, 17, 5, 9, 12]
    return [ragged([(first[:15], 0, scattered)]), ragged([(first[15:], 15, scattered), (second, 0, [20, 3, 7])])]


@pytest.fixture(autouse=True, params=["torch", "our own"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once as where there is no compiler, and once with our own products, but never with the whole step in C."""
    if request.param == "torch":
        monkeypatch.setattr(_panels, "kernels", lambda: None)
    monkeypatch.setattr(NativeDecoder, "of", lambda anatomy: None)


def logits_of(backend: PagedTransformers) -> torch.Tensor:
    return torch.cat([backend.forward(batch) for batch in batches()])


@pytest.mark.parametrize("family", FLAT)
def test_it_says_what_the_models_own_modules_say(family: str) -> None:
    """Scaled ropes, windows, and norms of heads; two rows in scattered blocks."""
    short, own = paged(family), paged(family)
    assert short._flat is not None
    own._flat = None
    torch.testing.assert_close(logits_of(short), logits_of(own), atol=2e-5, rtol=2e-5)


def test_biases_of_queries_keys_and_values_are_kept() -> None:
    """Qwen 2 has them."""
    torch.manual_seed(0)
    backends = []
    for flat in (True, False):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(**SMALL)).eval().requires_grad_(False)
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.k_proj.bias)
        backend = PagedTransformers(model, None)
        backend.allocate(40, 4)
        assert backend._flat is not None
        if not flat:
            backend._flat = None
        backends.append(backend)
    torch.testing.assert_close(logits_of(backends[0]), logits_of(backends[1]), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("family", sorted(set(CONFIGS) - set(FLAT)))
def test_other_models_run_as_they_are(family: str) -> None:
    """What is not known to the last operator has no short way."""
    assert paged(family)._flat is None


def test_a_subclass_and_another_dtype_run_as_they_are() -> None:
    """A class of somebody's own may compute something else under any name, and packing is for float32."""

    class Mine(LlamaForCausalLM):
        pass

    Mine.__name__ = "LlamaForCausalLM"
    config = LlamaConfig(**SMALL)
    assert PagedTransformers(Mine(config).eval(), None)._flat is None
    assert PagedTransformers(LlamaForCausalLM(config).to(torch.bfloat16).eval(), None)._flat is None


def test_an_invariant_target_takes_the_models_own_way() -> None:
    """Its activations go row by row there."""
    backend = paged("llama")
    backend.make_batch_invariant()
    assert backend._flat is None


@pytest.mark.parametrize("broken", ["sign", "window", "norm"])
def test_a_wrong_step_shows(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Without the sign of a rotation, a layer's window or the norms of heads, logits differ."""
    family = {"sign": "llama", "window": "mistral_window", "norm": "qwen3"}[broken]
    right, wrong = paged(family), paged(family)
    for layer in wrong._flat._layers:
        if broken == "window":
            layer._window = None
        elif broken == "norm":
            layer._head_norms = None
    if broken == "sign":
        wrong._flat._rotary = _Unsigned(wrong._flat._rotary)
    assert not np.allclose(logits_of(right), logits_of(wrong), atol=1e-3)


class _Unsigned(torch.nn.Module):
    def __init__(self, rotary: torch.nn.Module) -> None:
        super().__init__()
        self._rotary = rotary

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = self._rotary(hidden, positions)
        half = sines.shape[-1] // 2
        return cosines, torch.cat((-sines[..., :half], sines[..., half:]), dim=-1)


def test_the_module_names_only_models_that_exist() -> None:
    """Each name is a class of transformers."""
    import transformers

    assert all(hasattr(transformers, name) for name in _flat_decoder.KIN)
