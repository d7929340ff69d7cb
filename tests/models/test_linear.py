"""Packed and joint linear layers say what the plain ones say, whatever asks them and in whatever order."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_causal import CONFIGS, tiny
from torch import nn

from specserve.errors import ConfigError
from specserve.models import _large_pages, _linear, _panels


@pytest.fixture(autouse=True, params=["our own", "oneDNN"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where there is a compiler, and where there is none."""
    if request.param == "oneDNN":
        monkeypatch.setattr(_panels, "kernels", lambda: None)
    elif _panels.kernels() is None:
        pytest.skip("needs a C compiler with OpenMP")
    return request.param


class _Layer(nn.Module):
    """What a decoder layer has: three layers of one input, two of another, and one of its own."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        for name, outputs in (("q_proj", 24), ("k_proj", 8), ("v_proj", 8), ("gate_proj", 40), ("up_proj", 40)):
            setattr(self, name, nn.Linear(16, outputs, bias=bias))
        self.down_proj = nn.Linear(40, 16, bias=bias)


JOINT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def pair(*, bias: bool) -> tuple[_Layer, _Layer]:
    """A plain layer, and the same one sped up."""
    torch.manual_seed(0)
    plain = _Layer(bias=bias).requires_grad_(False)
    fast = copy.deepcopy(plain)
    _linear.speed_up(fast)
    return plain, fast


def products(model: nn.Module) -> list[_linear.PackedLinear]:
    return [module for module in model.modules() if isinstance(module, _linear.PackedLinear)]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 9, 40])
def test_any_number_of_rows_gives_the_plain_result(count: int, bias: bool) -> None:
    """Few rows are filled up and many are not; every layer's part is its own."""
    plain, fast = pair(bias=bias)
    rows, wide = torch.randn(1, count, 16), torch.randn(1, count, 40)
    for name in JOINT:
        close(getattr(fast, name)(rows), getattr(plain, name)(rows))
    close(fast.down_proj(wide), plain.down_proj(wide))


@pytest.mark.parametrize("count", [2, 3])
def test_rows_that_fill_up_change_nothing(count: int) -> None:
    """As many rows as there are come back from oneDNN, in their order, however many are computed."""
    plain, _ = pair(bias=False)
    product = _linear.OneDnn([plain.down_proj])
    rows = torch.randn(count, 40)
    for fewest in (1, 2, 4, 7):
        product.fewest_rows = fewest
        close(product(rows), plain.down_proj(rows))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_rows_product_has_the_same_bits_in_any_company(kernels: str, threads: int) -> None:
    """Ours, by any number of threads; widths that fill no panel, and rows that fill no strip."""
    if kernels == "oneDNN":
        pytest.skip("oneDNN's differ for a lone row")
    torch.manual_seed(1)
    packed = _linear.PackedLinear([nn.Linear(130, outputs) for outputs in (7, 200, 33)])
    rows = torch.randn(64, 130)
    alone = torch.cat([packed(row[None]) for row in rows])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for count in (2, 5, 12, 13, 25, 64):
            assert torch.equal(packed(rows[:count]), alone[:count])
    finally:
        torch.set_num_threads(before)


def test_parts_may_be_asked_for_in_any_order_and_with_any_input() -> None:
    """Twice the same part, parts out of order, and another input in between: never what another input gave."""
    plain, fast = pair(bias=False)
    first, second = torch.randn(3, 16), torch.randn(3, 16)
    asked = [("k", first), ("k", first), ("q", second), ("v", first), ("q", first), ("v", second)]
    for name, rows in [(f"{letter}_proj", rows) for letter, rows in asked]:
        close(getattr(fast, name)(rows), getattr(plain, name)(rows))


def test_one_product_serves_layers_of_one_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three and two layers cost one product each, and nothing is kept once all parts were fetched."""
    _, fast = pair(bias=False)
    calls = []
    plain_forward = _linear.PackedLinear.forward
    monkeypatch.setattr(
        _linear.PackedLinear, "forward", lambda self, rows: calls.append(self) or plain_forward(self, rows)
    )
    rows = torch.randn(1, 16)
    for name in JOINT:
        getattr(fast, name)(rows)
    assert len(calls) == 2
    assert fast.q_proj._joint._rows is None
    assert not fast.q_proj._joint._found


def test_layers_that_differ_stay_apart() -> None:
    """Another width of input, or a bias for some only: each has its own product."""
    uneven = _Layer(bias=False)
    uneven.up_proj = nn.Linear(12, 40, bias=False)
    uneven.v_proj = nn.Linear(16, 8, bias=True)
    uneven.requires_grad_(False)
    plain = copy.deepcopy(uneven)
    _linear.speed_up(uneven)
    assert len(products(uneven)) == 6
    close(uneven.v_proj(torch.ones(2, 16)), plain.v_proj(torch.ones(2, 16)))


def test_a_subclass_and_another_dtype_are_left_alone() -> None:
    """A subclass may compute something else, and the operator is there for float32 only."""

    class Doubling(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(rows)

    model = nn.ModuleDict({"doubling": Doubling(4, 4), "narrow": nn.Linear(4, 4, dtype=torch.bfloat16)})
    _linear.speed_up(model)
    assert not products(model)
    with pytest.raises(ConfigError, match=r"stays a plain linear layer \(torch\.float32"):
        _linear.make_invariant(model)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_every_family_has_its_layers_packed(family: str) -> None:
    """No plain linear layer is left, a tied head included, and at most four products are left in each layer."""
    model = tiny(family)
    _linear.speed_up(model)
    assert not [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(products(model)) <= 4 * model.config.num_hidden_layers + 1


def test_many_weights_share_a_large_piece_of_memory_and_none_overlap() -> None:
    """Each begins where a vector may, keeps what it is given, and one larger than a piece has its own."""
    arena = _large_pages.Arena()
    counts = [5, 16, 100_000, 1 << 24, (1 << 24) + 1, 7]
    taken = [arena.floats(count) for count in counts]
    for number, floats in enumerate(taken):
        floats[[0, -1]] = float(number)
    assert [len(floats) for floats in taken] == counts
    assert all(floats.data_ptr() % 64 == 0 for floats in taken)
    assert [floats[[0, -1]].tolist() for floats in taken] == [[float(number)] * 2 for number in range(len(counts))]


@pytest.mark.parametrize("kernels", ["our own"], indirect=True)
@pytest.mark.parametrize("rows", [torch.zeros(2, 7), torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(8)])
def test_rows_of_another_shape_or_type_are_refused(kernels, rows):
    """C would read behind their end."""
    panels = _panels.Panels([torch.nn.Linear(8, 3)], _panels.kernels())
    with pytest.raises(IndexError, match=r"float32 \[n, 8\]"):
        panels(rows)
