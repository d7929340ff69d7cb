"""How draft dists are rounded, shipped and read."""

import numpy as np
import pytest
import torch

from specserve.errors import ProtocolError
from specserve.sampling import wire
from specserve.transport.messages import Dists

CPU = torch.device("cpu")


def some_dists(rows: int, width: int, scale: float = 3.0) -> torch.Tensor:
    return torch.softmax(torch.randn(rows, width, generator=torch.Generator().manual_seed(0)) * scale, -1)


def test_sparse_bytes_give_back_what_is_sampled_from() -> None:
    """Decoded rows are bit-equal to the rounded, renormalised rows that the draft draws from."""
    ids, probs = wire.sparsify(some_dists(7, 500), 64)
    shipped = wire.encode_sparse(ids, probs)
    assert shipped.rows.shape == (7, 64 * 6)
    assert torch.equal(wire.decode(shipped, 500, CPU).probs, wire.normalise(probs))


def test_dense_bytes_give_back_what_is_sampled_from() -> None:
    """Dense rows too, padded with zeros to a wider vocabulary."""
    rounded = some_dists(3, 50).half()
    decoded = wire.decode(wire.encode_dense(rounded), 60, CPU).dense(60)
    assert torch.equal(decoded[:, :50], wire.normalise(rounded))
    assert decoded[:, 50:].abs().sum() == 0


def test_sparse_and_dense_ship_the_same_dist() -> None:
    """With room for the whole support, both forms decode to the same bits."""
    dist = some_dists(5, 48)
    sparse = wire.decode(wire.encode_sparse(*wire.sparsify(dist, 64)), 48, CPU).dense(48)
    assert torch.equal(sparse, wire.decode(wire.encode_dense(dist.half()), 48, CPU).dense(48))


def test_rounding_comes_before_normalising() -> None:
    """Rows sum to 1 after float16 rounding, and tiny probabilities are truly 0."""
    dist = some_dists(4, 3000, scale=5.0)
    ids, probs = wire.sparsify(dist, 256)
    decoded = wire.decode(wire.encode_sparse(ids, probs), 3000, CPU).dense(3000)
    assert torch.allclose(decoded.sum(-1), torch.ones(4), atol=1e-6)
    assert ((decoded > 0).sum(-1) == (probs > 0).sum(-1)).all()


def test_unused_entries_do_not_disturb_id_zero() -> None:
    """A one-hot dist at id 0 survives, although unused entries carry id 0 as well."""
    dist = torch.zeros(1, 10)
    dist[0, 0] = 1
    ids, probs = wire.sparsify(dist, 4)
    assert ids.tolist() == [[0, 0, 0, 0]]
    assert torch.equal(wire.decode(wire.encode_sparse(ids, probs), 10, CPU).dense(10), dist)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_a_single_row_of_odd_width_is_read(k: int) -> None:
    """Rows whose bytes are no multiple of an id's are read as any others, one at a time too."""
    ids, probs = wire.sparsify(some_dists(1, 30), k)
    assert torch.equal(wire.decode(wire.encode_sparse(ids, probs), 30, CPU).ids, ids.long())


@pytest.mark.parametrize("k", [1, 3, 7, 64])
def test_a_single_row_of_any_width_decodes(k: int) -> None:
    """Also where a row's bytes are no multiple of an id's."""
    ids, rounded = wire.sparsify(some_dists(1, 9), k)
    decoded = wire.decode(wire.encode_sparse(ids, rounded), 9, CPU)
    expected = torch.zeros(1, 9).scatter_add_(1, ids.long(), wire.normalise(rounded))
    assert torch.equal(decoded.dense(9), expected)


def test_no_rows_decode_to_no_rows() -> None:
    """`Dists.none()` is [0, V]."""
    assert wire.decode(Dists.none(), 9, CPU).dense(9).shape == (0, 9)


def bytes_of(ids: list[int], probs: list[float]) -> np.ndarray:
    return np.concatenate([np.array(ids, "int32").view("uint8"), np.array(probs, "float16").view("uint8")])[None]


@pytest.mark.parametrize(
    "dists",
    [
        Dists("sparse", 2, bytes_of([0, 9], [0.5, 0.5])),
        Dists("sparse", 2, bytes_of([0, -1], [0.5, 0.5])),
        Dists("sparse", 2, bytes_of([0, 1], [0.5, -0.5])),
        Dists("sparse", 2, bytes_of([0, 1], [0.5, float("nan")])),
        Dists("sparse", 2, bytes_of([0, 1], [0.5, float("inf")])),
        Dists("sparse", 2, bytes_of([0, 1], [0.0, 0.0])),
        Dists("sparse", 3, bytes_of([0, 1], [0.5, 0.5])),
        Dists("dense", 10, np.full(10, 0.1, "float16").view("uint8")[None]),
    ],
)
def test_rows_that_are_no_dists_are_refused(dists: Dists) -> None:
    """Ids or mass outside the vocabulary, NaN, negative or no mass, and wrong sizes are protocol errors."""
    with pytest.raises(ProtocolError):
        wire.decode(dists, 9, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hidden_states_arrive_bit_for_bit(dtype: torch.dtype) -> None:
    """In their own dtype, values that are not finite among them; none at all are none."""
    states = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    states[1, 2], states[2, 0] = float("inf"), float("nan")
    shipped = wire.encode_hidden(states)
    assert shipped.rows.shape == (3, 5 * dtype.itemsize)
    found = wire.decode_hidden(shipped, 5)
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), states.view(torch.uint8))
    assert wire.decode_hidden(wire.encode_hidden(states[:0]), 5).shape == (0, 5)


def test_hidden_states_of_another_kind_are_refused() -> None:
    """Another width, and a dtype that does not travel, are protocol errors."""
    with pytest.raises(ProtocolError, match="4 float32 wide"):
        wire.decode_hidden(wire.encode_hidden(torch.zeros(3, 5)), 4)
    with pytest.raises(ProtocolError, match="do not travel"):
        wire.encode_hidden(torch.zeros(3, 5, dtype=torch.float64))
