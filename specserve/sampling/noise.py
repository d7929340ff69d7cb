"""Counter-based noise: every draw is a pure function of (request seed, purpose, absolute position).

Nothing is consumed, so batching, chunking, depth, restarts and the order of calls cannot change a draw. The generator
is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), written with int64 tensor
operations so that its integers are the same bits on every device.

The counter is (position low, position high, purpose, 0) and the key (seed low, seed high), in 32-bit words.
"""

from __future__ import annotations

from enum import IntEnum

import torch

_WORD = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Purpose(IntEnum):
    """What a draw decides. Streams of different purposes are independent.

    PROPOSE picks a drafted token, ACCEPT tests one, CHOOSE picks the target's own token. Sharing a stream between
    proposing and choosing would bias a ratio test.
    """

    PROPOSE = 0
    ACCEPT = 1
    CHOOSE = 2


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Philox4x32-10. All words are int64 tensors that hold 32-bit unsigned values; so are the four results."""
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


def uniform(seeds: torch.Tensor, purpose: Purpose, positions: torch.Tensor) -> torch.Tensor:
    """One uniform per (seed, position): float64 in [0, 1) with 53 random bits, bit-identical on every device.

    seeds and positions are int64 and broadcast against each other; the result has their common shape. A position is
    the absolute index of the token that the draw is about, the first prompt token being 0.
    """
    seeds, positions = seeds + torch.zeros_like(positions), positions + torch.zeros_like(seeds)
    constant = torch.full_like(positions, int(purpose))
    counter = (positions & _WORD, (positions >> 32) & _WORD, constant, torch.zeros_like(positions))
    high, low, _, _ = philox(counter, (seeds & _WORD, (seeds >> 32) & _WORD))
    bits = ((high >> 5) << 26) | (low >> 6)
    return bits.to(torch.float64) * 2.0**-53
