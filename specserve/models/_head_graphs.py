"""Recorded steps of a draft head: `StepGraphs`, with states that come with the tokens and states that come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from specserve.models import RaggedBatch
from specserve.models._attention import KeyValueStore
from specserve.models._pages import Gathered, Pages
from specserve.models._recorder import Recorder
from specserve.models._static_plan import StaticInputs
from specserve.models._step_graphs import StepGraphs
from specserve.models._step_shapes import StepShape

HeadCompute = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, KeyValueStore], tuple[torch.Tensor, torch.Tensor]
]
"""From tokens [T], positions [T], states before them [T, width] and wanted indices [m] on the device, and the store:
float32 logits [m, V] and states [m, width]."""


def of_head(shapes: Sequence[StepShape]) -> tuple[StepShape, ...]:
    """The same shapes for a head."""
    return tuple(replace(shape, head=True) for shape in shapes)


class HeadGraphs:
    """Steps of shapes that are a head's. width is that of its states; the rest is as of `StepGraphs`, here `steps`.

    All shapes share both buffers of states: as many as the largest one reads, and shows.
    """

    def __init__(
        self,
        compute: HeadCompute,
        pages: Pages,
        shapes: Sequence[StepShape],
        recorder: Recorder,
        *,
        width: int,
        vocab_size: int,
        null_block: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._compute = compute
        most_read, most_shown = (max(getattr(shape, what) for shape in shapes) for what in ("positions", "logits"))
        self._before = torch.zeros(most_read, width, dtype=dtype, device=device)
        self._behind = torch.zeros(most_shown, width, dtype=dtype, device=device)
        self.steps = StepGraphs(
            self._step,
            pages,
            shapes,
            recorder,
            attention=Gathered(),
            vocab_size=vocab_size,
            null_block=null_block,
            dtype=dtype,
            device=device,
        )

    def run(
        self, batch: RaggedBatch, hidden: torch.Tensor, origins: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As `DraftHead.forward_from`, results to keep; None where no recorded step holds the batch.

        hidden must be on the device.
        """
        shape = self.steps.holding(batch)
        if shape is None:
            return None
        self._before[: len(hidden)].copy_(hidden)
        logits = self.steps.replay(shape, batch, origins)
        return logits, self._behind[: len(batch.wanted)].clone()

    def _step(self, inputs: StaticInputs, positions: torch.Tensor, store: KeyValueStore) -> torch.Tensor:
        assert inputs.states is not None, "all shapes are a head's"
        before = self._before.index_select(0, inputs.states.sources)
        logits, states = self._compute(inputs.tokens.view(-1), positions, before, inputs.wanted, store)
        self._behind[: len(states)].copy_(states)
        return logits
