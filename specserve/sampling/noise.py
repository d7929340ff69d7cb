"""Counter-based noise: every draw is a pure function of (request seed, branch, purpose, absolute position), and of the
token id where it is per token.

Nothing is consumed, so batching, chunking, depth, restarts and the order of calls cannot change a draw. The generator
is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), written with int64 tensor
operations so that its integers are the same bits on every device.

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

_WORD = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
# Odd multipliers of a 32-bit finaliser with full avalanche; the second one as a signed number.
_MIX = (0x7FEB352D, 0x846CA68B - 2**32)

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
T = TypeVar("T", torch.Tensor, npt.NDArray[np.int64])


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


def philox(counter: tuple[T, T, T, T], key: tuple[T, T]) -> tuple[T, T, T, T]:
    """Philox4x32-10. All words are int64 tensors or arrays that hold 32-bit unsigned values; so are the results."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The 64-bit products wrap into negative int64; shifting and masking still yields their true halves.
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((right >> 32) & _WORD) ^ c1 ^ k0,
            right & _WORD,
            ((left >> 32) & _WORD) ^ c3 ^ k1,
            left & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def _block(
    seeds: torch.Tensor,
    purpose: Purpose,
    positions: torch.Tensor,
    branches: torch.Tensor | int,
    places: torch.Tensor | int,
) -> Words:
    """The Philox block of each (seed, position, branch, place); arguments broadcast."""
    # Rows are few and steps many: numpy takes a tenth of the time that tensor operations would.
    given = [
        word.numpy(force=True) if isinstance(word, torch.Tensor) else word for word in (positions, places, branches)
    ]
    position, place, branch, seed = np.broadcast_arrays(*given, seeds.numpy(force=True))
    key = (seed & _WORD, (seed >> 32) & _WORD)
    words = philox((position & _WORD, place & _WORD, np.full_like(seed, purpose), branch & _WORD), key)
    first, second, third, fourth = (torch.from_numpy(word).to(seeds.device) for word in words)
    return first, second, third, fourth


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
    bits = ((high >> 5) << 26) | (low >> 6)
    return bits.to(torch.float64) * 2.0**-53


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
    words = torch.stack(_block(seeds, Purpose.SHARED, positions, branches, 0), -1)
    return ((words + 2**31) % 2**32 - 2**31).to(torch.int32)


def token_words(
    keys: torch.Tensor, ids: torch.Tensor, out: torch.Tensor | None = None, scratch: torch.Tensor | None = None
) -> torch.Tensor:
    """31 random bits per token id: int32 in [0, 2³¹), bit-identical on every device.

    keys int32 [..., 2] and ids int32 broadcast as keys[..., 0] + ids. The bits are a 32-bit permutation of that sum
    (multiply, xor-shift, twice) with the second key word mixed in half way, less the lowest bit: for each id alone
    exactly uniform over keys. `out` and `scratch` are int32 tensors of the result's shape to work in, where there are.
    """
    x = torch.add(ids, keys[..., 0], out=out)
    x = _xor_shift(x, 16, scratch)
    x = _xor_shift(x.mul_(_MIX[0]), 15, scratch).bitwise_xor_(keys[..., 1])
    x = _xor_shift(x.mul_(_MIX[1]), 16, scratch)
    return x.bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF)


def _xor_shift(x: torch.Tensor, bits: int, scratch: torch.Tensor | None) -> torch.Tensor:
    # The shift of a signed number drags its sign along; the mask makes it a logical one.
    shifted = torch.bitwise_right_shift(x, bits, out=scratch)
    return x.bitwise_xor_(shifted.bitwise_and_((1 << (32 - bits)) - 1))
