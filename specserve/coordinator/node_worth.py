"""What the nodes of a tree are worth: how likely the path that the target keeps goes through each of them.

Where a place has children, the target goes on with the first of them, the second, …, or with none, each so often as was
seen at that level; a node is worth the product along its path. So the most valuable nodes of every size are one inside
the other, and each is behind its parent (a tree by measured acceptance: Sequoia, Chen et al. 2024). Which tokens the
nodes will be is not known here, and plays no part.
"""

from __future__ import annotations

import numpy as np

from specserve.coordinator.round_costs import FloatArray
from specserve.transport.messages import Array
from specserve.tree_shape import TreeShape


def node_worths(shares: FloatArray, shape: TreeShape) -> tuple[FloatArray, Array]:
    """float64 [rows, n] worths of the nodes that a tree of this shape may have, falling, and int [rows, n] levels.

    shares float64 [rows, levels, width]: how often the target goes on with the child of that rank, of a place whose
    children are of that level. Levels count from 0.
    """
    rows, depth = shares.shape[:2]
    if shape.widest == 1:
        depth = min(depth, shape.most_nodes)
        return np.cumprod(shares[:, :depth, 0], axis=1, dtype=np.float64), np.tile(np.arange(depth), (rows, 1))
    places = np.ones((rows, 1))
    worths: list[FloatArray] = []
    for level in range(depth):
        children = places[:, :, None] * shares[:, level, None, : shape.children(level)]
        found = _largest(children.reshape(rows, -1), shape.most_nodes)
        worths.append(found)
        places = found if shape.parents_in_level is None else found[:, : shape.parents_in_level]
    everywhere = np.concatenate(worths, axis=1)
    levels = np.repeat(np.arange(depth), [found.shape[1] for found in worths])
    order = np.argsort(-everywhere, axis=1, kind="stable")[:, : shape.most_nodes]  # stable: parents before children
    return np.take_along_axis(everywhere, order, axis=1), levels[order]


def _largest(values: FloatArray, most: int) -> FloatArray:
    return -np.sort(-values, axis=1)[:, :most]
