"""Rows whose target dist is one-hot: the target's choices decide, and the host follows them.

There all rules with GREEDY_WALK say the same: keep what is drafted while it is what the target would choose. It takes
the ids that the target chose, which the host reads in any case, and no noise or dists.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specserve.transport.messages import Array
from specserve.verification._rows import Row
from specserve.verification.bookkeeping import NextPass, prepare_next_forward_pass, verify_speculative_tokens


def follow_choices(rows: Sequence[tuple[Row, int]], choices: Array, outcome: Array) -> None:
    """Write the last kept node, −1 for none, and the token after it into outcome int64 [2, …], at each row's index.

    outcome holds −1. Each due row comes with the place of its first logits; choices int64 [m] are the target's, by row
    of the logits.
    """
    chains: list[tuple[Row, int]] = []
    for row, at in rows:
        if row.parents is not None:
            mine = choices[at : at + len(row.chain) + 1].tolist()
            last = _last_kept(mine, row.chain.tolist(), row.parents)
            outcome[:, row.index] = last, mine[last + 1]
        elif len(row.chain):
            chains.append((row, at))
        else:
            outcome[1, row.index] = choices[at]
    if chains:
        _follow_chains(chains, choices, outcome)


def _follow_chains(chains: Sequence[tuple[Row, int]], choices: Array, outcome: Array) -> None:
    read = np.array([token for row, _ in chains for token in (0, *row.chain.tolist())])
    lengths = np.array([len(row.chain) + 1 for row, _ in chains])
    places = np.concatenate([np.arange(at, at + len(row.chain) + 1) for row, at in chains])
    chosen = choices[places]
    last, _ = verify_speculative_tokens(read, chosen, lengths)
    buffers = NextPass.empty(len(chains), 0)  # the coordinator knows the drafted ids
    prepare_next_forward_pass(read, chosen, lengths, np.ones(len(chains), bool), places, last, buffers)
    outcome[:, [row.index for row, _ in chains]] = buffers.counts - 1, buffers.sampled


def _last_kept(choices: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> int:
    """The end of the path in a tree that the target's choices, by place, go down; −1 where they leave it at once."""
    at = -1
    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        if parent == at and token == choices[at + 1]:
            at = node
    return at
