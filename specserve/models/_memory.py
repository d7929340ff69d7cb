"""A forward that does not fit into memory is computed in parts, so that load alone fails nobody.

What a forward needs grows with its positions; KV pages were allocated at start. Halves are rows, in order, and where
one row is left its tokens, since attention writes what the second half reads. A row of a backend that keeps state per
row is never cut: its checkpoint is that of one forward.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from specserve.models import Backend, NoRowStates
from specserve.models._stretches import Stretch, ragged

log = logging.getLogger(__name__)

_CPU_WORDS = ("can't allocate memory", "not enough memory")


def forward(backend: Backend, stretches: Sequence[Stretch]) -> torch.Tensor:
    """Logits as `Backend.forward` of these rows, float32 [m, vocab_size], in one part or in as many as it takes.

    Raises what the backend raises: out of memory, when not even the smallest part fits.
    """
    try:
        return backend.forward(ragged(stretches))
    except (RuntimeError, MemoryError) as error:
        halves = _halves(stretches, cut_rows=isinstance(backend.states, NoRowStates))
        if not is_out_of_memory(error) or halves is None:
            raise
    # Only here: while an exception is handled, its frames keep the tensors of the forward that failed.
    if backend.device.type == "cuda":
        torch.cuda.empty_cache()
    log.warning(
        "a forward of %d positions did not fit into memory; trying halves", sum(len(s.tokens) for s in stretches)
    )
    return torch.cat([forward(backend, half) for half in halves])


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(words in str(error) for words in _CPU_WORDS)  # on CPUs it is a plain RuntimeError


def _halves(stretches: Sequence[Stretch], *, cut_rows: bool) -> tuple[list[Stretch], list[Stretch]] | None:
    """Two parts of about as many positions; None where there is nothing to cut."""
    if len(stretches) > 1:
        half = sum(len(stretch.tokens) for stretch in stretches) / 2
        count, taken = 0, 0
        while count < len(stretches) - 1 and (not count or taken + len(stretches[count].tokens) <= half):
            taken += len(stretches[count].tokens)
            count += 1
        return list(stretches[:count]), list(stretches[count:])
    (only,) = stretches
    middle = len(only.tokens) // 2
    if not middle or not cut_rows:
        return None
    behind = len(only.tokens) - middle
    first = Stretch(only.start, only.tokens[:middle], only.table, max(0, only.wanted - behind), only.owner, only.tree)
    rest, wanted = only.tokens[middle:], min(only.wanted, behind)
    second = Stretch(only.start + middle, rest, only.table, wanted, only.owner, only.tree)
    return [first], [second]
