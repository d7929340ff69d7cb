"""The suffix automaton, against plain searches."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from specserve.config import DraftConfig
from specserve.drafting import suffix
from specserve.drafting.suffix import Automaton, SuffixGuesser


def occurrences(needle: list[int], texts: list[list[int]]) -> Iterator[tuple[list[int], int]]:
    """Every text and place just after an occurrence of the needle in it."""
    for text in texts:
        for end in range(len(needle), len(text) + 1):
            if text[end - len(needle) : end] == needle:
                yield text, end


def longest_before(history: list[int]) -> int:
    """The length of the longest suffix that occurs before, too."""
    shorter = [history[:-1]]
    sizes = range(len(history) - 1, 0, -1)
    return next((size for size in sizes if any(occurrences(history[-size:], shorter))), 0)


def random_text(chance: random.Random, most: int, alphabet: int = 3) -> list[int]:
    return [chance.randrange(alphabet) for _ in range(chance.randrange(most))]


@pytest.mark.parametrize("seed", range(20))
def test_a_guess_followed_the_longest_suffix_that_occurred_before(seed: int) -> None:
    """However the history arrives, a guess is what followed some occurrence of the longest repeated suffix."""
    chance = random.Random(seed)
    guesser = SuffixGuesser(1, 10**6)
    history = random_text(chance, 6)
    guesser.open(1, history)
    for _ in range(40):
        new = random_text(chance, 4, 2 + seed % 4)
        history += new
        guesser.extend(1, new)
        size = longest_before(history)
        found = guesser.guess(1, 4)
        if size == 0:
            assert found == []
        else:
            places = occurrences(history[-size:], [history[:-1]])
            assert found in [history[end : end + min(4, 2 * size)] for _, end in places]


@pytest.mark.parametrize("seed", range(20))
def test_texts_of_closed_rows_are_searched_whole_and_never_across_their_ends(seed: int) -> None:
    """A later row finds its longest suffix in any past text, and is never offered what belongs to the next text."""
    chance = random.Random(seed)
    guesser, texts = SuffixGuesser(1, 10**6), []
    for row in range(6):
        texts.append(random_text(chance, 14))
        guesser.open(row, texts[-1])
        guesser.close(row)
    history: list[int] = []
    guesser.open(99, history)
    for _ in range(8):
        token = chance.randrange(3)
        history.append(token)
        guesser.extend(99, [token])
        found = guesser.guess(99, 3)
        assert not found or any(
            text[end : end + len(found)] == found
            for size in range(1, len(history) + 1)
            for text, end in occurrences(history[-size:], [*texts, history])
        )
    # And the match is the longest one: a text that repeats the history with a fresh token behind it wins.
    guesser.open(7, [*history, 50])
    guesser.close(7)
    guesser.open(8, history)
    assert guesser.guess(8, 1) == [50] or longest_before(history) == len(history)


def test_a_row_prefers_its_own_text_unless_a_past_one_matches_longer() -> None:
    """Two tokens matched in the row's own text outweigh one in a past text, and the other way round."""
    guesser = SuffixGuesser(1, 10**6)
    guesser.open(1, [4, 1, 2, 70, 71])
    guesser.close(1)
    guesser.open(2, [1, 2, 80, 81, 9, 1, 2])
    guesser.open(3, [1, 2, 80, 81, 9, 4, 1, 2])
    assert guesser.guess(2, 2) == [80, 81]
    assert guesser.guess(3, 2) == [70, 71]


def test_a_short_match_vouches_for_few_tokens() -> None:
    """A match of one token is followed by at most two guessed ones; a match of two by four."""
    guesser = SuffixGuesser(1, 10**6)
    guesser.open(1, [1, 11, 12, 13, 14, 15, 1])
    guesser.open(2, [1, 2, 12, 13, 14, 15, 16, 1, 2])
    assert guesser.guess(1, 8) == [11, 12]
    assert guesser.guess(2, 8) == [12, 13, 14, 15]


def test_the_shortest_match_is_configured() -> None:
    """`ngram_min` bounds what is looked up, as for n-grams."""
    guesser = suffix.build(DraftConfig(speculator="suffix", ngram_min=2))
    guesser.open(1, [1, 9, 8, 1])
    guesser.open(2, [5, 1, 9, 8, 5, 1])
    assert guesser.guess(1, 2) == []
    assert guesser.guess(2, 2) == [9, 8]


def test_what_is_remembered_of_the_past_is_bounded() -> None:
    """After many closed rows two generations of texts are left, each of at most twice the bound."""
    guesser = SuffixGuesser(1, 100)
    for row in range(50):
        guesser.open(row, [row * 100 + place for place in range(60)])
        guesser.close(row)
    assert len(guesser._past) == 2
    assert all(len(past.text) < 200 for past in guesser._past)
    guesser.open(99, [4910])
    assert guesser.guess(99, 1) == [4911]
    guesser.open(98, [10])
    assert guesser.guess(98, 1) == []


def test_unknown_rows_are_errors_but_may_be_closed() -> None:
    """Only open rows can be asked or extended."""
    guesser = SuffixGuesser(1, 100)
    guesser.close(5)
    with pytest.raises(KeyError):
        guesser.guess(5, 1)
    with pytest.raises(KeyError):
        guesser.extend(5, [1])


@pytest.mark.parametrize("seed", range(10))
def test_the_automaton_has_the_size_that_theory_allows(seed: int) -> None:
    """At most 2n - 1 states for n tokens, each longer than the one it links to."""
    chance = random.Random(seed)
    automaton = Automaton()
    for _ in range(300):
        automaton.append(chance.randrange(1 + seed % 3))
    assert len(automaton.lengths) <= 2 * 300
    assert all(
        automaton.lengths[link] < automaton.lengths[state] for state, link in enumerate(automaton.links) if link >= 0
    )
