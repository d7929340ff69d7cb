"""Picking in one call of C picks, keeps and ranks what the operations one after the other do, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from specserve import native
from specserve.drafting import Trunk, _ahead, _kernels
from specserve.drafting._chains import Chain, Picker, chances_of
from specserve.drafting.workspace import SparseDists, Workspace
from specserve.errors import ProtocolError
from specserve.sampling import _kernels as row_kernels
from specserve.sampling.profiles import Profile

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler with OpenMP")

CPU = torch.device("cpu")
DEPTH = 3
PLAIN = Profile(0, 1.0, 1.0, 0, "rejection", 7)


class Picked:
    """Some chains grown to their depth from the same logits, and all that is left in the workspace."""

    def __init__(self, chains: list[tuple[Profile, bool]], logits: torch.Tensor, vocab: int, k: int, ranks: int):
        count = len(chains)
        store = SparseDists(DEPTH * count + 1, min(k, vocab), CPU)
        self.workspace = Workspace(DEPTH * count + 1, store, CPU, ranks=ranks)
        slots = np.random.default_rng(1).permutation(DEPTH * count + 1)[: DEPTH * count].reshape(count, DEPTH)
        self.chains = [
            Chain(profile, 2**31 + row, list(slots[row]), raced, before=[5] * (row % 3))
            for row, (profile, raced) in enumerate(chains)
        ]
        picker = Picker(self.chains, vocab, self.workspace)
        for step in range(DEPTH):  # rows leave, and one comes back
            rows = [row for row in range(count) if step == 0 or row % (step + 1) == 0]
            picker.pick(rows, logits[[step * count + row for row in rows]].clone())
        self.tokens = [chain.tokens for chain in self.chains]
        self.healthy = [chain.healthy for chain in self.chains]
        everything = np.arange(DEPTH * count + 1)
        self.kept = self.workspace.ship(everything).rows
        self.ranked = self.workspace.ranked(everything)


def called(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each call of the kernel picked."""
    rows = []
    plain = _kernels.pick

    def pick(logits, vocab_size, chances, tokens, kept):
        found = plain(logits, vocab_size, chances, tokens, kept)
        rows.append(0 if found is None else len(found[0]))
        return found

    monkeypatch.setattr(_kernels, "pick", pick)
    return rows


def same(monkeypatch: pytest.MonkeyPatch, *case: object) -> Picked:
    """Picked in one call, once it was the same as in several."""
    at_once = Picked(*case)
    with monkeypatch.context() as patched:
        patched.setattr(_kernels, "pick", lambda *_: None)
        in_several = Picked(*case)
    assert at_once.tokens == in_several.tokens
    assert at_once.healthy == in_several.healthy
    assert (at_once.kept == in_several.kept).all()
    assert at_once.ranked == in_several.ranked
    return at_once


def mixed(count: int) -> list[tuple[Profile, bool]]:
    """Greedy, drawn and raced chains of many temperatures, with seeds and branches at their limits."""
    seeds = (0, -1, 2**63 - 1, -(2**63), 12345)
    heats = (1.0, 0.0, 0.3, 5.0, 0.7, 1e-3)
    chains = []
    for row in range(count):
        heat = float(np.float32(heats[row % len(heats)]))
        profile = replace(PLAIN, temperature=heat, seed=seeds[row % len(seeds)], branch=row % 4)
        chains.append((profile, heat > 0 and row % 2 == 0))
    return chains


def some_logits(count: int, width: int, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randn(DEPTH * count, width, generator=generator) * scale


@pytest.mark.parametrize("ranks", [0, 1, 4])
@pytest.mark.parametrize(("vocab", "width"), [(1, 1), (5, 9), (63, 64), (458, 458), (1000, 1003), (5000, 5000)])
def test_rules_and_temperatures_of_one_batch(monkeypatch, vocab: int, width: int, ranks: int) -> None:
    """Vocabularies with and without padding, smaller and larger than what is kept, also with fewer ids than ranks."""
    rows = called(monkeypatch)
    for k in (2, 64):
        for count in (1, 2, 13):
            same(monkeypatch, mixed(count), some_logits(count, width), vocab, k, ranks)
    assert all(rows)


@pytest.mark.parametrize("raced", [True, False])
def test_batches_of_one_rule(monkeypatch, raced: bool) -> None:
    """All are raced for, or drawn; flat and sharp dists over a whole vocabulary, in a batch that threads share."""
    for scale in (0.01, 1.0, 20.0):
        same(monkeypatch, [(PLAIN, raced)] * 40, some_logits(40, 50_000, scale), 50_000, 64, 4)


@pytest.mark.parametrize("ranks", [0, 1, 4])
def test_greedy_batches(monkeypatch, ranks: int) -> None:
    """Tokens and rankings by logits alone, whatever would filter a dist; the lowest id of equal ones is picked."""
    rows = called(monkeypatch)
    chains = [(replace(PLAIN, temperature=0.0, top_p=0.5), False)] * 5
    logits = some_logits(5, 600)
    at_once = Picked(chains, logits, 599, 64, ranks)
    with monkeypatch.context() as patched:
        patched.setattr(_kernels, "pick", lambda *_: None)
        in_several = Picked(chains, logits, 599, 64, ranks)
    assert (at_once.tokens, at_once.ranked) == (in_several.tokens, in_several.ranked)
    assert Picked(chains, torch.zeros(15, 600), 599, 64, ranks).tokens[0] == [0, 0, 0]
    assert all(rows)


@pytest.mark.parametrize("raced", [True, False])
def test_ties_are_settled_alike(monkeypatch, raced: bool) -> None:
    """Equal logits everywhere, at the end of what is kept, and of few values: the lower id comes first."""
    logits = torch.cat([some_logits(4, 700), some_logits(4, 700).round(), torch.zeros(12, 700)])
    logits[0, 100:300] = logits[0].max()
    picked = same(monkeypatch, [(PLAIN, raced)] * 8, logits, 700, 64, 4)
    assert len(picked.kept) == 25


def test_impossible_ids_and_what_is_no_number(monkeypatch) -> None:
    """Rows with one id, and rows that end their chains: nothing allowed, NaN, infinity."""
    rows = called(monkeypatch)
    chains = [(PLAIN, True), (PLAIN, False)] * 2
    logits = some_logits(4, 300)
    logits[:2, 1:299] = -torch.inf
    logits[2:4, ::3] = -torch.inf
    same(monkeypatch, chains, logits, 299, 64, 4)
    for value in (torch.nan, torch.inf, -torch.inf):
        logits[4:, 7 if value != -torch.inf else slice(None)] = value
        picked = Picked(chains, logits.clone(), 299, 64, 4)
        assert picked.healthy == [1, 1, 1, 1]
        assert all(0 <= token < 299 for tokens in picked.tokens for token in tokens)
    assert all(rows)


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}], ids=str)
def test_filtered_dists_take_the_other_way(monkeypatch, options: dict) -> None:
    """One such row in a batch decides for all; a greedy one has nothing to filter."""
    rows = called(monkeypatch)
    filtered = replace(PLAIN, **options)
    same(monkeypatch, [(PLAIN, False), (filtered, False)], some_logits(2, 500), 500, 64, 4)
    assert not rows
    same(monkeypatch, [(PLAIN, False), (replace(filtered, temperature=0.0), False)], some_logits(2, 500), 500, 64, 4)
    assert all(rows)


def test_rows_do_not_depend_on_their_company() -> None:
    """Each chain of a large batch gets what it gets alone."""
    chains, logits = mixed(20), some_logits(20, 900)
    together = Picked(chains, logits, 900, 64, 4)
    for row in range(0, 20, 6):
        chain = together.chains[row]
        space = Workspace(70, SparseDists(70, 64, CPU), CPU, ranks=4)
        alone = Chain(chain.profile, chain.base, chain.slots, chain.shared_noise, before=chain.before)
        picker = Picker([alone], 900, space)
        for step in range(len(chain.tokens)):
            picker.pick([0], logits[[step * 20 + row]])
        assert alone.tokens == chain.tokens
        mine = np.array(chain.slots[: len(chain.tokens)])
        assert space.ranked(mine) == together.workspace.ranked(mine)


def test_what_would_be_read_or_written_elsewhere_is_refused() -> None:
    """Slots that there are not, and rows that are too few or too narrow."""
    space = Workspace(4, SparseDists(4, 8, CPU), CPU, ranks=2)
    chances = chances_of([Chain(PLAIN, 0, [0], False)])
    assert chances is not None
    for slot in (-1, 4):
        with pytest.raises(ProtocolError):
            space.pick(torch.zeros(1, 20), 20, chances, np.array([[0, 0, slot]]))
    for chain in (-1, 1):
        with pytest.raises(IndexError, match="not all among 1"):
            space.pick(torch.zeros(1, 20), 20, chances, np.array([[chain, 0, 0]]))
    assert not space.ship(np.arange(4)).rows.any()
    with pytest.raises(IndexError, match="1 rows of 21 logits"):
        space.pick(torch.zeros(1, 20), 21, chances, np.array([[0, 0, 0]]))
    with pytest.raises(IndexError, match="2 rows of 20 logits"):
        space.pick(torch.zeros(1, 20), 20, chances, np.array([[0, 0, 0], [0, 0, 1]]))
    assert space.pick(torch.zeros(1, 20).double(), 20, chances, np.array([[0, 0, 0]])) is None


@pytest.mark.parametrize("width", [3, 200, 2000])
def test_races_are_foreseen_alike(monkeypatch, width: int) -> None:
    """What may follow a whole chain, among raced and other requests, whose logits need not be fit to be raced for."""
    nothing = np.empty(0, dtype=np.int64)
    trunks = [
        Trunk(0, nothing, nothing, profile, raced, row, [], nothing) for row, (profile, raced) in enumerate(mixed(9))
    ]
    ends = [Chain(trunk.profile, trunk.base, nothing, trunk.shared_noise) for trunk in trunks]
    logits = some_logits(3, width)
    logits[4, ::2] = -torch.inf
    space = Workspace(1, SparseDists(1, 4, CPU), CPU, ranks=5)
    growth = _ahead.AheadGrowth(trunks, [], space, width)
    for some in (slice(0, 9), slice(0, 9, 2), slice(1, 9, 2)):
        at_once = growth._ranked(ends[some], logits[some])
        with monkeypatch.context() as patched:
            patched.setattr(_ahead, "foresee", lambda *_: None)
            assert growth._ranked(ends[some], logits[some]) == at_once
    assert row_kernels.kernel("foresee", torch.float32) is not None
