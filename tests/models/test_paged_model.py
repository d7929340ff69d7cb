"""What backends with pages have in common."""

from __future__ import annotations

import pytest
import torch

from specserve.errors import ConfigError
from specserve.models import Backend
from specserve.models._paged_model import AttentionModel
from specserve.models._pages import LayerLayout

WIDTH = LayerLayout(kv_heads=2, key_dim=8, value_dim=4, dtype=torch.float16, window=None)


class Two(AttentionModel):
    """Two layers that keep the same."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), torch.float16, 64)
        self._layouts, self._vocab_size = {0: WIDTH, 1: WIDTH}, 10


def test_bytes_are_those_of_keys_and_values_of_all_layers() -> None:
    """2 layers × 3 positions × 2 heads × (8 + 4) numbers of 2 bytes, and pages take just that."""
    model = Two()
    assert model.bytes_per_block(3) == 2 * 3 * 2 * 12 * 2
    model.allocate(5, 3)
    stores = [*model._pages.keys.values(), *model._pages.values.values()]
    assert sum(store.nbytes for store in stores) == 5 * model.bytes_per_block(3)


def test_pages_are_refused_in_words() -> None:
    """Where nothing was allocated yet, and where there is no room for them."""
    with pytest.raises(ConfigError, match="Two has no pages yet; call allocate first"):
        Two().copy_blocks([0], [1])
    with pytest.raises(ConfigError, match=r"no room for .* GiB of KV pages on cpu"):
        Two().allocate(1 << 40, 16)


def test_its_facts_are_those_that_a_backend_needs() -> None:
    """All but `forward` and `make_batch_invariant`, which are each backend's own."""
    wanted = {name for name in vars(Backend) if not name.startswith("_")}
    assert {name for name in wanted if not hasattr(Two, name)} == {"forward", "make_batch_invariant"}
    model = Two()
    assert (model.vocab_size, model.context_length, model.device.type, model.place) == (10, 64, "cpu", model.place)
    assert model.states.covered(1, 7) == 7
