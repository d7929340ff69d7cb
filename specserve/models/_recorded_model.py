"""What backends have in common whose usual steps are recorded: each says how its own are, and what they take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from specserve.models._paged_model import AttentionModel
from specserve.models._recorder import CudaRecorder, PlainRecorder, Recorder
from specserve.models._step_shapes import StepShape


class RecordedModel(AttentionModel, ABC):
    """An `AttentionModel` that is `RecordsSteps`, where steps are planned."""

    _planned: tuple[StepShape, ...] = ()

    def plan_steps(self, shapes: Sequence[StepShape]) -> None:
        """See `RecordsSteps`."""
        self._planned = tuple(shapes)
        self._spare_blocks = 1 if shapes else 0

    @property
    def planned_steps(self) -> int:
        """See `RecordsSteps`."""
        return len(self._planned)

    @abstractmethod
    def step_bytes(self, block_tokens: int) -> int:
        """See `RecordsSteps`."""

    @abstractmethod
    def record_with(self, recorder: Recorder) -> Iterator[StepShape]:
        """`record_steps` by a way of one's own."""

    def record_steps(self) -> Iterator[StepShape]:
        """See `RecordsSteps`."""
        yield from self.record_with(CudaRecorder(self._device) if self._device.type == "cuda" else PlainRecorder())

    def _null_block(self) -> int:
        """The block behind those that are given out. Raises ConfigError before `allocate`."""
        pages = self.pages
        return next(iter(pages.keys.values())).shape[0] // pages.block_tokens - 1
