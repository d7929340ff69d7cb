"""C kernels for rows over a vocabulary (`native/`), asked with tensors. Each answer is None where there is no kernel
for them: on a GPU, in other dtypes, or without a C compiler. Tensor operations then say the same.

A lone row is read in a few microseconds, which a chain of tensor operations takes many times over; for it a kernel
is one call. Kernels give the same bits for a row in any company and for any number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specserve import native
from specserve.native import addresses

_POINTER, _COUNT, _REAL, _THREADS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int
_CHAINS = (_POINTER, _POINTER, _POINTER)  # target, tokens, lengths

_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "draw": (_POINTER, *(_COUNT,) * 3, *(_POINTER,) * 3, _THREADS),
    "race": (_POINTER, *(_COUNT,) * 3, *(_POINTER,) * 2, _THREADS),
    "race_scores": (*(_POINTER,) * 3, *(_COUNT,) * 2, _POINTER),
    "softmax": (_POINTER, *(_COUNT,) * 4, *(_POINTER,) * 2, _THREADS),
    "exp_sums": (_POINTER, *(_COUNT,) * 3, *(_POINTER,) * 2, _THREADS),
    "argmax": (_POINTER, *(_COUNT,) * 3, _POINTER, _THREADS),
    "likeliest": (_POINTER, *(_COUNT,) * 4, *(_POINTER,) * 2, _THREADS),
    "sparsify": (_POINTER, *(_COUNT,) * 4, *(_POINTER,) * 2, _THREADS),
    "pick": (
        *(_POINTER, *(_COUNT,) * 4),  # logits
        *(_POINTER,) * 3,  # what decides, and which tokens
        *(_COUNT, _COUNT, *(_POINTER,) * 2),  # kept dists
        *(_COUNT, _POINTER),  # rankings
        *(*(_POINTER,) * 2, _THREADS),
    ),
    "foresee": (_POINTER, *(_COUNT,) * 3, *(_POINTER,) * 2, _COUNT, _POINTER, _THREADS),
    "rejection": (*(_COUNT,) * 4, *(_POINTER,) * 8, _THREADS),
    "block": (*(_COUNT,) * 4, *(_POINTER,) * 8, _THREADS),
    "exact": (*(_COUNT,) * 3, *_CHAINS, *(_POINTER,) * 2, _THREADS),
    "coupled": (*(_COUNT,) * 3, *_CHAINS, *(_POINTER,) * 2, _THREADS),
    "typical": (*(_COUNT,) * 3, *_CHAINS, _POINTER, *(_REAL,) * 2, _POINTER, _THREADS),
}

Kernel = Callable[..., int]

_SUFFIXES = {torch.float32: "f32", torch.float64: "f64"}

_SHARED_FROM = 1 << 22
"""Bytes from which reading is shared among threads; waking them takes as long as reading some hundred KiB."""

_NO_MEMORY = 2


@lru_cache(maxsize=64)
def kernel(name: str, dtype: torch.dtype) -> Kernel | None:
    """The function of this name for rows of this dtype."""
    return _function(f"specserve_{name}_{_SUFFIXES.get(dtype)}", _ARGUMENTS[name])


def _function(symbol: str, arguments: tuple[Any, ...]) -> Kernel | None:
    library = native.library()
    if library is None or not hasattr(library, symbol):
        return None
    found: Any = library[symbol]
    found.argtypes = arguments
    return found  # type: ignore[no-any-return]


def threads_for(rows: torch.Tensor) -> int:
    """How many threads read these rows."""
    return torch.get_num_threads() if rows.numel() * rows.itemsize >= _SHARED_FROM else 1


def packed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values in this dtype, without gaps: themselves, where they are so."""
    return values if values.dtype == dtype and values.is_contiguous() else values.to(dtype).contiguous()


def checked(status: int) -> None:
    """Raise MemoryError when a kernel says that there was none."""
    if status == _NO_MEMORY:
        raise MemoryError("no memory for the sums of a row")


def readable(rows: torch.Tensor) -> bool:
    """Whether C can read these rows where they lie."""
    return rows.is_cpu and rows.stride(-1) == 1 and not rows.requires_grad


def draw(weights: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`dists.draw_where_possible`."""
    run = kernel("draw", weights.dtype)
    if run is None or not readable(weights):
        return None
    count, width = weights.shape
    noise = packed(noise, torch.float64)
    ids, possible = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.bool)
    given = addresses.of_tensor("noise", noise, torch.float64, count)
    places = (given, ids.data_ptr(), possible.data_ptr())
    checked(run(weights.data_ptr(), weights.stride(0), count, width, *places, threads_for(weights)))
    return ids, possible


def race(dist: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
    """`race.race`."""
    run = kernel("race", dist.dtype)
    if run is None or not readable(dist):
        return None
    count, width = dist.shape
    keys = packed(keys, torch.int32)
    winners = torch.empty(count, dtype=torch.int64)
    places = (addresses.of_tensor("keys", keys, torch.int32, 4 * count), winners.data_ptr())
    checked(run(dist.data_ptr(), dist.stride(0), count, width, *places, threads_for(dist)))
    return winners


def race_scores(ids: torch.Tensor, probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
    """`race.race_scores`."""
    run = kernel("race_scores", probs.dtype)
    if run is None or not probs.is_cpu:
        return None
    ids, probs, keys = packed(ids, torch.int64), packed(probs, probs.dtype), packed(keys, torch.int32)
    scores = torch.empty(probs.shape, dtype=torch.float64)
    asked = addresses.of_tensor("ids", ids, torch.int64, probs.numel())
    given = addresses.of_tensor("keys", keys, torch.int32, 4 * len(probs))
    run(asked, probs.data_ptr(), given, *probs.shape, scores.data_ptr())
    return scores


def softmax(logits: torch.Tensor, heat: npt.NDArray[np.float32], vocab_size: int) -> torch.Tensor | None:
    """softmax(logits / heat) of rows [m, V] over the first vocab_size ids; heat [m], of which 0 counts as 1."""
    run = kernel("softmax", logits.dtype)
    if run is None or not readable(logits):
        return None
    count, width = logits.shape
    dist, heat = torch.empty(count, width), np.ascontiguousarray(heat)
    places = (addresses.of_array("heat", heat, np.float32, count), dist.data_ptr())
    run(logits.data_ptr(), logits.stride(0), count, vocab_size, width, *places, threads_for(logits))
    return dist


def exp_sums(rows: torch.Tensor, most: npt.NDArray[np.float32]) -> npt.NDArray[np.float64] | None:
    """[m]: the sum of e^(row - most) over each row [m, V], most [m] being its largest value."""
    run = kernel("exp_sums", rows.dtype)
    if run is None or not readable(rows):
        return None
    most, sums = np.ascontiguousarray(most, dtype=np.float32), np.empty(len(rows))
    given = addresses.of_array("most", most, np.float32, len(rows))
    run(rows.data_ptr(), rows.stride(0), *rows.shape, given, sums.ctypes.data, threads_for(rows))
    return sums


def argmax(rows: torch.Tensor) -> torch.Tensor | None:
    """`blocks.argmax`."""
    run = kernel("argmax", rows.dtype)
    if run is None or not readable(rows):
        return None
    places = torch.empty(len(rows), dtype=torch.int64)
    run(rows.data_ptr(), rows.stride(0), *rows.shape, places.data_ptr(), threads_for(rows))
    return places


def likeliest(rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The largest values of rows [m, V] and their ids int64, [m, count] each, count <= V; the lower id first of equals.

    An id of −inf is −1. A row that holds a NaN has NaN and −1 throughout.
    """
    run = kernel("likeliest", rows.dtype)
    if run is None or not readable(rows):
        return None
    shape = len(rows), count
    values, ids = torch.empty(shape), torch.empty(shape, dtype=torch.int64)
    places = (values.data_ptr(), ids.data_ptr())
    checked(run(rows.data_ptr(), rows.stride(0), *rows.shape, count, *places, threads_for(rows)))
    return values, ids


def sparsify(dist: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`wire.sparsify`."""
    run = kernel("sparsify", dist.dtype)
    if run is None or not readable(dist):
        return None
    shape = len(dist), k
    ids, probs = torch.empty(shape, dtype=torch.int32), torch.empty(shape, dtype=torch.float16)
    places = (ids.data_ptr(), probs.data_ptr())
    checked(run(dist.data_ptr(), dist.stride(0), *dist.shape, k, *places, threads_for(dist)))
    return ids, probs


@lru_cache(maxsize=1)
def _philox() -> Kernel | None:
    return _function("specserve_philox", (_POINTER, _COUNT, _POINTER))


def philox(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64] | None:
    """`noise.philox` of counter and key words [6, …], packed: four words [4, …]."""
    run = _philox()
    if run is None:
        return None
    into = np.empty((4, *words.shape[1:]), dtype=np.uint64)
    run(addresses.of_array("words", words, np.uint64, 6 * into[0].size), into[0].size, into.ctypes.data)
    return into
