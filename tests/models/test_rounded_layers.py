"""Rounded layers, int8 and fp8: the ones that a GPU would run, here by torch's operators on a CPU, and written out."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from pretend_device import PretendDevice, moved, there
from tiny_causal import BLOCK, BLOCKS, SMALL
from tiny_models import tiny_llama
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from specserve.config import EngineConfig, ModelConfig
from specserve.errors import ConfigError
from specserve.models import _float8, _int8_digits, _joint, _linear, _memory_plan, _rounded_layers, _servable, loading
from specserve.models._float8 import Float8Product, Float8Rows
from specserve.models._int8 import Int8Linear
from specserve.models._int8_digits import Int8Digits
from specserve.models._recorder import PlainRecorder
from specserve.models._step_shapes import planned
from specserve.models._stretches import Stretch, ragged
from specserve.models._worker import load_backend
from specserve.models.paged_transformers import PagedTransformers

CPU, GPU = torch.device("cpu"), torch.device("cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
FITTING = SMALL | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 128}


def layer(inputs: int, outputs: int, dtype: torch.dtype = torch.float32, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(outputs)
    return nn.Linear(inputs, outputs, bias=bias).requires_grad_(False).to(dtype)


@pytest.fixture
def bytes_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers keep their bytes in bfloat16 on any device, as they would on a GPU that multiplies them."""
    for kind in (Int8Digits, Float8Product):
        monkeypatch.setattr(kind, "serves", staticmethod(lambda dtype, device: dtype == torch.bfloat16))


# ---- numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 448.0, 500.0, 1e4])
def test_rows_are_rounded_to_the_nearest_float8(dtype: torch.dtype, size: float) -> None:
    """Within half a unit of 4 significant bits, or of the smallest step of their row; the scale is a power of two."""
    torch.manual_seed(0)
    rows = (torch.randn(50, 130) * size).to(dtype)
    codes, scales = _float8.rounded(rows)
    assert codes.dtype == torch.float8_e4m3fn
    assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))
    found, exact = codes.float() * scales, rows.float()
    largest = exact.abs().amax(dim=1, keepdim=True)
    assert ((found - exact).abs() <= (exact.abs() / 16).maximum(largest * 2.0**-17)).all()
    assert ((codes.float().abs().amax(dim=1) >= 128) | (largest[:, 0] < 1e-29)).all()
    assert (codes.float().abs() <= 256).all()
    if size == 1.0:
        assert ((found - exact).abs() > exact.abs() / 32).any()  # it is e4m3, and nothing finer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float8_numbers_written_out_are_the_same_numbers(dtype: torch.dtype) -> None:
    """Which is what the powers of two are for: the dtype rounds nothing once more."""
    torch.manual_seed(0)
    codes, scales = _float8.rounded(torch.randn(50, 130).to(dtype) * torch.logspace(-12, 12, 50)[:, None].to(dtype))
    written = _float8.written_out(codes, scales, dtype)
    assert torch.equal(written.double(), codes.double() * scales.double())
    again, same = _float8.rounded(written)
    assert torch.equal(again.float() * same, written.float())


def test_every_row_has_a_scale_of_its_own() -> None:
    """Zeros stay zeros, and a huge row beside it takes nothing from a small one."""
    rows = torch.randn(4, 64)
    rows[1], rows[2] = 0, rows[2] * 1e30
    codes, scales = _float8.rounded(rows)
    for at in range(4):
        alone, scale = _float8.rounded(rows[at : at + 1])
        assert torch.equal(alone.float(), codes[at : at + 1].float())
        assert torch.equal(scale[0], scales[at])
    assert not codes[1].float().any()


# ---- products -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 2, 5, 16, 17, 33, 600])
def test_int8_digits_are_the_product_of_the_rounded_weights(dtype: torch.dtype, count: int) -> None:
    """In float64, to what two digits of each row and the dtype of the result lose; biases, layers side by side."""
    torch.manual_seed(count)
    rows = torch.randn(count, 160).to(dtype)
    for bias in (False, True):
        layers = [layer(160, outputs, dtype, bias=bias) for outputs in (16, 208, 32)]
        product = Int8Digits(layers)
        weights = product.codes.double() * product.scales.double()[:, None]
        expected = rows.double() @ weights.T
        if bias:
            expected += torch.cat([each.bias for each in layers]).double()
        found = product(rows)
        assert found.dtype == dtype
        assert found.shape == (count, 256)
        largest = rows.double().abs().amax(dim=1, keepdim=True)
        lost = largest / 64_516 * weights.abs().sum(dim=1) + (EPSILON[dtype] + 2.0**-20) * expected.abs() + 1e-6
        assert ((found.double() - expected).abs() <= lost).all()


def test_int8_digits_of_many_rows_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, and no part larger than what it may take."""
    product, rows = Int8Digits([layer(64, 32, torch.bfloat16)]), torch.randn(3, 67, 64).to(torch.bfloat16)
    whole, sizes, product_of = product(rows), [], torch._int_mm
    monkeypatch.setattr(_int8_digits, "_AT_ONCE", 32 * 40)
    monkeypatch.setattr(torch, "_int_mm", lambda left, right: sizes.append(len(left)) or product_of(left, right))
    assert torch.equal(product(rows), whole)
    assert sizes == [96] * 5 + [32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_digits_read_the_weights_that_int8_layers_write_out(dtype: torch.dtype) -> None:
    """Codes and scales are those of float32, whose roundings to the dtype the written-out ones are."""
    plain = layer(160, 48, dtype)
    product, written = Int8Digits([plain]), Int8Linear(plain)
    assert product.codes.dtype == torch.int8
    assert torch.equal((product.codes.float() * product.scales[:, None]).to(dtype), written.weight)


def test_int8_digits_add_up_without_rounding() -> None:
    """The largest sums there can be, of the most inputs, stay inside int32."""
    inputs = 133_136
    assert Int8Digits.fits(inputs, 16)
    assert not Int8Digits.fits(inputs + 16, 16)
    plain = nn.Linear(inputs, 16, bias=False).requires_grad_(False)
    plain.weight.fill_(1.0)
    found = Int8Digits([plain])(torch.ones(1, inputs))
    torch.testing.assert_close(found, torch.full((1, 16), float(inputs)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 3, 17, 40])
def test_float8_products_are_those_of_the_same_numbers_written_out(dtype: torch.dtype, count: int) -> None:
    """torch's own `_scaled_mm`, and float64, to what additions in float32 and the dtype of the result lose."""
    torch.manual_seed(count)
    rows = torch.randn(count, 160).to(dtype)
    for bias in (False, True):
        layers = [layer(160, outputs, dtype, bias=bias) for outputs in (16, 208, 32)]
        product = Float8Product(layers)
        found = product(rows)
        assert found.dtype == dtype
        assert found.shape == (count, 256)
        codes, scales = _float8.rounded(rows)
        left, right = codes.double() * scales.double(), product.codes.double() * product.scales.double().T
        expected = left @ right.T
        if bias:
            expected += torch.cat([each.bias for each in layers]).double()
        # A rounding to the dtype before the bias is added is one too many, which torch does on a CPU.
        lost = 2 * EPSILON[dtype] * (left.abs() @ right.abs().T + 1)
        assert ((found.double() - expected).abs() <= lost).all()
        written = torch.cat([Float8Rows(each)(rows) for each in layers], dim=-1)
        assert ((written.double() - expected).abs() <= lost).all()


@pytest.mark.parametrize("kind", [Float8Product, Int8Digits])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_whatever_is_beside_it(kind: type[nn.Module], dtype: torch.dtype) -> None:
    """Zeros, tiny numbers, huge ones, and such as are none: they do nothing to others, nor others to them."""
    product = kind([layer(160, 48, dtype)])
    rows = torch.randn(6, 160).to(dtype)
    sizes = (0.0, torch.finfo(dtype).tiny, 0.01 * torch.finfo(dtype).max, float("inf"), float("nan"))
    usual = product(rows)
    for size in sizes:
        beside = rows.clone()
        beside[2] = size
        found = product(beside)
        others = [0, 1, 3, 4, 5]
        assert torch.equal(found[others], usual[others])
        assert bool(found[2].isfinite().all()) == (0 <= size < float("inf"))
    if kind is Int8Digits:  # whole numbers add up to the same in any order
        alone = torch.cat([product(row[None]) for row in rows])
        assert torch.equal(alone, usual)


@pytest.mark.parametrize("kind", [Float8Product, Int8Digits])
def test_rows_of_zeros_give_the_bias_and_outputs_of_zeros_nothing(kind: type[nn.Module]) -> None:
    plain = layer(64, 32)
    plain.weight[3] = 0
    product = kind([plain])
    assert torch.equal(product(torch.zeros(2, 3, 64)), plain.bias.expand(2, 3, 32))
    assert torch.equal(product(torch.randn(2, 64))[:, 3], plain.bias[3].expand(2))


@pytest.mark.parametrize("kind", [Float8Product, Int8Digits])
def test_nothing_is_looked_at_while_it_computes(kind: type[nn.Module]) -> None:
    """So a step of it can be recorded."""
    product = kind([layer(64, 32, torch.bfloat16)])
    rows = torch.randn(5, 64).to(torch.bfloat16)
    expected = product(rows)
    with PretendDevice() as device:
        elsewhere = moved(copy.deepcopy(product))
        device.looks.clear()
        device.waits.clear()
        found = elsewhere(there(rows))
        assert not device.looks
        assert not device.waits
        assert not device.sent
        assert torch.equal(found.cpu(), expected)


# ---- which layer where --------------------------------------------------------------------------------------


def keeping(quantization: str, dtype: torch.dtype, device: torch.device, inputs: int = 64, outputs: int = 32) -> bool:
    return _rounded_layers.KINDS[quantization].keeps(dtype, device, inputs, outputs)


def test_bytes_are_kept_where_the_device_multiplies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By compute capability, dtype and sizes; never on a CPU, and on no card of another maker."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def kept(capability: tuple[int, int]) -> set[tuple[str, torch.dtype]]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return {(name, dtype) for name in ("int8", "fp8") for dtype in DTYPES if keeping(name, dtype, GPU)}

    assert kept((9, 0)) == kept((8, 9)) == {("int8", DTYPES[1]), ("int8", DTYPES[2]), ("fp8", DTYPES[1])}
    assert kept((8, 6)) == kept((7, 5)) == {("int8", DTYPES[1]), ("int8", DTYPES[2])}
    assert kept((7, 0)) == set()
    assert not any(keeping(name, dtype, CPU) for name in ("int8", "fp8") for dtype in DTYPES)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name in ("int8", "fp8"):
        assert keeping(name, torch.bfloat16, GPU)
        assert not keeping(name, torch.bfloat16, GPU, inputs=72)
        assert not keeping(name, torch.bfloat16, GPU, outputs=97)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not keeping("fp8", torch.bfloat16, GPU)
    assert not keeping("int8", torch.bfloat16, GPU)


def llama(dtype: torch.dtype = torch.float32, **more: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**FITTING | more)).eval().requires_grad_(False).to(dtype)


@pytest.mark.usefixtures("bytes_everywhere")
@pytest.mark.parametrize(("quantization", "kept"), [("int8", Int8Digits), ("fp8", Float8Product)])
def test_layers_of_one_input_round_it_once(quantization: str, kept: type[nn.Module]) -> None:
    """Queries, keys and values are one product, gate and up another; a head tied to the embedding is its own matrix."""
    model = llama(torch.bfloat16, tie_word_embeddings=True)
    stored = model.model.embed_tokens.weight.clone()
    _rounded_layers.round_weights(model, quantization, CPU)
    products = [module for module in model.modules() if isinstance(module, kept)]
    assert len(products) == 4 * FITTING["num_hidden_layers"] + 1
    attention = model.model.layers[0].self_attn
    assert _joint.product_of(attention.q_proj) in products
    assert _linear.joint_product(attention.q_proj) is None  # which stands for products on a CPU only
    assert torch.equal(model.model.embed_tokens.weight, stored)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    assert model.dtype == torch.bfloat16


@pytest.mark.usefixtures("bytes_everywhere")
def test_sizes_that_do_not_fit_are_written_out() -> None:
    """A vocabulary of 97 among layers that fit."""
    model = llama(torch.bfloat16, vocab_size=97)
    _rounded_layers.round_weights(model, "fp8", CPU)
    assert isinstance(model.lm_head, Float8Rows)
    assert isinstance(model.model.layers[0].mlp.down_proj, Float8Product)


def test_matrices_that_are_no_linear_layers_are_refused() -> None:
    """By name, and with what to set."""
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50))
    with pytest.raises(
        ConfigError, match=r"fp8 rounds linear layers only, and transformer\.h\.0\.attn\.c_attn\.weight"
    ):
        _rounded_layers.round_weights(model, "fp8", CPU)


@pytest.mark.parametrize(
    ("more", "recurrent", "emulated", "told"),
    [
        ({}, False, True, "emulated models have no weights; set quantization fp8 to none"),
        ({}, True, False, "fp8 is not there for models with recurrent layers"),
        ({"tensor_parallel": 2}, False, False, "set tensor_parallel 2 to 1"),
    ],
)
def test_what_cannot_have_fp8_is_refused_in_words(more: dict, recurrent: bool, emulated: bool, told: str) -> None:
    config = ModelConfig(source="emulated" if emulated else "/models/some", quantization="fp8", **more)
    with pytest.raises(ConfigError, match=told):
        _rounded_layers.refuse_unfit(config, recurrent=recurrent, emulated=emulated)


def test_a_device_without_float8_is_refused(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before weights are read, with what to do; int8, whose rows are not rounded, is not."""
    folder = tiny_llama(tmp_path, seed=1)
    monkeypatch.setattr(loading, "device_of", lambda config: torch.device("mps"))
    config = ModelConfig(source=str(folder), quantization="fp8")
    with pytest.raises(
        ConfigError, match="fp8 is there on cpu and cuda devices, and device is 'mps'; use one of those"
    ):
        _servable.backend_for("target", config, folder)
    _servable.backend_for("target", config.model_copy(update={"quantization": "int8"}), folder)


def test_an_unknown_quantization_is_refused() -> None:
    """By the configuration, which knows fp8 and comes back from its own text."""
    config = ModelConfig(quantization="fp8")
    assert ModelConfig.model_validate_json(config.model_dump_json()) == config
    with pytest.raises(ValueError, match="quantization"):
        ModelConfig(quantization="fp4")


# ---- models -------------------------------------------------------------------------------------------------

MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**FITTING)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**FITTING, tie_word_embeddings=True)),
    "qwen2, biases": lambda: Qwen2ForCausalLM(Qwen2Config(**FITTING)),
}
TOKENS = np.random.default_rng(1).integers(3, FITTING["vocab_size"], 40)


def logits(model: nn.Module) -> torch.Tensor:
    backend = PagedTransformers(copy.deepcopy(model), None)
    backend.allocate(8, 8)
    return backend.forward(ragged([Stretch(0, TOKENS, np.arange(8, dtype=np.int32), 40)]))


def made(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().eval().requires_grad_(False).to(dtype)


def by_hand(model: nn.Module) -> torch.Tensor:
    """Logits of transformers' own forward with every linear layer's weight and input rounded, in plain words."""

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        largest = rows.abs().amax(dim=-1, keepdim=True).clamp_min(2.0**-100)
        scale = torch.exp2(torch.floor(torch.log2(largest)) - 7)
        return (rows / scale).to(torch.float8_e4m3fn).float() * scale

    hooks = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(rounded(module.weight.detach().clone()), requires_grad=False)
            hooks.append(module.register_forward_pre_hook(lambda _, rows: rounded(rows[0])))
    return model(input_ids=torch.from_numpy(TOKENS)[None]).logits[0]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_backend_says_what_the_fp8_model_says(name: str) -> None:
    """As computed by hand, greedy choices included, and nothing of the exact one."""
    model = made(name, torch.float32)
    _rounded_layers.round_weights(model, "fp8", CPU)
    found, expected, exact = logits(model), by_hand(made(name, torch.float32)), logits(made(name, torch.float32))
    scale = expected.abs().max().item()
    # A number that falls between two of float8 goes either way after another order of additions.
    assert (found - expected).abs().mean() < 0.02 * (found - exact).abs().mean()
    lead = expected.topk(2).values.diff(dim=-1).abs()[:, 0]
    clear = lead > 0.02 * scale
    assert clear.sum() > 20
    assert torch.equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])
    assert (found - exact).abs().max() > 0.01 * scale


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_model_of_bytes_is_that_of_its_weights_written_out(name: str, quantization: str, monkeypatch) -> None:
    """In bfloat16: far closer to each other than to the exact model; by recorded steps, too."""
    written, kept = made(name, torch.bfloat16), made(name, torch.bfloat16)
    _rounded_layers.round_weights(written, quantization, CPU)
    kind = _rounded_layers.KINDS[quantization].kept
    monkeypatch.setattr(kind, "serves", staticmethod(lambda dtype, device: True))
    _rounded_layers.round_weights(kept, quantization, CPU)
    assert any(isinstance(module, kind) for module in kept.modules())
    found, expected = logits(kept), logits(written)
    exact = logits(made(name, torch.float32))
    assert found.isfinite().all()
    assert (found - expected).abs().mean() < 0.5 * (expected - exact).abs().mean()
    engine = EngineConfig(depth=3, max_requests=2)
    recorded, eager = (PagedTransformers(copy.deepcopy(kept), None) for _ in range(2))
    recorded.plan_steps(planned("target", engine, 64))
    for backend in (recorded, eager):
        backend.allocate(BLOCKS, BLOCK)
    assert list(recorded.record_with(PlainRecorder()))
    for start, count in ((0, 7), (7, 1), (8, 4)):
        tables = (np.arange(0, 10, dtype=np.int32), np.arange(10, 20, dtype=np.int32))
        batch = ragged([Stretch(start, TOKENS[start : start + count], table, count) for table in tables])
        apart = (recorded.forward(batch) - eager.forward(batch)).abs().mean()
        assert apart < 0.5 * (expected - exact).abs().mean()
    assert recorded.graphs is not None
    assert recorded.graphs.replayed == 2


# ---- memory -------------------------------------------------------------------------------------------------


def held(model: nn.Module) -> int:
    """Bytes of all that a model holds, the rope's factors apart."""
    tensors = [*model.parameters(), *(each for name, each in model.named_buffers() if "inv_freq" not in name)]
    return sum(each.nbytes for each in tensors)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab_size", [128, 97])
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("kept", [False, True])
def test_the_plan_counts_what_is_held(
    tmp_path, tied: bool, vocab_size: int, quantization: str, kept: bool, request: pytest.FixtureRequest
) -> None:
    """Bytes and scales where bytes are kept, the dtype where they are not, or do not fit; a tied head beside it."""
    if kept:
        request.getfixturevalue("bytes_everywhere")
    llama(tie_word_embeddings=tied, vocab_size=vocab_size).save_pretrained(tmp_path)
    config = ModelConfig(source=str(tmp_path), quantization=quantization, dtype="bfloat16", device="cpu")
    model = loading.load_model(tmp_path, config)
    assert _memory_plan.held_bytes(tmp_path, config, CPU) == held(model)
    assert _rounded_layers.reads_bytes(config, CPU) == kept
    if kept and not tied:
        assert held(model) < 0.7 * _memory_plan.weight_bytes(tmp_path, config)


@pytest.mark.usefixtures("bytes_everywhere")
def test_a_gpu_needs_room_for_the_bytes_only(tmp_path) -> None:
    """Weights are rounded before they get there; a CPU holds them exact before."""
    llama().save_pretrained(tmp_path)
    config = ModelConfig(source=str(tmp_path), quantization="fp8", dtype="bfloat16")
    there_only = _memory_plan.held_bytes(tmp_path, config, GPU)
    assert _memory_plan.arriving_bytes(tmp_path, config, GPU) == there_only
    assert _memory_plan.arriving_bytes(tmp_path, config, CPU) == _memory_plan.weight_bytes(tmp_path, config)
    with pytest.raises(ConfigError, match=r"take 1048576\.0 GiB as bfloat16 with quantization fp8, and cpu has"):
        _memory_plan.check_weights("target", 1 << 50, config, CPU)


def test_a_worker_loads_an_fp8_target(tmp_path) -> None:
    """And says so; `auto` stays what it was."""
    folder = tiny_llama(tmp_path, seed=1)
    config = ModelConfig(source=str(folder), device="cpu", kv_blocks=64, quantization="fp8")
    backend, info = load_backend(config, "target", EngineConfig(batch_invariant=True))
    assert info.quantization == "fp8"
    assert "fp8 weights" in _memory_plan.line(info.memory, info.quantization)
    assert any(isinstance(module, Float8Rows) for module in backend.model.modules())
