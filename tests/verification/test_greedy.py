"""Greedy rows, which the host follows, keep what a walk over tensors keeps."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_messages import opened

from specserve.sampling.profiles import Profiles
from specserve.verification._greedy import follow_choices
from specserve.verification._rows import Row
from specserve.verification._tree import DraftTree, follow

PROFILES = Profiles()
PROFILES.open(opened(0, tokens=(1, 2), prompt_length=1, temperature=0.0))
PROFILE = PROFILES.find(0, 0)


def row(index: int, tokens: list[int], parents: tuple[int, ...] | None) -> Row:
    nothing = np.empty(0, np.int32)
    return Row(index, index, PROFILE, 1, np.array([2]), np.array(tokens, np.int32), nothing, nothing, True, parents)


@st.composite
def drafts(draw: st.DrawFn) -> tuple[list[int], tuple[int, ...] | None]:
    """Tokens of a vocabulary of three, so that matches are common; a chain, or a tree with parents before children."""
    tokens = draw(st.lists(st.integers(0, 2), max_size=7))
    if not tokens or draw(st.booleans()):
        return tokens, None
    return tokens, tuple(draw(st.integers(-1, node - 1)) for node in range(len(tokens)))


@settings(deadline=None)
@given(st.lists(drafts(), min_size=1, max_size=6), st.data())
def test_the_host_keeps_what_a_walk_over_tensors_keeps(drafted, data):
    """Chains, empty ones too, and trees in one batch, in any order; rows of others between them stay as they are."""
    total = sum(len(tokens) + 1 for tokens, _ in drafted)
    choices = np.array(data.draw(st.lists(st.integers(0, 2), min_size=total, max_size=total)))
    order = data.draw(st.permutations(range(len(drafted) + 1)))[:-1]  # one place belongs to nobody
    rows, wanted, at = [], np.full((2, len(drafted) + 1), -1), 0
    for index, (tokens, parents) in zip(order, drafted, strict=True):
        rows.append((row(index, tokens, parents), at))
        above = list(range(-1, len(tokens) - 1)) if parents is None else list(parents)
        tree = DraftTree(torch.tensor([above], dtype=torch.long), torch.tensor([tokens], dtype=torch.long))
        last, after = follow(torch.from_numpy(choices[at : at + len(tokens) + 1])[None], tree)
        wanted[:, index] = int(last), int(after)
        at += len(tokens) + 1
    outcome = np.full((2, len(drafted) + 1), -1)
    follow_choices(rows, choices, outcome)
    assert outcome.tolist() == wanted.tolist()
