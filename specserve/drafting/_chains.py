"""Chains that grow token by token: from a model's logits to drafted tokens, and to rankings of what else was likely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specserve.drafting import Job
from specserve.drafting.workspace import Workspace
from specserve.errors import SpecserveError
from specserve.models._stretches import Stretch
from specserve.sampling.constraint import Constraint, restrict
from specserve.sampling.dists import greedy_choice, process
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
    slots: Array
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
        self._settings = Settings.of([chain.profile for chain in chains])
        self._sampled = bool((self._settings.temperature > 0).any())
        self._shared = torch.tensor([chain.shared_noise for chain in chains])
        if self._sampled:
            places = torch.arange(max((len(chain.slots) for chain in chains), default=0))
            positions = torch.tensor([chain.first for chain in chains])[:, None] + places
            seeds, branches = self._settings.seeds[:, None], self._settings.branches[:, None]
            if not bool(self._shared.all()):
                self._noise = uniform(seeds, Purpose.PROPOSE, positions, branches, places)
            if bool(self._shared.any()):
                self._keys = token_keys(seeds, positions, branches)

    def pick(self, rows: list[int], logits: torch.Tensor) -> None:
        """Append one token to each of the chains `rows` from logits [m, V], which may be changed."""
        logits = self._allowed(rows, logits)
        finite = logits[:, : self._vocab_size].amax(-1).isfinite()
        slots = np.array([self._next_slot(row) for row in rows])
        places = torch.tensor([len(self._chains[row].tokens) for row in rows])
        tokens = self._draw(rows, places, slots, logits) if self._sampled else self._greedy(slots, logits)
        for row, token, sound in zip(rows, *torch.stack([tokens, finite.long()]).tolist(), strict=True):
            chain = self._chains[row]
            chain.healthy += sound if chain.healthy == len(chain.tokens) else 0
            chain.tokens.append(token)

    def _next_slot(self, row: int) -> int:
        chain = self._chains[row]
        return int(chain.slots[len(chain.tokens)])

    def _allowed(self, rows: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Logits after the requests' processors and grammars."""
        return allowed(logits, [self._chains[row] for row in rows], self._vocab_size)

    def _greedy(self, slots: Array, logits: torch.Tensor) -> torch.Tensor:
        if self._ranked:
            self._workspace.rank(slots, likeliest(logits[:, : self._vocab_size], self._ranked))
        return greedy_choice(logits, self._vocab_size)

    def _draw(self, rows: list[int], places: torch.Tensor, slots: Array, logits: torch.Tensor) -> torch.Tensor:
        index = torch.tensor(rows)
        settings = self._settings.take(index)
        dist = process(logits, settings.temperature, settings.top_p, settings.top_k, self._vocab_size, settings.min_p)
        self._workspace.put(slots, dist)
        shared = self._shared[index]
        if bool(shared.all()):
            return self._race(slots, self._keys[index, places])
        tokens = self._workspace.draw(slots, self._noise[index, places])
        if self._ranked:
            self._rank(slots, settings.temperature == 0, logits)
        raced = shared.nonzero().squeeze(1)
        if len(raced):
            tokens[raced.to(tokens.device)] = self._race(slots[raced.numpy()], self._keys[index, places][raced])
        return tokens

    def _race(self, slots: Array, keys: torch.Tensor) -> torch.Tensor:
        """The winners of the race that the target will run, and beside each slot those that would win without them."""
        if not self._ranked:
            return self._workspace.race(slots, keys)
        ids = self._workspace.likeliest(slots, keys)
        self._workspace.rank(slots, ids)
        return ids[:, 0]

    def _rank(self, slots: Array, greedy: torch.Tensor, logits: torch.Tensor) -> None:
        """What each next token may be: by the dist it is drawn from, where it is greedy by logits."""
        self._workspace.rank(slots, self._workspace.likeliest(slots))
        rows = greedy.nonzero().squeeze(1)
        if len(rows):
            ids = likeliest(logits[rows.to(logits.device), : self._vocab_size], self._ranked)
            self._workspace.rank(slots[rows.numpy()], ids)


def likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [m, count]: the ids of the largest logits, best first; −1 where fewer are allowed at all."""
    values, ids = logits.topk(min(count, logits.shape[1]), -1)
    ids = torch.where(values > -torch.inf, ids, -1)
    return torch.nn.functional.pad(ids, (0, count - ids.shape[1]), value=-1)


def allowed(logits: torch.Tensor, chains: Sequence[Chain], vocab_size: int) -> torch.Tensor:
    """Logits [m, V] about each chain's next token, after its request's processors and under its grammar.

    An ended or impossible answer allows nothing, which ends its chain.
    """
    apply(logits, _places(chains), vocab_size)
    held, bits = [], []
    for index, chain in enumerate(chains):
        if chain.profile.constraint is not None:
            held.append(index)
            bits.append(_mask(chain.profile.constraint, chain))
    return restrict(logits, held, bits)


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
