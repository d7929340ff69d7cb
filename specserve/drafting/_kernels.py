"""C kernels that pick drafted tokens (`native/drafts.c`). Each answer is None where there is none for what it is given.

What is picked, kept and ranked in one call takes a chain of tensor operations a dozen; after a sleep, when nothing is
in a processor's cache, each of these costs tens of microseconds, however few the rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from specserve.native import addresses
from specserve.sampling._kernels import checked, kernel, readable, threads_for
from specserve.sampling.profiles import Profile
from specserve.transport.messages import Array

_NOT_THERE = 1


@dataclass(frozen=True, slots=True)
class Chances:
    """What decides the tokens of n chains, as C reads it.

    heat float32 [n] are their temperatures; facts int64 [n, 4]: seed, branch, the absolute position of the first token,
    and 1 where tokens are raced for with the target's noise.
    """

    heat: npt.NDArray[np.float32]
    facts: npt.NDArray[np.int64]

    @staticmethod
    def of(chains: Sequence[tuple[Profile, int, bool]]) -> Chances | None:
        """Of each chain's profile, first position, and whether it races; None where a dist is filtered."""
        profiles = [profile for profile, _, _ in chains]
        if any(p.temperature > 0 and (p.top_p < 1 or p.top_k > 0 or p.min_p > 0) for p in profiles):
            return None
        facts = [(profile.seed, profile.branch, first, raced) for profile, first, raced in chains]
        heat = np.array([profile.temperature for profile in profiles], dtype=np.float32)
        return Chances(heat, np.array(facts, dtype=np.int64).reshape(-1, 4))


def pick(
    logits: torch.Tensor,
    vocab_size: int,
    chances: Chances,
    tokens: npt.NDArray[np.int64],
    kept: tuple[torch.Tensor, torch.Tensor, Array],
) -> tuple[list[int], list[float]] | None:
    """`Workspace.pick`; kept are ids int32 [slots, k] and probs float16 [slots, k], and int64 [slots, ranks].

    Raises IndexError, with nothing written, for a chain or slot that there is not.
    """
    run = kernel("pick", logits.dtype)
    ids, probs, ranked = kept
    if run is None or not readable(logits) or not ids.is_cpu:
        return None
    count, (slots, k), (_, ranks) = len(tokens), ids.shape, ranked.shape
    _check_width(logits, count, vocab_size)
    picked, highest = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.float32)
    status = run(
        *(logits.data_ptr(), logits.stride(0), count, vocab_size, len(chances.heat)),
        *_addresses(chances),
        addresses.of_array("tokens", tokens, np.int64, 3 * count),
        *(slots, k),
        addresses.of_tensor("ids", ids, torch.int32, slots * k),
        addresses.of_tensor("probs", probs, torch.float16, slots * k),
        ranks,
        addresses.of_array("ranked", ranked, np.int64, slots * ranks),
        *(picked.ctypes.data, highest.ctypes.data, threads_for(logits)),
    )
    if status == _NOT_THERE:
        raise IndexError(
            f"chains and slots {tokens[:, ::2].tolist()} are not all among {len(chances.heat)} and {slots}"
        )
    checked(status)
    return picked.tolist(), highest.tolist()


def foresee(logits: torch.Tensor, vocab_size: int, chances: Chances, ranks: int) -> Array | None:
    """int64 [m, ranks]: `race_ranking` of the first tokens of m chains, from their logits [m, V]."""
    run = kernel("foresee", logits.dtype)
    if run is None or not readable(logits):
        return None
    count = len(chances.heat)
    _check_width(logits, count, vocab_size)
    into = np.empty((count, ranks), dtype=np.int64)
    given = (*_addresses(chances), ranks, into.ctypes.data)
    checked(run(logits.data_ptr(), logits.stride(0), count, vocab_size, *given, threads_for(logits)))
    return into


def _addresses(chances: Chances) -> tuple[int, int]:
    count = len(chances.heat)
    return (
        addresses.of_array("heat", chances.heat, np.float32, count),
        addresses.of_array("facts", chances.facts, np.int64, 4 * count),
    )


def _check_width(logits: torch.Tensor, count: int, vocab_size: int) -> None:
    if len(logits) != count or logits.shape[1] < vocab_size:
        raise IndexError(f"{count} rows of {vocab_size} logits are wanted, found {list(logits.shape)}")
