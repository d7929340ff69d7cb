"""An int8 model is the model of its rounded weights, by our kernels and by torch alike, and nothing else is rounded."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tiny_causal import SMALL, tiny
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from specserve.config import EngineConfig, ModelConfig
from specserve.errors import ConfigError
from specserve.models import _linear, _memory_plan, _panels, _rounded_layers, _worker, loading
from specserve.models._int8 import Int8Linear
from specserve.models._stretches import Stretch, ragged
from specserve.models.paged_transformers import PagedTransformers

needs_compiler = pytest.mark.skipif(_panels.kernels() is None, reason="needs a C compiler with OpenMP")
CPU = torch.device("cpu")
INT8 = {"quantization": "int8", "device": "cpu"}
ODD = SMALL | {"hidden_size": 39, "intermediate_size": 53, "num_attention_heads": 3, "num_key_value_heads": 1}


def layer(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(outputs)
    return nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)


def test_each_row_is_rounded_to_its_own_scale() -> None:
    """To the nearest of 255 multiples, the largest to ±127; zeros stay zeros, tiny numbers tiny."""
    plain = layer(130, 5)
    plain.weight[3] = 0
    plain.weight[4] *= 1e-36
    rounded = Int8Linear(plain)
    codes = rounded.codes()
    assert codes.dtype == torch.int8
    assert codes.abs().amax(dim=1)[:3].tolist() == [127] * 3
    assert torch.equal(codes * rounded.scales[:, None], rounded.weight)
    assert ((rounded.weight - plain.weight).abs() <= 0.5001 * rounded.scales[:, None]).all()
    assert not rounded.weight[3].any()
    assert torch.equal(rounded.bias, plain.bias)


@pytest.mark.parametrize("kernels", ["our own", "oneDNN"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 40])
def test_packed_products_are_those_of_the_rounded_weights(
    count: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widths that fill no panel; with biases, and several layers beside each other."""
    if kernels == "oneDNN":
        monkeypatch.setattr(_panels, "kernels", lambda: None)
    elif _panels.kernels() is None:
        pytest.skip("needs a C compiler with OpenMP")
    rows = torch.randn(count, 130)
    for bias in (False, True):
        layers = [Int8Linear(layer(130, outputs, bias=bias)) for outputs in (7, 200, 33)]
        written_out = torch.cat([each(rows) for each in layers], dim=-1)
        torch.testing.assert_close(_linear.PackedLinear(layers)(rows), written_out, atol=1e-5, rtol=1e-5)


@needs_compiler
def test_a_rows_product_has_the_same_bits_in_any_company() -> None:
    """As with float32 weights."""
    packed = _linear.PackedLinear([Int8Linear(layer(130, outputs)) for outputs in (7, 200, 33)])
    rows = torch.randn(64, 130)
    alone = torch.cat([packed(row[None]) for row in rows])
    for count in (2, 5, 12, 13, 25, 64):
        assert torch.equal(packed(rows[:count]), alone[:count])


PRODUCTS = ("query", "key", "value", "output", "gate", "up", "down")
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "odd widths, biases": lambda: LlamaForCausalLM(LlamaConfig(**ODD, head_dim=16, attention_bias=True, mlp_bias=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "phi3, another architecture": lambda: tiny("phi3_longrope"),
}


def rounded(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().eval().requires_grad_(False)
    _rounded_layers.round_weights(model, "int8", CPU)
    return model


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_backend_says_what_the_rounded_model_says(name: str) -> None:
    """transformers' own forward of the written-out weights, greedy choices included, and nothing of the exact ones."""
    model = rounded(name)
    tokens = np.random.default_rng(1).integers(3, SMALL["vocab_size"], 40)
    expected = model(input_ids=torch.from_numpy(tokens)[None]).logits[0]
    backend = PagedTransformers(copy.deepcopy(model), None)
    backend.allocate(8, 8)
    found = backend.forward(ragged([Stretch(0, tokens, np.arange(8, dtype=np.int32), 40)]))
    scale = expected.abs().max().item()
    torch.testing.assert_close(found, expected, atol=1e-4 * scale, rtol=0)
    lead = expected.topk(2).values.diff(dim=-1).abs()[:, 0]
    clear = lead > 1e-3 * scale
    assert clear.sum() > 20
    assert torch.equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])
    torch.manual_seed(0)
    exact = MODELS[name]().eval()(input_ids=torch.from_numpy(tokens)[None]).logits[0]
    assert (found - exact).abs().max() > 1e-3 * scale


@needs_compiler
def test_our_kernels_read_the_int8_panels() -> None:
    """All layers and the tied head, whose embedding is looked up as it is stored."""
    torch.manual_seed(0)
    stored = MODELS["tied"]().eval().model.embed_tokens.weight.detach()
    backend = PagedTransformers(rounded("tied"), None)
    assert backend._native is not None
    layers = backend._native._layers
    parts = [getattr(each, name) for each in layers for name in PRODUCTS]
    assert all(part.scales for part in [*parts, backend._native._decoder.head])
    assert torch.equal(backend.model.model.embed_tokens.weight, stored)


def test_matrices_that_are_no_linear_layers_are_refused() -> None:
    """Rather than left unrounded."""
    with pytest.raises(ConfigError, match=r"rounds linear layers only, and transformer\.h\.0\.attn\.c_attn\.weight"):
        _rounded_layers.round_weights(
            GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50)), "int8", CPU
        )


@pytest.mark.parametrize(
    ("more", "recurrent", "emulated", "told"),
    [
        ({}, False, True, "emulated models have no weights"),
        ({}, True, False, "not there for models with recurrent layers"),
        ({"tensor_parallel": 2}, False, False, "set tensor_parallel 2 to 1"),
    ],
)
def test_what_cannot_have_it_is_refused_in_words(more: dict, recurrent: bool, emulated: bool, told: str) -> None:
    """And nothing is refused that does not ask for it."""
    source = {"source": "emulated" if emulated else "/models/some"}
    with pytest.raises(ConfigError, match=told):
        _rounded_layers.refuse_unfit(ModelConfig(**source, **INT8, **more), recurrent=recurrent, emulated=emulated)
    _rounded_layers.refuse_unfit(ModelConfig(**source, **more), recurrent=recurrent, emulated=emulated)


def test_a_worker_refuses_it_for_an_emulated_model() -> None:
    """Before anything is loaded."""
    with pytest.raises(ConfigError, match="emulated models have no weights"):
        _worker.load_backend(ModelConfig(source="emulated", **INT8), "target", EngineConfig())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("compiler", [pytest.param(True, marks=needs_compiler), False])
def test_the_plan_counts_what_is_held(tmp_path, tied: bool, compiler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte for each rounded weight and its scales, a tied embedding beside its head; or all written out."""
    if not compiler:
        monkeypatch.setattr(_panels, "kernels", lambda: None)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=tied)).save_pretrained(tmp_path)
    config = ModelConfig(source=str(tmp_path), **INT8)
    model = loading.load_model(tmp_path, config)
    layers = [each for each in model.modules() if isinstance(each, Int8Linear)]
    embedding = model.model.embed_tokens.weight
    norms = sum(each.nbytes for each in model.parameters() if each.ndim == 1)
    if compiler:
        held = embedding.nbytes + norms + sum(each.weight.numel() + each.scales.nbytes for each in layers)
    else:
        held = embedding.nbytes + norms + sum(each.weight.nbytes for each in layers)
    assert _memory_plan.held_bytes(tmp_path, config, CPU) == held
    plain = config.model_copy(update={"quantization": "none"})
    assert _memory_plan.held_bytes(tmp_path, plain, CPU) == _memory_plan.weight_bytes(tmp_path, plain)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_compute_with_the_weights_written_out(tmp_path, dtype: str) -> None:
    """Rounded from what the dtype holds."""
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    model = loading.load_model(tmp_path, ModelConfig(source=str(tmp_path), dtype=dtype, **INT8))
    each = model.model.layers[0].mlp.down_proj
    assert isinstance(each, Int8Linear)
    assert each.weight.dtype == getattr(torch, dtype)
    _linear.speed_up(model)
    assert model.model.layers[0].mlp.down_proj is each
