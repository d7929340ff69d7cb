"""Recorded steps of a model on paged KV: a batch that one of them holds is copied in, replayed and cut out.

Launching a step's operators one by one takes the host longer than they take a GPU where rows are few: a draft's step
most of all. So the usual steps are recorded for rising sizes, and replayed at one launch each; see `_step_shapes` for
which batch takes which. All shapes share their buffers, as only one of them runs at a time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from specserve.models import RaggedBatch
from specserve.models._attention import KeyValueStore
from specserve.models._pages import LayerLayout, PagedAttention, PagedStep, Pages
from specserve.models._recorder import Recorder, Step
from specserve.models._staging import Staging
from specserve.models._static_plan import Ints, StaticInputs, StaticPlan
from specserve.models._step_shapes import StepShape, by_cost, dispatched

Compute = Callable[[StaticInputs, torch.Tensor, KeyValueStore], torch.Tensor]
"""From inputs and positions [T] on the device, and the store: float32 logits [m, V] of the wanted places."""


_PER_GRAPH = 4 << 20
"""What a driver keeps of one recorded step of a few hundred launches; assumed, not measured."""


def graph_bytes(
    shapes: Iterable[StepShape],
    layouts: Iterable[LayerLayout],
    block_tokens: int,
    *,
    vocab_size: int,
    heads: int,
    width: int,
    itemsize: int,
) -> int:
    """Bytes that recorded steps take, about: buffers, the spare block, and what the step that needs most works in.

    They share one pool, in which layers use the same memory one after the other. width is that of the widest state.
    """
    shapes, layouts = list(shapes), list(layouts)
    per_position = max((layout.bytes_per_position for layout in layouts), default=0)

    def worked_in(shape: StepShape) -> int:
        read = 2 * shape.rows * shape.keys * per_position  # gathered, and once more as the product wants them
        scores = 2 * shape.positions * heads * shape.keys * itemsize  # where they are made at all, and their mask
        if shape.nodes:
            scores += 3 * 8 * shape.positions * shape.keys  # words that tell paths, and which of them, and where
        return read + scores + 8 * shape.positions * width * itemsize + 2 * shape.logits * vocab_size * itemsize

    def kept_by(shape: StepShape) -> int:
        states = (shape.positions + shape.logits) * width * itemsize if shape.head else 0
        return states + 4 * shape.logits * vocab_size + 16 * StaticInputs.size(shape, block_tokens)

    spare = block_tokens * sum(layout.bytes_per_position for layout in layouts)
    return max(map(kept_by, shapes)) + spare + max(map(worked_in, shapes)) + len(shapes) * _PER_GRAPH


class StepGraphs:
    """pages must have a block behind those that are given out, `null_block`, for what padding writes.

    states gives the hidden states [T, width] of what was computed last, where somebody reads them.
    """

    def __init__(
        self,
        compute: Compute,
        pages: Pages,
        shapes: Sequence[StepShape],
        recorder: Recorder,
        *,
        attention: PagedAttention,
        states: Callable[[], torch.Tensor] | None = None,
        vocab_size: int,
        null_block: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._compute = compute
        self._pages = pages
        self._recorder = recorder
        self._attention = attention
        self._compute_states = states
        self._states: torch.Tensor | None = None
        self._places: Ints = np.empty(0, np.int64)
        self._null_block = null_block
        self._dtype = dtype
        self._staging = Staging(max(StaticInputs.size(shape, pages.block_tokens) for shape in shapes), device)
        self._logits = torch.zeros(max(shape.logits for shape in shapes), vocab_size, device=device)
        self._planned = by_cost(shapes)
        self._replays: dict[StepShape, Step] = {}
        self._recorded: tuple[StepShape, ...] = ()
        self.replayed = 0
        self.eager = 0

    @torch.inference_mode()
    def record(self) -> Iterator[StepShape]:
        """Record all steps, the largest first, whose memory the smaller ones use again; yields each one done.

        Raises RuntimeError where a step cannot be recorded.
        """
        gc.freeze()  # each capture collects garbage, which takes longer than the capture where there are many objects
        try:
            for shape in reversed(self._planned):
                self._staging.device_words.zero_()
                self._replays[shape] = self._recorder.record(self._step(shape))
                yield shape
        finally:
            gc.unfreeze()
        self._recorded = self._planned

    def run(self, batch: RaggedBatch) -> torch.Tensor | None:
        """Float32 logits [m, V] of the wanted tokens, to keep; None where no recorded step holds the batch."""
        shape = self.holding(batch)
        return None if shape is None else self.replay(shape, batch)

    def holding(self, batch: RaggedBatch) -> StepShape | None:
        """The step that is to compute a batch, or None, which is counted."""
        shape = dispatched(batch, self._recorded)
        self.eager += shape is None
        return shape

    def replay(self, shape: StepShape, batch: RaggedBatch, origins: Ints | None = None) -> torch.Tensor:
        """As `run`, by a step that holds the batch; a head's needs origins int64 [n]."""
        self._staging.free()
        inputs = self._inputs(self._staging.host_words, shape)
        self._places = inputs.fill(batch, self._null_block)
        if inputs.states is not None:
            assert origins is not None, "whoever replays a head's step knows where its rows begin"
            inputs.states.fill(self._places, origins)
        self._staging.send(StaticInputs.size(shape, self._pages.block_tokens))
        self._replays[shape]()
        self.replayed += 1
        return self._logits[: len(batch.wanted)].clone()

    def observed(self) -> torch.Tensor:
        """Hidden states [T, width] of the tokens of the last replay."""
        assert self._states is not None, "somebody reads them, and a step was recorded"
        places = torch.from_numpy(self._places).to(self._states.device, non_blocking=True)
        return self._states[places]

    def _keep_states(self, shape: StepShape) -> None:
        """Copy what was computed to where all recorded steps leave it; the first of them to run has the most."""
        if self._compute_states is None:
            return
        found = self._compute_states()
        if self._states is None:
            most = max(each.positions for each in self._planned)
            self._states = found.new_zeros(most, found.shape[1])
        self._states[: shape.positions].copy_(found)

    def _inputs(self, words: torch.Tensor, shape: StepShape) -> StaticInputs:
        return StaticInputs.within(words, shape, self._pages.block_tokens)

    def _step(self, shape: StepShape) -> Step:
        inputs, logits = self._inputs(self._staging.device_words, shape), self._logits[: shape.logits]
        null_slot = self._null_block * self._pages.block_tokens

        def step() -> None:
            plan = StaticPlan(shape, inputs, self._pages.block_tokens, null_slot, self._dtype)
            store = PagedStep(self._pages, plan, self._attention)
            logits.copy_(self._compute(inputs, plan.positions, store))
            self._keep_states(shape)

        return step
