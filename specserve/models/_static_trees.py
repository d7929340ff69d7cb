"""The trees of a recorded step: which keys a node sees, from numbers that are written anew for each batch.

The same step serves any trees of up to so many nodes, and chains: what a node's path is, the step reads as bits. Who
belongs to no tree has all bits, and so sees what comes before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from specserve.models import RaggedBatch
from specserve.models._step_shapes import StepShape

Ints = npt.NDArray[np.int64]

_BITS = 64
_NOWHERE = np.iinfo(np.int32).max
"""A root behind every position that there may be."""


@dataclass(frozen=True, slots=True)
class StaticTrees:
    """A recorded step's trees, as int64 views, on the device or on the host.

    roots [rows], each tree's first position; levels [rows, nodes], how many nodes come before each one on its path;
    paths [rows, queries, words], of each query the nodes on its path as bits, 64 in a word.
    """

    roots: torch.Tensor
    levels: torch.Tensor
    paths: torch.Tensor

    @staticmethod
    def sizes(shape: StepShape) -> list[int]:
        """Elements of each; none where the shape has no trees."""
        if not shape.nodes:
            return [0, 0, 0]
        return [shape.rows, shape.rows * shape.nodes, shape.positions * -(-shape.nodes // _BITS)]

    @staticmethod
    def of(shape: StepShape, roots: torch.Tensor, levels: torch.Tensor, paths: torch.Tensor) -> StaticTrees | None:
        """From flat views of these sizes; None where the shape has no trees."""
        if not shape.nodes:
            return None
        return StaticTrees(roots, levels.view(shape.rows, -1), paths.view(shape.rows, shape.queries, -1))

    def fill(self, batch: RaggedBatch, flat: Ints) -> None:
        """Write a batch's trees, and nothing of any that were there before. On the host only.

        flat int64 [T]: where each token went among the padded ones.
        """
        roots, levels, paths = (view.numpy() for view in (self.roots, self.levels, self.paths))
        roots.fill(_NOWHERE)
        levels.fill(0)
        paths.fill(-1)
        words = paths.reshape(-1, paths.shape[-1])
        for row in batch.trees:
            tree, mine = batch.tree_of(row), slice(batch.offsets[row], batch.offsets[row + 1])
            count = len(tree.parents)
            if count:
                roots[row] = tree.root
                levels[row, :count] = tree.levels()
                nodes = batch.positions[mine] - tree.root
                words[flat[mine][nodes >= 0]] = _words(tree.paths(), words.shape[1])[nodes[nodes >= 0]]

    def standing(self, positions: torch.Tensor) -> torch.Tensor:
        """int64 like positions [rows, m] in pages: how many tokens come before each, in its own continuation."""
        nodes = positions - self.roots[:, None]
        levels = self.levels.gather(1, nodes.clamp(0, self.levels.shape[1] - 1))
        return torch.where(nodes < 0, positions, self.roots[:, None] + levels)

    def off_path(self, keys: torch.Tensor) -> torch.Tensor:
        """bool [rows, queries, L]: which keys at positions int64 [L] are nodes that are not on a query's path."""
        nodes = keys - self.roots[:, None]
        bits = nodes.clamp(0, self.paths.shape[2] * _BITS - 1)[:, None].expand(-1, self.paths.shape[1], -1)
        seen = self.paths.gather(2, bits // _BITS) >> bits % _BITS & 1
        return (seen == 0) & (nodes >= 0)[:, None]


def _words(paths: npt.NDArray[np.bool_], words: int) -> Ints:
    """int64 [N, words]: the bits of bool [N, N]."""
    padded = np.zeros((len(paths), words * _BITS), dtype=np.bool_)
    padded[:, : paths.shape[1]] = paths
    found: Ints = np.packbits(padded, axis=1, bitorder="little").view("<i8")
    return found
