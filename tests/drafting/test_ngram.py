"""Prompt lookup."""

import random
import subprocess
import sys

import pytest

from specserve.config import DraftConfig
from specserve.drafting import ngram


def guess(history: list[int], low: int, high: int, depth: int) -> list[int]:
    guesser = ngram.build(DraftConfig(speculator="ngram", ngram_min=low, ngram_max=high))
    guesser.open(1, history)
    return guesser.guess(1, depth)


@pytest.mark.parametrize(
    ("history", "low", "high", "depth", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 2, 2, 3, [4, 1, 2]),
        ([1, 2, 3, 4, 1, 2, 3], 2, 2, 2, [4, 1]),
        ([1, 3, 6, 2, 3, 4, 1, 2, 3], 2, 2, 3, [4, 1, 2]),
        ([1, 3, 6, 2, 3, 4, 1, 2, 3], 1, 1, 2, [4, 1]),
        ([2, 3, 4, 5, 1, 2, 3, 4, 1, 2, 3, 4], 3, 4, 2, [1, 2]),
        ([1, 2, 3, 100, 1, 2, 3, 200, 1, 2, 3, 300, 1, 2, 3], 3, 3, 2, [300, 1]),
        ([1, 2, 3, 4], 1, 3, 2, []),
        ([5], 1, 3, 2, []),
        ([], 1, 3, 2, []),
        ([7, 7], 1, 3, 4, [7]),
        ([1, 2, 9, 1, 2], 1, 3, 5, [9, 1, 2]),
        ([1, 2, 9, 1, 2], 1, 3, 0, []),
    ],
)
def test_the_most_recent_longest_match_decides(
    history: list[int], low: int, high: int, depth: int, expected: list[int]
) -> None:
    """The guess is what followed the most recent occurrence of the longest suffix that occurred before."""
    assert guess(history, low, high, depth) == expected


def brute_force(tokens: list[int], low: int, high: int, depth: int) -> list[int]:
    for size in range(high, low - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                return tokens[end : end + depth]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_the_growing_index_agrees_with_a_search(seed: int) -> None:
    """However the history arrives, guesses are those of a search over the whole of it."""
    chance = random.Random(seed)
    low, high = 1 + seed % 2, 1 + seed % 2 + seed % 3
    guesser = ngram.NgramGuesser(low, high)
    tokens = [chance.randrange(4) for _ in range(chance.randrange(6))]
    guesser.open(3, tokens)
    for _ in range(60):
        assert guesser.guess(3, 4) == brute_force(tokens, low, high, 4)
        more = [chance.randrange(4) for _ in range(chance.randrange(1, 4))]
        guesser.extend(3, more)
        tokens += more


def test_rows_do_not_share_their_history() -> None:
    """Each row knows its own tokens only; a row opened again starts afresh; closing twice is harmless."""
    guesser = ngram.NgramGuesser(1, 2)
    guesser.open(1, [1, 2, 1])
    guesser.open(2, [1, 3, 1])
    assert (guesser.guess(1, 1), guesser.guess(2, 1)) == ([2], [3])
    guesser.open(1, [1])
    assert guesser.guess(1, 1) == []
    guesser.close(1)
    guesser.close(1)
    with pytest.raises(KeyError):
        guesser.guess(1, 1)


def test_a_guesser_needs_no_torch() -> None:
    """Importing the n-gram speculator does not import torch."""
    code = "import sys, specserve.drafting.ngram; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
