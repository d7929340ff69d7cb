"""Drafts from the answer that a client predicted."""

from __future__ import annotations

import random

import pytest

from specserve.config import DraftConfig
from specserve.drafting import prediction

WORDS = list(range(100, 140))
"""A prediction of 40 different tokens."""


def guess_after(answer: list[int], depth: int = 4, predicted: list[int] = WORDS) -> list[int]:
    guesser = prediction.build(DraftConfig())
    guesser.open(1, [7, 8, 9], 3, predicted)
    guesser.extend(1, answer)
    return guesser.guess(1, depth)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([], [100, 101, 102, 103]),
        ([100, 101], [102, 103, 104, 105]),
        (WORDS, []),
        (WORDS[:38], [138, 139]),
        ([100, 101, 5], []),
        ([100, 101, 5, 103], [104, 105, 106, 107]),  # a replaced token
        ([100, 101, 5, 6, 102], [103, 104, 105, 106]),  # inserted ones
        ([100, 101, 110], [111, 112, 113, 114]),  # left out ones
        ([100, 101, 130], []),  # one token far away is no sign
        ([100, 101, 130, 131], [132, 133, 134, 135]),  # two are
        ([120, 121, 122, 100, 101], [102, 103, 104, 105]),  # back to the beginning
        ([5], [100, 101, 102, 103]),  # an opening that was not predicted
        ([5] * 5, []),
    ],
)
def test_the_guess_follows_the_answer_through_the_prediction(answer: list[int], expected: list[int]) -> None:
    """In step it goes on; after a replacement, an insertion, an omission or a jump it is found again."""
    assert guess_after(answer) == expected


def test_of_several_places_the_longest_run_decides_then_the_nearest_ahead() -> None:
    """In [1 2 3] … [9 2 3] … [1 2 3] the answer 9 2 3 means the middle; 2 3 alone the next one ahead."""
    predicted = [1, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3, 70]
    assert guess_after([8] * 6 + [9, 2, 3], 1, predicted) == [60]
    assert guess_after([1, 2, 3, 50, 77, 2, 3], 1, predicted) == [60]


@pytest.mark.parametrize("seed", range(10))
def test_a_row_opened_again_guesses_as_one_that_grew(seed: int) -> None:
    """Preempted in the middle of an edited answer, the place is the same; the prompt is never looked up."""
    chance = random.Random(seed)
    predicted = [chance.randrange(30) for _ in range(60)]
    answer = [token if chance.random() < 0.8 else chance.randrange(30) for token in predicted]
    grown = prediction.build(DraftConfig())
    grown.open(1, predicted, len(predicted), predicted)
    for count, token in enumerate(answer, start=1):
        grown.extend(1, [token])
        again = prediction.build(DraftConfig())
        again.open(2, predicted + answer[:count], len(predicted), predicted)
        assert grown.guess(1, 5) == again.guess(2, 5)


def test_an_edited_text_costs_few_rounds() -> None:
    """200 tokens of which every 20th is replaced: at depth 8 more than 4 tokens come with every round."""
    chance = random.Random(0)
    predicted = [chance.randrange(60) for _ in range(200)]
    answer = [token if index % 20 else 1000 + index for index, token in enumerate(predicted)]
    guesser = prediction.build(DraftConfig())
    guesser.open(1, [], 0, predicted)
    done = rounds = 0
    while done < len(answer):
        guess = guesser.guess(1, 8)
        kept = next((i for i, token in enumerate(guess) if answer[done + i : done + i + 1] != [token]), len(guess))
        guesser.extend(1, answer[done : done + kept + 1])
        done += kept + 1
        rounds += 1
    assert len(answer) / rounds > 4


def test_a_row_without_a_prediction_has_nothing_to_say() -> None:
    """Opened like any other row it guesses nothing, at any length; closing twice is harmless."""
    guesser = prediction.build(DraftConfig())
    guesser.open(1, [1, 2, 1, 2])
    guesser.extend(1, [1])
    assert guesser.guess(1, 4) == []
    guesser.close(1)
    guesser.close(1)
    with pytest.raises(KeyError):
        guesser.guess(1, 1)
