"""Chains that grow token by token: from a model's logits to drafted tokens, and to rankings of what else was likely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite

import numpy as np
import torch

from specserve.drafting import Job, _sureness
from specserve.drafting._kernels import Chances
from specserve.drafting.workspace import Workspace
from specserve.errors import SpecserveError
from specserve.models._stretches import Stretch
from specserve.sampling import _kernels, blocks, host
from specserve.sampling.constraint import Constraint, restrict
from specserve.sampling.dists import process
from specserve.sampling.noise import Purpose, token_keys, uniform
from specserve.sampling.processors import Place, apply
from specserve.sampling.profiles import Profile, Settings
from specserve.transport.messages import Array


@dataclass(slots=True)
class Chain:
    """Tokens that are drafted one after the other; slots [depth] take their dists.

    base is where what follows the committed tokens begins, before the tokens between it and the chain's first one.
    shared_noise: tokens are picked by a race with the target's noise, among the ids that the workspace keeps.
    healthy counts the tokens before the first one that came of logits which are not finite.
    """

    profile: Profile
    base: int
    slots: Sequence[int] | Array
    shared_noise: bool
    before: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    healthy: int = 0

    @property
    def first(self) -> int:
        """The absolute position of the chain's first token."""
        return self.base + len(self.before)

    @property
    def drafted(self) -> list[int]:
        """All that follows the committed tokens."""
        return self.before + self.tokens


def feed_of(job: Job) -> Stretch:
    """The row that feeds a job, and shows what follows where there is anything to draft."""
    return Stretch(job.start, job.feed, job.table, 1 if job.depth else 0)


def next_of(chain: Chain, table: Array) -> Stretch:
    """The row of the chain's last token, or of the one before its first."""
    drafted = chain.tokens[-1:] or chain.before[-1:]
    return Stretch(chain.first + len(chain.tokens) - 1, drafted, table, 1)


class Picker:
    """Picks the next tokens of chains of one vocabulary, the same way whoever computed the logits."""

    def __init__(self, chains: Sequence[Chain], vocab_size: int, workspace: Workspace) -> None:
        self._chains = chains
        self._vocab_size = vocab_size
        self._workspace = workspace
        self._ranked = workspace.ranks
        profiles = [chain.profile for chain in chains]
        self._free = all(profile.processors is None and profile.constraint is None for profile in profiles)
        self._all_greedy = all(profile.temperature == 0 for profile in profiles)
        self._chances = chances_of(chains)

    @cached_property
    def _chance(self) -> _Chance:
        """What decides tokens where there is no kernel that works it out."""
        return _Chance.of(self._chains)

    def pick(self, rows: list[int], logits: torch.Tensor) -> None:
        """Append one token to each of the chains `rows` from logits [m, V], which may be changed."""
        chains = [self._chains[row] for row in rows]
        if not self._free:
            logits = allowed(logits, chains, self._vocab_size)
        found = self._at_once(rows, chains, logits)
        tokens, highest = self._in_steps(rows, chains, logits) if found is None else found
        if self._workspace.notes_sureness:
            self._note_sureness(chains, logits, highest)
        for chain, token, value in zip(chains, tokens, highest, strict=True):
            # The largest value of a row is not finite when it holds a NaN or +inf, or nothing but -inf.
            chain.healthy += chain.healthy == len(chain.tokens) and isfinite(value)
            chain.tokens.append(token)

    def _note_sureness(self, chains: Sequence[Chain], logits: torch.Tensor, highest: Sequence[float]) -> None:
        """How sure the draft is of tokens that were picked and are not appended yet."""
        slots = np.array([chain.slots[len(chain.tokens)] for chain in chains])
        drawn = np.array([chain.profile.temperature > 0 for chain in chains])
        found = np.empty(len(chains), dtype=np.float32)
        if drawn.any():
            found[drawn] = _sureness.of_drawn(self._workspace.peaks(slots[drawn]))
        if not drawn.all():
            rows = np.flatnonzero(~drawn)
            mine = logits if not drawn.any() else logits[host.send(torch.from_numpy(rows), logits.device)]
            found[rows] = _sureness.of_greedy(mine[:, : self._vocab_size], [highest[row] for row in rows.tolist()])
        self._workspace.note_sureness(slots, found)

    def _at_once(
        self, rows: list[int], chains: Sequence[Chain], logits: torch.Tensor
    ) -> tuple[list[int], list[float]] | None:
        """The ids and the largest logits, in one call; None where it takes several."""
        if self._chances is None:
            return None
        places = [len(chain.tokens) for chain in chains]
        tokens = [(row, at, chain.slots[at]) for row, at, chain in zip(rows, places, chains, strict=True)]
        return self._workspace.pick(logits, self._vocab_size, self._chances, np.array(tokens, dtype=np.int64))

    def _in_steps(
        self, rows: list[int], chains: Sequence[Chain], logits: torch.Tensor
    ) -> tuple[list[int], list[float]]:
        """As `_at_once`, in tensor operations wherever the logits are."""
        places = [len(chain.tokens) for chain in chains]
        slots = np.array([chain.slots[at] for chain, at in zip(chains, places, strict=True)])
        if self._all_greedy:
            return self._greedy(slots, logits[:, : self._vocab_size])
        return self._by_chance(self._chance.take(rows, places), slots, logits)

    def _greedy(self, slots: Array, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """The likeliest ids, the lowest on ties, and their logits; one look at all logits, also where they rank."""
        if not self._ranked:
            choices = blocks.argmax(logits)
            found, highest = host.read(choices, logits.gather(1, choices[:, None]).squeeze(1))
            return found.tolist(), highest.tolist()
        values, ids = likeliest(logits, max(2, self._ranked))
        self._workspace.rank(slots, ids[:, : self._ranked])
        # Where nothing is finite the chain ends, and any id stands in.
        return ids[:, 0].clip(0).tolist(), values[:, 0].tolist()

    def _by_chance(self, chance: _Chance, slots: Array, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """The drawn ids and the largest logits; all that the host has to know of a step is read at once."""
        largest = logits[:, : self._vocab_size].amax(-1)
        drawn, rankings = self._draw(chance, slots, logits)
        tokens, highest, *ranked = host.read(drawn, largest, *(ids for _, ids in rankings))
        for (where, _), ids in zip(rankings, ranked, strict=True):
            self._workspace.rank(where, ids)
        return tokens.tolist(), highest.tolist()

    def _draw(
        self, chance: _Chance, slots: Array, logits: torch.Tensor
    ) -> tuple[torch.Tensor, list[tuple[Array, torch.Tensor]]]:
        """Tokens int64 [m] by chance, and ids to be ranked beside slots, of which later ones hold.

        What tokens are drawn from is kept, also where a row is greedy.
        """
        settings = chance.settings
        dist = process(logits, settings.temperature, settings.top_p, settings.top_k, self._vocab_size, settings.min_p)
        self._workspace.put(slots, dist)
        if chance.all_shared:
            return self._race(slots, chance.keys)
        tokens = self._workspace.draw(slots, chance.noise)
        rankings = self._rankings(slots, settings.temperature == 0, logits) if self._ranked else []
        raced = chance.shared.nonzero().squeeze(1)
        if len(raced):
            tokens[host.send(raced, tokens.device)], theirs = self._race(slots[raced.numpy()], chance.keys[raced])
            rankings += theirs
        return tokens, rankings

    def _race(self, slots: Array, keys: torch.Tensor) -> tuple[torch.Tensor, list[tuple[Array, torch.Tensor]]]:
        """The winners of the race that the target will run, and beside each slot those that would win without them."""
        if not self._ranked:
            return self._workspace.race(slots, keys), []
        ids = self._workspace.likeliest(slots, keys)
        return ids[:, 0].clamp(min=0), [(slots, ids)]  # where nothing is allowed the chain ends: any id stands in

    def _rankings(self, slots: Array, greedy: torch.Tensor, logits: torch.Tensor) -> list[tuple[Array, torch.Tensor]]:
        """What each next token may be: by the dist it is drawn from, where it is greedy by logits."""
        rankings = [(slots, self._workspace.likeliest(slots))]
        rows = greedy.nonzero().squeeze(1)
        if len(rows):
            mine = logits[host.send(rows, logits.device), : self._vocab_size]
            rankings.append((slots[rows.numpy()], _largest(mine, self._ranked)[1]))
        return rankings


def chances_of(chains: Sequence[Chain]) -> Chances | None:
    """What decides the tokens of these chains, for kernels; None where these do not know how."""
    return Chances.of([(chain.profile, chain.first, chain.shared_noise) for chain in chains])


@dataclass(frozen=True, slots=True)
class _Chance:
    """What decides tokens where not all are greedy: of n chains, or of one token of each of n.

    shared bool [n]: the token is raced for; all_shared where all are. noise [n, …] decides the others, keys [n, …, 4]
    the races, each without elements where nothing needs it.
    """

    settings: Settings
    shared: torch.Tensor
    all_shared: bool
    noise: torch.Tensor
    keys: torch.Tensor

    @staticmethod
    def of(chains: Sequence[Chain]) -> _Chance:
        """That of all tokens of these chains, [n, longest]."""
        settings, shared = Settings.of([chain.profile for chain in chains]), [chain.shared_noise for chain in chains]
        places = torch.arange(max((len(chain.slots) for chain in chains), default=0))
        positions = torch.tensor([chain.first for chain in chains])[:, None] + places
        seeds, branches = settings.seeds[:, None], settings.branches[:, None]
        noise = keys = torch.empty(*positions.shape, 0)
        if not all(shared):
            noise = uniform(seeds, Purpose.PROPOSE, positions, branches, places)
        if any(shared):
            keys = token_keys(seeds, positions, branches)
        return _Chance(settings, torch.tensor(shared), all(shared), noise, keys)

    def take(self, rows: list[int], places: list[int]) -> _Chance:
        """That of one token of each of some chains, in order, no chain twice."""
        index, at = torch.tensor(rows), torch.tensor(places)
        whole = len(rows) == len(self.shared)
        settings = self.settings if whole else self.settings.take(index)
        return _Chance(settings, self.shared[index], self.all_shared, self.noise[index, at], self.keys[index, at])


def likeliest(logits: torch.Tensor, count: int) -> tuple[Array, Array]:
    """The largest logits of each row [m, V] and their ids int64, [m, min(count, V)] each, on the host, best first.

    An id is −1 where fewer are allowed at all; where there is a NaN, it is the first value. From a count of 2 on, the
    first id of equals is the lowest, as a greedy choice has it; otherwise equals stand in any order.
    """
    values, ids = host.read(*_largest(logits, count))
    tied = (values[:, :1] == values[:, 1:2]).any(-1) & (ids[:, 0] >= 0)
    for row in np.flatnonzero(tied).tolist():
        (first,) = host.read(blocks.argmax(logits[row, None]))
        ids[row] = [first[0], *[each for each in ids[row] if each != first[0]]][: ids.shape[1]]
    return values, ids


def _largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`likeliest`, where the logits are; equals in any order."""
    width = min(count, logits.shape[1])
    found = _kernels.likeliest(logits, width)
    if found is not None:
        return found
    values, ids = logits.topk(width, -1)
    return values, ids.masked_fill_(~(values > -torch.inf), -1)


def allowed(logits: torch.Tensor, chains: Sequence[Chain], vocab_size: int) -> torch.Tensor:
    """Logits [m, V] about each chain's next token, under its request's grammar and after its processors.

    An ended or impossible answer allows nothing, which ends its chain.
    """
    held, bits = [], []
    for index, chain in enumerate(chains):
        if chain.profile.constraint is not None:
            held.append(index)
            bits.append(_mask(chain.profile.constraint, chain))
    logits = restrict(logits, held, bits)
    apply(logits, _places(chains), vocab_size)
    return logits


def _places(chains: Sequence[Chain]) -> list[Place]:
    return [
        Place(at, chain.profile.processors, chain.drafted)
        for at, chain in enumerate(chains)
        if chain.profile.processors is not None
    ]


def _mask(constraint: Constraint, chain: Chain) -> Array | None:
    """What may follow the drafted tokens; None past the chain's end."""
    if chain.healthy < len(chain.tokens):
        return None
    try:
        constraint.write(chain.base, chain.drafted)
        return None if constraint.ended else constraint.allowed()
    except SpecserveError:  # the verifier tells the client; here there is just nothing to draft
        return None
