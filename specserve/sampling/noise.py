"""Counter-based noise: every draw is a pure function of (request seed, branch, purpose, absolute position), and of the
token id where it is per token.

Nothing is consumed, so batching, chunking, depth, restarts and the order of calls cannot change a draw. The generator
is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), computed on the host in whole
numbers, in numpy or in C. What is per token id is mixed from it by integer operations where the logits are.

The counter is (position, place, purpose, branch) and the key (seed low, seed high), in 32-bit words. The branch numbers
the answers of one request (n > 1) from 0; distinct branches have independent noise.

The place is how far into its chain a token is, for the draws that propose and test drafted tokens; others have 0. It
tells rounds apart: a position that was drafted, not kept, and is drafted again stands at another place of its new
chain. `block` needs that. Its verdict depends on tokens and noise beyond what it keeps, so noise that a next round used
again would no longer be independent of the answer so far, and the law would be wrong from the second round on. Nodes
of a tree that stand at one position have places of their own, too (`tree_places`).

Noise per token id would cost a Philox block for every four ids of a row. Here Philox is asked once per row, for a key
of four words, and a keyed integer mixer turns the key and a token id into that id's bits (see `token_words`).
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from specserve.sampling import _kernels

_ROUNDS = 10
_WORD, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_WEYL = np.arange(_ROUNDS, dtype=np.uint64)[:, None] * np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
# Odd multipliers of a 32-bit finaliser with full avalanche; the second one as a signed number.
_MIX = (0x7FEB352D, 0x846CA68B - 2**32)

Words = npt.NDArray[np.uint64]
T = TypeVar("T", torch.Tensor, npt.NDArray[np.int32])


class Purpose(IntEnum):
    """What a draw decides. Streams of different purposes are independent.

    PROPOSE picks a drafted token, ACCEPT tests one, CHOOSE picks the target's own token. Sharing a stream between
    proposing and choosing would bias a ratio test. SHARED is noise per token id, which the rule `coupled` gives to
    draft and target on purpose.
    """

    PROPOSE = 0
    ACCEPT = 1
    CHOOSE = 2
    SHARED = 3


def philox(counter: Words, key: Words) -> Words:
    """Philox4x32-10: four words [4, …] of the counter [4, …] under the key [2, …], 32 bits in 64 each.

    A round multiplies the even words, and each product's halves go to the other pair: both pairs are one operation.
    """
    even, odd = counter[0::2], counter[1::2]
    ones = (1,) * (key.ndim - 1)
    multipliers = _MULTIPLIERS.reshape(2, *ones)
    for keys in (key + _WEYL.reshape(_ROUNDS, 2, *ones)) & _WORD:
        swapped = (even * multipliers)[::-1]
        even, odd = (swapped >> _HALF) ^ odd ^ keys, swapped & _WORD
    words = np.empty_like(counter)
    words[0::2], words[1::2] = even, odd
    return words


def _block(
    seeds: torch.Tensor,
    purpose: Purpose,
    positions: torch.Tensor,
    branches: torch.Tensor | int,
    places: torch.Tensor | int,
) -> Words:
    """The Philox block [4, …] of each (seed, position, branch, place); arguments broadcast."""
    # Rows are few and steps many: numpy takes a tenth of the time that tensor operations would.
    position, place, branch, seed = (
        word.numpy(force=True) if isinstance(word, torch.Tensor) else word
        for word in (positions, places, branches, seeds)
    )
    words = np.empty((6, *np.broadcast(position, place, branch, seed).shape), dtype=np.int64)
    for row, word in zip(words, (position, place, int(purpose), branch, seed, seed >> 32), strict=True):
        row[...] = word
    found = _kernels.philox(words.view(np.uint64))
    if found is not None:
        return found
    masked = words.view(np.uint64) & _WORD
    return philox(masked[:4], masked[4:])


def uniform(
    seeds: torch.Tensor,
    purpose: Purpose,
    positions: torch.Tensor,
    branches: torch.Tensor | int = 0,
    places: torch.Tensor | int = 0,
) -> torch.Tensor:
    """One uniform per (seed, position, branch, place): float64 in [0, 1) with 53 random bits, the same on every device.

    Arguments are int64 and broadcast against each other; the result has their common shape. A position, below 2³², is
    the absolute index of the token that the draw is about, the first prompt token being 0; its place counts from 0 at
    the first token of its chain.
    """
    high, low, _, _ = _block(seeds, purpose, positions, branches, places)
    bits = high >> np.uint64(5) << np.uint64(26) | low >> np.uint64(6)
    return torch.from_numpy(bits * 2.0**-53).to(seeds.device)


def node_places(levels: torch.Tensor | int, ranks: torch.Tensor) -> torch.Tensor:
    """int64: the places of tree nodes by level and rank, both from 0: as in a chain for the first node of a level."""
    return levels + _LONGEST_CHAIN * ranks


def tree_places(levels: torch.Tensor) -> torch.Tensor:
    """int64 [B, N]: the places of all nodes of trees, by their levels int64 [B, N]; no two of a tree are the same."""
    same = (levels[:, :, None] == levels[:, None, :]).tril(-1)
    return node_places(levels, same.sum(-1))


_LONGEST_CHAIN = 2**16


def token_keys(seeds: torch.Tensor, positions: torch.Tensor, branches: torch.Tensor | int = 0) -> torch.Tensor:
    """int32 [..., 4]: the key of the noise per token id at each (seed, position, branch); arguments as for `uniform`.

    The four words of the Philox block with purpose SHARED, as signed numbers: two for each call of `token_words`.
    """
    words = np.moveaxis(_block(seeds, Purpose.SHARED, positions, branches, 0), 0, -1)
    return torch.from_numpy(words.astype(np.uint32, order="C").view(np.int32)).to(seeds.device)


def token_words(keys: T, ids: T) -> T:
    """31 random bits per token id: int32 in [0, 2³¹), bit-identical on every device, and in numpy.

    keys int32 [..., 2] and ids int32 broadcast as keys[..., 0] + ids. The bits are a 32-bit permutation of that sum
    (multiply, xor-shift, twice) with the second key word mixed in half way, less the lowest bit: for each id alone
    exactly uniform over keys.
    """
    x = ids + keys[..., 0]
    x ^= _shifted(x, 16)
    x *= _MIX[0]
    x ^= _shifted(x, 15)
    x ^= keys[..., 1]
    x *= _MIX[1]
    x ^= _shifted(x, 16)
    return _shifted(x, 1)


def _shifted(x: T, bits: int) -> T:
    # The shift of a signed number drags its sign along; the mask makes it a logical one.
    return (x >> bits) & ((1 << (32 - bits)) - 1)
