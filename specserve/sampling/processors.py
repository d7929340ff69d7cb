"""What a request does to its logits before temperature and filters: masks, biases, penalties.

The order is vLLM's: allowed ids, bad words, min_tokens, then logit_bias, then repetition, frequency and presence
penalty; temperature, top-k, top-p and min-p follow in `dists.process`. Draft and target rows go through the same
function, each seeing the committed tokens and the drafted ones before it.

A mask that would leave a row no token at all is not applied to that row. The grammar's mask is there already
(`constraint.restrict`): what a grammar wants and an option forbids is written all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specserve.sampling import host
from specserve.sampling.history import History
from specserve.transport.messages import Array
from specserve.types import Sampling


class Processors:
    """The chain of one request on one worker, with the tokens that it looks back at.

    end_tokens are the ids that min_tokens holds back.
    """

    def __init__(self, sampling: Sampling, end_tokens: Sequence[int], history: History) -> None:
        self.sampling = sampling
        self.end_tokens = tuple(end_tokens)
        self.history = history
        self._allowed: Array | None = None

    @staticmethod
    def wanted(sampling: Sampling) -> bool:
        """Whether any option needs a chain."""
        return (
            sampling.allowed_token_ids is not None
            or bool(sampling.bad_words or sampling.logit_bias)
            or sampling.min_tokens > 0
            or _penalised(sampling)
        )

    def allowed(self, vocab_size: int) -> Array | None:
        """int64 [n]: the ids that may be chosen; None for all, also where a narrower model has none of them."""
        if self._allowed is None:
            ids = np.array(self.sampling.allowed_token_ids or (), dtype=np.int64)
            self._allowed = ids[ids < vocab_size]
        return self._allowed if len(self._allowed) else None


@dataclass(frozen=True, slots=True)
class Place:
    """One row of logits, about the token after the request's history and `drafted`."""

    row: int
    processors: Processors
    drafted: Sequence[int]

    @property
    def generated(self) -> int:
        """Tokens of the answer before this one."""
        history = self.processors.history
        return len(history) + len(self.drafted) - len(history.prompt)


Pairs = list[tuple[int, int]]
"""(row among the places, token id)."""

Index = tuple[torch.Tensor, torch.Tensor]
"""Rows and ids int64 [n]: single logits. Only these are touched, so the cost follows the tokens, not the vocabulary."""


def apply(logits: torch.Tensor, places: Sequence[Place], vocab_size: int) -> None:
    """Change the rows of logits [m, V] that `places` name, in place; the others cost nothing.

    Ids at and above vocab_size are never chosen and so count as masked already.
    """
    if not places:
        return
    rows = host.send(torch.tensor([place.row for place in places]), logits.device)
    mine = logits[rows]
    _mask(mine, places, vocab_size)
    _add_bias(mine, places)
    _penalise(mine, places)
    logits[rows] = mine


# ---- masks ------------------------------------------------------------------------------------------------------


def _mask(logits: torch.Tensor, places: Sequence[Place], vocab_size: int) -> None:
    _limit(logits, places, vocab_size)
    for pairs in (_bad(places), _early_ends(places)):
        if pairs:
            _strike(logits, _index(pairs, logits), vocab_size)


def _limit(logits: torch.Tensor, places: Sequence[Place], vocab_size: int) -> None:
    limits = [(i, place.processors.allowed(vocab_size)) for i, place in enumerate(places)]
    limited = [(i, ids) for i, ids in limits if ids is not None]
    if not limited:
        return
    lengths = [len(ids) for _, ids in limited]
    rows = host.send(torch.tensor([i for i, _ in limited]), logits.device)
    ids = host.send(np.concatenate([ids for _, ids in limited]), logits.device)
    owner = host.send(np.repeat(np.arange(len(limited)), lengths), logits.device)
    index = rows[owner], ids
    masked = torch.full_like(logits[rows], -torch.inf)
    masked[owner, ids] = logits[index]
    emptied = masked.amax(-1, keepdim=True).isneginf()
    logits[rows] = torch.where(emptied, logits[rows], masked)


def _strike(logits: torch.Tensor, index: Index, vocab_size: int) -> None:
    """Mask these logits, but for rows that would lose all that they still have."""
    before = logits[index]
    logits[index] = -torch.inf
    emptied = logits[:, :vocab_size].amax(-1).isneginf()
    logits[index] = torch.where(emptied[index[0]], before, -torch.inf)


def _bad(places: Sequence[Place]) -> Pairs:
    """The last ids of bad words whose other ids stand right before, in the answer."""
    pairs = []
    for i, place in enumerate(places):
        words = place.processors.sampling.bad_words
        if words:
            longest = max(map(len, words)) - 1
            before = [*place.processors.history.tail(longest), *place.drafted]
            pairs += [(i, word[-1]) for word in words if before[len(before) - len(word) + 1 :] == list(word[:-1])]
    return pairs


def _early_ends(places: Sequence[Place]) -> Pairs:
    return [
        (i, token)
        for i, place in enumerate(places)
        if place.generated < place.processors.sampling.min_tokens
        for token in place.processors.end_tokens
    ]


# ---- bias and penalties -----------------------------------------------------------------------------------------


def _add_bias(logits: torch.Tensor, places: Sequence[Place]) -> None:
    biased = [(i, pair) for i, place in enumerate(places) for pair in place.processors.sampling.logit_bias]
    biased = [(i, pair) for i, pair in biased if pair[0] < logits.shape[1]]
    if biased:
        index = _index([(i, token) for i, (token, _) in biased], logits)
        values = _column([value for _, (_, value) in biased], logits)
        logits.index_put_(index, values, accumulate=True)


def _penalised(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0


def _penalise(logits: torch.Tensor, places: Sequence[Place]) -> None:
    """Penalties over the history, and over the drafted tokens before each row, which count on top of it."""
    here = [(i, place) for i, place in enumerate(places) if _penalised(place.processors.sampling)]
    if not here:
        return
    drafted = [
        (i, token, place.processors.history.counts.get(token, 0) + times, place.processors.sampling)
        for i, place in here
        for token, times in Counter(place.drafted).items()
        if token < logits.shape[1]
    ]
    on_top = _index([(i, token) for i, token, _, _ in drafted], logits)
    untouched = logits[on_top]
    _penalise_histories(logits, here)
    counts = _column([count for _, _, count, _ in drafted], logits)
    logits[on_top] = _penalties([each for *_, each in drafted], logits).applied(untouched, counts)


def _penalise_histories(logits: torch.Tensor, here: Sequence[tuple[int, Place]]) -> None:
    columns = [place.processors.history.occurrences() for _, place in here]
    lengths = [len(ids) for ids, _ in columns]
    ids, counts = (np.concatenate(column) for column in zip(*columns, strict=True))
    within = ids < logits.shape[1]
    rows, owners = (
        host.send(np.repeat(numbers, lengths)[within], logits.device)
        for numbers in ([i for i, _ in here], range(len(here)))
    )
    penalties = _penalties([place.processors.sampling for _, place in here], logits).take(owners)
    index = rows, host.send(ids[within], logits.device)
    occurred = host.send(torch.from_numpy(counts[within]).to(logits.dtype), logits.device)
    logits[index] = penalties.applied(logits[index], occurred)


@dataclass(frozen=True, slots=True)
class _Penalties:
    """Strengths by column, [n] each."""

    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor

    def take(self, rows: torch.Tensor) -> _Penalties:
        return _Penalties(self.repetition[rows], self.frequency[rows], self.presence[rows])

    def applied(self, logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Logits [n] of tokens that occurred, `counts` [n] times in the answer, 0 for those of the prompt alone."""
        repeated = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
        return repeated - self.frequency * counts - self.presence * (counts > 0)


def _penalties(samplings: Sequence[Sampling], like: torch.Tensor) -> _Penalties:
    return _Penalties(
        _column([each.repetition_penalty for each in samplings], like),
        _column([each.frequency_penalty for each in samplings], like),
        _column([each.presence_penalty for each in samplings], like),
    )


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return host.send(torch.tensor(values, dtype=like.dtype), like.device)


def _index(pairs: Pairs, like: torch.Tensor) -> Index:
    """The pairs that lie within a matrix."""
    within = [pair for pair in pairs if pair[1] < like.shape[1]]
    index = host.send(torch.tensor(within, dtype=torch.int64).view(-1, 2), like.device)
    return index[:, 0], index[:, 1]
