"""A constraint follows any pattern of accepted and refused drafts, and masks are laid over logits exactly."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from grammar_tokens import AB, END, WIDTH, A, B, C, abc_grammars, ids, regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import byte_level

from specserve.errors import InvalidField, ProtocolError
from specserve.sampling.constraint import Constraint, restrict
from specserve.sampling.grammar import Grammars
from specserve.text import Tokenizer
from specserve.types import Structured

ABC = abc_grammars()
BYTES = Grammars(Tokenizer(byte_level(), end_tokens=frozenset({0, 2})))
CASES = [
    (ABC, regex(), range(WIDTH - 2)),
    (ABC, regex("(ab|c)*a"), range(WIDTH - 2)),
    (BYTES, Structured("json_schema", '{"type": "array", "items": {"enum": ["one", "two", 3]}}'), range(421)),
    (BYTES, Structured("choice", '["é", "日本", "日"]'), range(421)),
]


class Forgetful(Constraint):
    """Broken on purpose: it does not take back what was refused."""

    def _unread(self, length: int) -> None:
        self._read = min(self._read, length)


class Late(Constraint):
    """Broken on purpose: a rewritten position leaves what lay past it."""

    def write(self, start, tokens):
        kept = self._answer[max(0, start - self._prompt_length) + len(tokens) :]
        super().write(start, [*tokens, *kept])


def rounds(kind: type[Constraint], case, rng: random.Random) -> None:
    """Play rounds of feeding, drafting and committing; after each write the mask must be a fresh matcher's own."""
    grammars, structured, vocabulary = case
    prompt = [1] * rng.randint(1, 4)
    tokens = list(prompt)
    held = kind(structured, grammars, tokens, len(prompt))
    cached = 0 if rng.random() < 0.5 else len(tokens) - 1

    def fresh(written):
        return ids(Constraint(structured, grammars, written, len(prompt)).allowed())

    for _ in range(12):
        start = rng.randint(0, cached) if rng.random() < 0.2 else cached  # a refill begins anywhere
        middle = rng.randint(start, len(tokens))
        held.write(start, tokens[start:middle])
        held.write(middle, tokens[middle:])
        path, good = list(tokens), 0
        for j in range(rng.randint(0, 5) + 1):
            now = ids(held.allowed())
            assert now == fresh(path), (path, j)
            if now is None:
                break
            good = j
            token = rng.choice(sorted(now)) if rng.random() < 0.8 else rng.choice(vocabulary)
            path.append(token)
            held.write(len(path) - 1, [token])
        kept = path[len(tokens) : len(tokens) + rng.randint(0, good)]
        kept = kept[: next((i for i, token in enumerate(kept) if token in grammars.end_tokens), len(kept))]
        choices = sorted((fresh(tokens + kept) or set()) - grammars.end_tokens)
        if not choices:
            return
        cached = len(tokens) + len(kept)
        tokens += [*kept, rng.choice(choices)]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), case=st.sampled_from(CASES))
def test_masks_are_exact_after_any_pattern_of_verdicts(seed: int, case) -> None:
    """Drafts kept in part, refused, ended inside, refilled from anywhere: the state is that of the written tokens."""
    rounds(Constraint, case, random.Random(seed))


@pytest.mark.parametrize("broken", [Forgetful, Late])
def test_the_law_above_catches_states_that_are_not_taken_back(broken: type[Constraint]) -> None:
    """Both broken variants are found within the same number of examples."""

    def play() -> None:
        for seed in range(150):
            rounds(broken, CASES[seed % len(CASES)], random.Random(seed))

    with pytest.raises(AssertionError):
        play()


def test_an_answer_may_end_only_where_its_grammar_may() -> None:
    """End tokens are allowed at the grammar's ends, nothing else after them, and no token after a refused one."""
    held = Constraint(regex("(ab|a|c){1,2}"), ABC, [9, 9], 2)
    assert ids(held.allowed()) == {A, C, AB}
    held.write(2, [A])
    assert ids(held.allowed()) == {A, B, C, AB, END}
    held.write(3, [B, AB])
    assert ids(held.allowed()) == {END}
    held.write(5, [END])
    assert (ids(held.allowed()), held.ended) == ({END}, True)
    held.write(6, [END])
    assert ids(held.allowed()) == {END}
    held.write(6, [A])
    assert ids(held.allowed()) is None
    held.write(3, [END])
    assert ids(held.allowed()) == {END}
    held.write(2, [END])
    assert ids(held.allowed()) is None
    held.write(2, [B, A])
    assert (ids(held.allowed()), held.ended) == (None, False)


def test_a_gap_in_what_is_written_is_refused() -> None:
    """Positions that nobody wrote cannot be skipped."""
    held = Constraint(regex(), ABC, [9, 9, A], 2)
    with pytest.raises(ProtocolError, match="position 4"):
        held.write(4, [A])


def test_matching_that_grows_too_complex_is_an_error_of_its_request() -> None:
    """The limit speaks through an exception, and again when it is asked again; never through a wrong mask."""
    held = Constraint(regex("(a|a)*" * 2000), ABC, [], 0)
    held.write(0, [A])
    for _ in range(2):
        with pytest.raises(InvalidField, match="cannot be followed"):
            held.allowed()


def test_restricted_logits_are_the_models_own_where_allowed() -> None:
    """Only the named rows change; padding beyond the bits is closed; None closes a row; the input stays."""
    logits = torch.arange(4 * 11, dtype=torch.float32).view(4, 11)
    before = logits.clone()
    bits = np.packbits(np.array([1, 0, 0, 1, 0, 0, 0, 1], dtype=np.uint8), bitorder="little")
    masked = restrict(logits, [2, 0], [bits, None])
    assert torch.equal(logits, before)
    assert torch.equal(masked[[1, 3]], logits[[1, 3]])
    assert masked[2].isfinite().nonzero().squeeze(1).tolist() == [0, 3, 7]
    assert torch.equal(masked[2, [0, 3, 7]], logits[2, [0, 3, 7]])
    assert not masked[0].isfinite().any()
    assert restrict(logits, [], []) is logits
