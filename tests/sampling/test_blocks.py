"""Rows over a vocabulary as blocks."""

import pytest
import torch

from specserve.sampling import blocks


@pytest.mark.parametrize("width", [1, 3, 4, 5, 64, 130])
def test_blocks_are_reduced_each_for_itself(width: int) -> None:
    """Sums and maxima of blocks of 4, the last one short, are those of the slices."""
    rows = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).double()
    slices = rows.split(4, 1)
    assert torch.allclose(blocks.sums(rows, 4), torch.stack([part.sum(-1) for part in slices], 1))
    assert torch.equal(blocks.maxima(rows, 4), torch.stack([part.amax(-1) for part in slices], 1))


@pytest.mark.parametrize("width", [1, 63, 64, 65, 1000])
def test_the_largest_is_found_where_torch_finds_it(width: int) -> None:
    """The lowest place on ties, within a block and across blocks, also among infinities; a NaN comes before all."""
    rows = torch.randint(5, (400, width), generator=torch.Generator().manual_seed(width)).float()
    rows[5:10] = -torch.inf
    rows[10:20, width // 2] = torch.inf
    rows[20:30, width // 3 :] = torch.nan
    assert torch.equal(blocks.argmax(rows), rows.argmax(-1))
    places, values = blocks.peaks(rows)
    assert torch.equal(places, rows.argmax(-1))
    assert torch.equal(values.nan_to_num(9.0), rows.amax(-1).nan_to_num(9.0))
