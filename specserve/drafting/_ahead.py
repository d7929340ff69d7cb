"""Branches that grow ahead of a verdict: what is fed in each step, and what is picked of a step's logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specserve.drafting import Branch, Grown, Trunk
from specserve.drafting._chains import Chain, Picker, allowed, chances_of, likeliest, next_of
from specserve.drafting._kernels import foresee
from specserve.drafting.workspace import Workspace
from specserve.models._stretches import Stretch
from specserve.sampling import host
from specserve.sampling.dists import process
from specserve.sampling.noise import token_keys
from specserve.sampling.profiles import Settings
from specserve.sampling.race import race_ranking
from specserve.transport.messages import Array

_UNKNOWN = -1


class AheadGrowth:
    """The branches of some trunks, step by step; who computes logits, and from what, is the speculator's own affair."""

    def __init__(
        self, trunks: Sequence[Trunk], branches: Sequence[Branch], workspace: Workspace, vocab_size: int
    ) -> None:
        self._trunks = trunks
        self.fed = [index for index, trunk in enumerate(trunks) if len(trunk.feed)]
        self._branches = branches
        self._workspace = workspace
        self._vocab_size = vocab_size
        self._spans = [(branch.first, branch.first + len(branch.slots)) for branch in branches]  # steps
        self.steps = max((end for _, end in self._spans), default=1)
        self._others = [self._beside_chain(trunk) for trunk in trunks] if branches else []
        self._guesses = [self._beside(branch) if branch.first == 0 else _UNKNOWN for branch in branches]
        self._chains = [self._chain(branch, guess) for branch, guess in zip(branches, self._guesses, strict=True)]
        self._picker = Picker(self._chains, vocab_size, workspace)

    def _chain(self, branch: Branch, guess: int) -> Chain:
        trunk = self._trunks[branch.trunk]
        # A guess that is not known yet stands in as 0, so that positions are right.
        before = [*trunk.chain[: branch.kept], max(guess, 0)]
        return Chain(trunk.profile, trunk.base, branch.slots, trunk.shared_noise, before)

    def _beside_chain(self, trunk: Trunk) -> list[list[int]]:
        """For each chain token what else was likely where it was picked, likeliest first; then what is behind them."""
        behind = [] if trunk.next_slot is None else [trunk.next_slot]
        ranked = self._workspace.ranked(np.array([*trunk.chain_slots.tolist(), *behind], dtype=np.int64))
        taken = [*trunk.chain, *(_UNKNOWN for _ in behind)]
        return [
            [each for each in ids if each not in (token, _UNKNOWN)] for token, ids in zip(taken, ranked, strict=True)
        ]

    def _beside(self, branch: Branch) -> int:
        """A guess of what comes instead of a chain token, or behind the last one where that is known, by rank."""
        return _at(self._others[branch.trunk][branch.kept], branch.rank)

    def growing(self, step: int) -> list[int]:
        """The branches that take part in a step, whose rows follow those of the trunks that are `fed` in the first."""
        return [
            index
            for index, (first, end) in enumerate(self._spans)
            if first <= step < end and self._guesses[index] != _UNKNOWN
        ]

    def slots(self, growing: Sequence[int]) -> Array:
        """Where the next token of each of these branches goes."""
        return np.array([self._branches[index].slots[len(self._chains[index].tokens)] for index in growing])

    def slot_before(self, index: int) -> int | None:
        """Where the branch's last token was picked, or would have been; None where that is behind its trunk's feed."""
        branch = self._branches[index]
        trunk, drafted = self._trunks[branch.trunk], len(self._chains[index].tokens)
        if drafted:
            return int(branch.slots[drafted - 1])
        return int(trunk.chain_slots[branch.kept]) if branch.kept < len(trunk.chain) else trunk.next_slot

    def copies(self, step: int) -> tuple[list[int], list[int]]:
        """Block ids, from and to, that are copied before a step."""
        pairs = [
            branch.copy
            for branch, guess in zip(self._branches, self._guesses, strict=True)
            if branch.first == step and guess != _UNKNOWN and branch.copy is not None
        ]
        return [source for source, _ in pairs], [copy for _, copy in pairs]

    def stretches(self, step: int) -> list[Stretch]:
        """The rows of a step: in the first one the trunks' feeds, and every growing branch's last token."""
        feeds = [_feed_of_trunk(self._trunks[index]) for index in self.fed] if step == 0 else []
        return feeds + [next_of(self._chains[index], self._branches[index].table) for index in self.growing(step)]

    def take(self, step: int, logits: torch.Tensor) -> Grown:
        """Pick every growing branch's next token and, behind the feeds, the guesses that waited for them."""
        growing = self.growing(step)
        fed = len(self.fed) if step == 0 else 0
        if growing:
            self._picker.pick(growing, logits[fed:])
        if step == 0:
            self._guess_late(logits[:fed])
        chains = [(index, self._chains[index]) for index in growing]
        return Grown(
            guesses=[] if step else [(index, guess) for index, guess in enumerate(self._guesses) if guess != _UNKNOWN],
            tokens=[
                (index, len(chain.tokens) - 1, chain.tokens[-1])
                for index, chain in chains
                if chain.healthy == len(chain.tokens)
            ],
        )

    def _guess_late(self, logits: torch.Tensor) -> None:
        """The guesses that are fed in the second step; logits [trunks, V] are those behind the feeds."""
        late = [(index, branch) for index, branch in enumerate(self._branches) if branch.first == 1]
        told = [len(others) for others in self._others]  # places whose ranking needs no logits of this step
        behind = {branch.trunk for _, branch in late if branch.kept == told[branch.trunk]}
        rankings = self._rankings(sorted(behind), logits)
        for index, branch in late:
            known = branch.kept < told[branch.trunk]
            guess = self._beside(branch) if known else _at(rankings[branch.trunk], branch.rank)
            self._guesses[index] = guess
            self._chains[index].before[-1] = max(guess, 0)

    def _rankings(self, behind: list[int], logits: torch.Tensor) -> dict[int, list[int]]:
        """What may follow the whole chains of these trunks, likeliest first, by their own way of picking."""
        if not behind:
            return {}
        trunks = [self._trunks[index] for index in behind]
        row_of = {index: row for row, index in enumerate(self.fed)}
        rows = [row_of[index] for index in behind]
        nothing = np.empty(0, dtype=np.int64)
        ends = [Chain(trunk.profile, trunk.base, nothing, trunk.shared_noise, list(trunk.chain)) for trunk in trunks]
        logits = allowed(logits if len(rows) == len(logits) else logits[rows], ends, self._vocab_size)
        ranked = self._ranked(ends, logits)
        return {trunk: [token for token in order if token >= 0] for trunk, order in zip(behind, ranked, strict=True)}

    def _ranked(self, ends: Sequence[Chain], logits: torch.Tensor) -> list[list[int]]:
        """Ids for each chain's next token, from logits [m, V], −1 where none is left.

        With shared noise it is the race that the target will run which says what it will draw.
        """
        raced = [at for at, end in enumerate(ends) if end.shared_noise]
        if len(raced) == len(ends):
            return self._raced(ends, logits)
        _, ids = likeliest(logits[:, : self._vocab_size], self._workspace.ranks)
        ranked: list[list[int]] = ids.tolist()
        if raced:
            for at, order in zip(raced, self._raced([ends[at] for at in raced], logits[raced]), strict=True):
                ranked[at] = order
        return ranked

    def _raced(self, ends: Sequence[Chain], logits: torch.Tensor) -> list[list[int]]:
        width, chances = self._workspace.ranks, chances_of(ends)
        found = None if chances is None else foresee(logits, self._vocab_size, chances, width)
        ranking = self._raced_in_tensors(ends, logits, width) if found is None else found
        ranked: list[list[int]] = ranking.tolist()
        return ranked

    def _raced_in_tensors(self, ends: Sequence[Chain], logits: torch.Tensor, width: int) -> Array:
        settings = Settings.of([chain.profile for chain in ends])
        dist = process(logits, settings.temperature, settings.top_p, settings.top_k, self._vocab_size, settings.min_p)
        keys = token_keys(settings.seeds, torch.tensor([chain.first for chain in ends]), settings.branches)
        return host.read(race_ranking(dist, host.send(keys, dist.device), width))[0]


def _feed_of_trunk(trunk: Trunk) -> Stretch:
    return Stretch(trunk.start, trunk.feed, trunk.table, 1)


def _at(ranking: Sequence[int], rank: int) -> int:
    return ranking[rank] if rank < len(ranking) else _UNKNOWN
