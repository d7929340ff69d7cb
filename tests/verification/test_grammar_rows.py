"""The verifier holds every target row to the grammar after the drafted tokens before it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from grammar_tokens import AB, END, WIDTH, A, B, C, abc_grammars, regex
from table_backend import TableBackend
from worker_messages import Part, ints, opened, verify

from specserve.config import EngineConfig
from specserve.transport.messages import Failed, Verdict
from specserve.verification import judges_of
from specserve.verification.verifier import Verifier

GRAMMARS = abc_grammars()
RULES = sorted(judges_of(EngineConfig()))


def model(*liked: int) -> TableBackend:
    """A model that likes these tokens best, in this order, whatever came before; padding it likes even more."""
    logits = torch.zeros(WIDTH, WIDTH, WIDTH)
    for rank, token in enumerate(reversed(liked), 1):
        logits[..., token] = rank
    logits[..., 5:] = 9
    backend = TableBackend(logits)
    backend.allocate(64, 4)
    return backend


def structured(row: int, pattern: str, tokens: list[int], prompt_length: int = 2, **fields):
    message = opened(row, **({"temperature": 0.0} | fields))
    return replace(message, tokens=ints(tokens), prompt_length=prompt_length, structured=regex(pattern))


def worker(*liked: int) -> Verifier:
    return Verifier(model(*liked), vocab_size=5, grammars=GRAMMARS)


def verdict(verifier: Verifier, *parts: Part) -> tuple[list[int], list[int]]:
    (reply,) = verifier.handle(verify(parts))
    assert isinstance(reply, Verdict), reply
    return reply.kept.tolist(), reply.next.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("chain", "allowed"),
    [
        ([A, B, C], {(3, A), (3, C), (3, AB), (3, END)}),
        ([A, A, A], {(3, END), (3, B)}),
        ([C, B, C], {(1, A), (1, C), (1, AB), (1, END)}),  # b cannot follow c: what is drafted after it does not count
        ([END, A], {(0, A), (0, C), (0, AB)}),  # an empty answer does not match
        ([A, END, END, A], {(3, END)}),  # the coordinator cuts at the first end token
        ([AB, END, C], {(2, END)}),
        ([B], {(0, A), (0, C), (0, AB)}),
        ([C, C, C, C], {(3, END)}),
    ],
)
def test_no_rule_keeps_or_chooses_what_the_grammar_refuses(rule, temperature, chain, allowed) -> None:
    """A model that drafts what it likes may lose drafts to the target's taste, but never gains a forbidden token."""
    text = {A: "a", B: "b", C: "c", AB: "ab", END: "$"}
    verifier = worker(*dict.fromkeys(chain))
    for seed in range(20):
        verifier.handle(structured(1, "(ab|a|c){1,3}", [B, B], rule=rule, temperature=temperature, seed=seed))
        (kept,), (token,) = verdict(verifier, Part(1, 0, [B, B], [0, 1], chain=chain))
        most = max(length for length, _ in allowed)
        assert kept <= most
        if kept == most:
            assert (kept, token) in allowed, "".join(text[t] for t in [*chain[:kept], token])


FORBIDDING = {
    "allowed_token_ids": (END, 5),
    "bad_words": ((A,), (C,), (AB,)),
    "min_tokens": 9,
}
"""Options that forbid all that `c?` or `ab|a|c` allows somewhere."""


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("option", FORBIDDING)
def test_what_a_grammar_wants_is_written_though_an_option_forbids_it(option, rule, temperature) -> None:
    """An answer of one token of `ab|a|c`, whose end is early, too, is what the grammar says at every step."""
    ends = (END,) if option == "min_tokens" else ()
    for seed in range(10):
        verifier = worker(B, END)
        fields = {"rule": rule, "temperature": temperature, "seed": seed, "end_tokens": ends}
        verifier.handle(structured(1, "ab|a|c", [B, B], **fields, **{option: FORBIDDING[option]}))
        (kept,), (token,) = verdict(verifier, Part(1, 0, [B, B], [0, 1], chain=[B, END]))
        assert kept == 0
        assert token in {A, C, AB}
        verifier.handle(structured(1, "ab|a|c", [B, B, C], **fields, **{option: FORBIDDING[option]}))
        assert verdict(verifier, Part(1, 0, [B, B, C], [0, 1], chain=[C])) == ([0], [END])


def test_drafts_that_the_grammar_allows_are_kept() -> None:
    """The masks do not refuse too much: the target's own masked greedy path is kept whole."""
    verifier = worker(B, AB, C)
    verifier.handle(structured(1, "(ab|a|c){1,3}", [B, B]))
    assert verdict(verifier, Part(1, 0, [B, B], [0, 1, 2], chain=[AB, AB, AB, END])) == ([4], [END])
    assert verdict(verifier, Part(1, 0, [B, B], [0, 1, 2], chain=[A, B])) == ([0], [AB])


def test_structured_and_plain_rows_share_a_round() -> None:
    """Only structured rows are masked; a prefill chunk of a structured row has nothing to mask."""
    verifier = worker(B, C)
    for row in (1, 3):
        verifier.handle(structured(row, "c+a", [B, B]))
    for row in (2, 4):
        verifier.handle(opened(row, temperature=0))
    verifier.handle(structured(5, "a", [B] * 6, 6))
    parts = [
        Part(1, 0, [B, B], [0, 1], chain=[C, C]),
        Part(5, 0, [B, B], [9, 10], due=False),
        Part(2, 0, [B, B], [2, 3], chain=[B, C]),
        Part(3, 0, [B, B], [4, 5]),
        Part(4, 0, [B, B], [6, 7], chain=[B]),
    ]
    assert verdict(verifier, *parts) == ([2, 0, 1, 0, 1], [C, -1, B, C, B])
    assert verdict(verifier, Part(5, 2, [B] * 4, [9, 10])) == ([0], [A])


def test_a_restarted_verifier_goes_on_from_the_committed_tokens() -> None:
    """Opened in the middle of an answer and fed from its begin in chunks, or from what was known, it is the same."""
    committed = [B, B, C, A]
    masks = []
    for start in (0, 3):
        verifier = worker(B, C)
        if start:
            verifier.handle(structured(1, "(ab|a|c){1,3}", committed[:3]))
            verdict(verifier, Part(1, 0, committed[:3], [0, 1], chain=[A, A, A]))
        else:
            verifier.handle(structured(1, "(ab|a|c){1,3}", committed))
            verdict(verifier, Part(1, 0, committed[:3], [0, 1], due=False))
        masks.append(verdict(verifier, Part(1, 3, committed[3:], [0, 1], chain=[B, C, END])))
    assert masks == [([3], [END])] * 2


@pytest.mark.parametrize(
    ("pattern", "tokens", "why"),
    [
        ("a+", [B, B, C], "none that its grammar allows"),
        ("[0-9]", [B, B], "cannot be followed"),
        ("(a", [B, B], "refused"),
        ("(a|a)*" * 2000, [B, B, A], "cannot be followed"),
    ],
)
def test_a_row_that_cannot_be_masked_is_the_only_one_at_fault(pattern, tokens, why) -> None:
    """Its fault is named, and the round without it goes through."""
    verifier = worker(B, C)
    verifier.handle(structured(1, pattern, tokens))
    verifier.handle(structured(2, "c+", [B, B]))
    other = Part(2, 0, [B, B], [4, 5])
    (reply,) = verifier.handle(verify([Part(1, 0, tokens, [0, 1]), other]))
    assert isinstance(reply, Failed)
    assert reply.rows.tolist() == [1]
    assert why in reply.reason
    assert verdict(verifier, other) == ([0], [C])


def test_a_verifier_without_grammars_serves_no_structured_row() -> None:
    """It never answers such a row unmasked."""
    verifier = Verifier(model(B), vocab_size=5)
    verifier.handle(structured(1, "a", [B, B]))
    (reply,) = verifier.handle(verify([Part(1, 0, [B, B], [0])]))
    assert isinstance(reply, Failed)
    assert "without grammars" in reply.reason
