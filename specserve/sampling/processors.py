"""What a request does to its logits before temperature and filters: masks, biases, penalties.

The order is vLLM's: allowed ids, bad words, min_tokens, then logit_bias, then repetition, frequency and presence
penalty; temperature, top-k, top-p and min-p follow in `dists.process`. Draft and target rows go through the same
function, each seeing the committed tokens and the drafted ones before it.

A mask that would leave a row no token at all is not applied to that row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specserve.sampling.history import History
from specserve.types import Sampling


class Processors:
    """The chain of one request on one worker, with the tokens that it looks back at.

    end_tokens are the ids that min_tokens holds back.
    """

    def __init__(self, sampling: Sampling, end_tokens: Sequence[int], history: History) -> None:
        self.sampling = sampling
        self.end_tokens = tuple(end_tokens)
        self.history = history
        self._forbidden: torch.Tensor | None = None

    @staticmethod
    def wanted(sampling: Sampling) -> bool:
        """Whether any option needs a chain."""
        return (
            sampling.allowed_token_ids is not None
            or bool(sampling.bad_words or sampling.logit_bias)
            or sampling.min_tokens > 0
            or _penalised(sampling)
        )

    def forbidden(self, width: int, device: torch.device) -> torch.Tensor:
        """bool [width]: the ids outside `allowed_token_ids`."""
        if self._forbidden is None:
            allowed = [token for token in self.sampling.allowed_token_ids or () if token < width]
            self._forbidden = torch.ones(width, dtype=torch.bool)
            self._forbidden[torch.tensor(allowed, dtype=torch.int64)] = False
            self._forbidden = self._forbidden.to(device)
        return self._forbidden


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


def apply(logits: torch.Tensor, places: Sequence[Place], vocab_size: int) -> None:
    """Change the rows of logits [m, V] that `places` name, in place; the others cost nothing.

    Ids at and above vocab_size are never chosen and so count as masked already.
    """
    if not places:
        return
    rows = torch.tensor([place.row for place in places], device=logits.device)
    mine = logits[rows]
    forbidden = _forbidden(mine, places, vocab_size)
    _add_bias(mine, places)
    _penalise(mine, places)
    logits[rows] = mine if forbidden is None else mine.masked_fill(forbidden, -torch.inf)


# ---- masks ------------------------------------------------------------------------------------------------------


def _forbidden(logits: torch.Tensor, places: Sequence[Place], vocab_size: int) -> torch.Tensor | None:
    """bool [m, V], or None when nothing is masked."""
    masks = [_outside_allowed(logits, places), *(_at(logits, pairs) for pairs in (_bad(places), _early_ends(places)))]
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    forbidden = torch.zeros_like(given[0])
    for mask in given:
        more = forbidden | mask
        forbidden = torch.where(more[:, :vocab_size].all(-1, keepdim=True), forbidden, more)
    return forbidden


def _outside_allowed(logits: torch.Tensor, places: Sequence[Place]) -> torch.Tensor | None:
    limited = [i for i, place in enumerate(places) if place.processors.sampling.allowed_token_ids is not None]
    if not limited:
        return None
    width, device = logits.shape[1], logits.device
    mask = torch.zeros(logits.shape, dtype=torch.bool, device=device)
    mask[torch.tensor(limited, device=device)] = torch.stack(
        [places[i].processors.forbidden(width, device) for i in limited]
    )
    return mask


def _at(logits: torch.Tensor, pairs: Pairs) -> torch.Tensor | None:
    """bool [m, V], set at these pairs; None without any."""
    index = _index(pairs, logits)
    if not index[0].numel():
        return None
    mask = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    mask[index] = True
    return mask


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
        values = torch.tensor([value for _, (_, value) in biased], dtype=logits.dtype, device=logits.device)
        logits.index_put_(index, values, accumulate=True)


def _penalised(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0


def _penalise(logits: torch.Tensor, places: Sequence[Place]) -> None:
    """Repetition, then frequency, then presence penalty, over the history and the drafted tokens before each row."""
    here = [i for i, place in enumerate(places) if _penalised(place.processors.sampling)]
    if not here:
        return
    rows = torch.tensor(here, device=logits.device)
    counts, in_prompt = _occurrences(logits, [places[i] for i in here])
    samplings = [places[i].processors.sampling for i in here]
    repetition = _column([each.repetition_penalty for each in samplings], logits)
    frequency = _column([each.frequency_penalty for each in samplings], logits)
    presence = _column([each.presence_penalty for each in samplings], logits)
    values = logits[rows]
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(in_prompt | (counts > 0), repeated, values)
    logits[rows] = values - frequency * counts - presence * (counts > 0)


def _occurrences(logits: torch.Tensor, places: Sequence[Place]) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [m, V] how often each id stands in the answer before each place; bool [m, V] whether in the prompt."""
    width, device = logits.shape[1], logits.device
    known: dict[int, int] = {}
    owners = [known.setdefault(id(place.processors), len(known)) for place in places]
    histories = {id(place.processors): place.processors.history for place in places}
    owner = torch.tensor(owners, device=device)
    counts = torch.stack([history.counts(width, device) for history in histories.values()])[owner]
    drafted = _index([(i, token) for i, place in enumerate(places) for token in place.drafted], logits)
    counts.index_put_(drafted, torch.ones((), device=device), accumulate=True)
    return counts, torch.stack([history.in_prompt(width, device) for history in histories.values()])[owner]


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _index(pairs: Pairs, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and ids of the pairs that lie within a matrix, int64 each."""
    within = [pair for pair in pairs if pair[1] < like.shape[1]]
    index = torch.tensor(within, dtype=torch.int64, device=like.device).view(-1, 2)
    return index[:, 0], index[:, 1]
