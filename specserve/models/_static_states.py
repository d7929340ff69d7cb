"""What a recorded step of a draft head has besides: which of the states that came with the tokens each place reads, and
where rows begin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from specserve.models._step_shapes import StepShape

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StaticStates:
    """int64 views, on the device or on the host.

    sources [rows · queries], for each padded place the token of the batch that is there, 0 where there is none; origins
    [rows], the first position that a row may read.
    """

    sources: torch.Tensor
    origins: torch.Tensor

    @staticmethod
    def sizes(shape: StepShape) -> list[int]:
        """Elements of each; none where the shape is not a head's."""
        return [shape.positions, shape.rows] if shape.head else [0, 0]

    @staticmethod
    def of(shape: StepShape, sources: torch.Tensor, origins: torch.Tensor) -> StaticStates | None:
        """From flat views of these sizes; None where the shape is not a head's."""
        return StaticStates(sources, origins) if shape.head else None

    def fill(self, flat: Ints, origins: Ints) -> None:
        """Write a batch's own, and nothing of one before. On the host only.

        flat int64 [T]: where each token went among the padded ones; origins int64 [n].
        """
        self.sources.fill_(0)
        self.sources.numpy()[flat] = np.arange(len(flat))
        self.origins.fill_(0)
        self.origins.numpy()[: len(origins)] = origins

    def hidden(self, keys: torch.Tensor) -> torch.Tensor:
        """bool [rows, 1, L]: which keys at positions int64 [L] lie before a row's origin."""
        return (keys < self.origins[:, None])[:, None]
