"""The draft worker drafts within the grammar, forked along its chain, and ends a chain with the answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from grammar_tokens import AB, END, WIDTH, A, B, C, abc_grammars, ids, regex
from table_backend import TableBackend
from worker_messages import Part, ints, opened, plan

from specserve.drafting.small_model import SmallModel
from specserve.drafting.worker import DraftWorker
from specserve.drafting.workspace import SparseDists, Workspace
from specserve.sampling import wire
from specserve.sampling.constraint import Constraint
from specserve.transport.messages import Push

GRAMMARS = abc_grammars()
CPU = torch.device("cpu")


def worker(seed: int = 0, ranks: int = 0) -> DraftWorker:
    logits = torch.randn(WIDTH, WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)) * 3
    model = TableBackend(logits)
    model.allocate(64, 4)
    space = Workspace(32, SparseDists(32, WIDTH, CPU), CPU, ranks=ranks)
    return DraftWorker(SmallModel(model, 5), space, vocab_size=WIDTH, grammars=GRAMMARS)


def structured(row: int, pattern: str, tokens: list[int], **fields):
    return replace(opened(row, **fields), tokens=ints(tokens), prompt_length=2, structured=regex(pattern))


def pushed(drafter: DraftWorker, *parts: Part) -> Push:
    (reply,) = drafter.handle(plan(parts))
    assert isinstance(reply, Push), reply
    return reply


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.7])
def test_every_drafted_token_is_one_that_the_grammar_allows(temperature: float) -> None:
    """Along the whole chain, up to an end token, after which nothing is drafted; dists hold nothing else either."""
    lengths = set()
    for seed in range(40):
        drafter = worker(seed)
        drafter.handle(structured(1, "(ab|a|c){1,3}", [B, B], temperature=temperature, seed=seed))
        push = pushed(drafter, Part(1, 0, [B, B], [0, 1, 2], slots=range(6)))
        chain = push.tokens.tolist()
        lengths.add(len(chain))
        dists = wire.decode(push.dists, WIDTH, CPU).dense(WIDTH) if temperature else None
        for j, token in enumerate(chain):
            allowed = ids(Constraint(regex("(ab|a|c){1,3}"), GRAMMARS, [B, B, *chain[:j]], 2).allowed())
            assert token in allowed
            assert dists is None or set(dists[j].nonzero().squeeze(1).tolist()) <= allowed
        assert END not in chain[:-1]
        assert len(chain) == 6 or chain[-1] == END
    assert len(lengths) > 1


def test_a_draft_goes_on_from_what_was_kept() -> None:
    """After any part of the last chain was kept, it drafts what a fresh worker drafts that knows the answer so far."""
    for kept in range(4):
        drafter = worker(3)
        drafter.handle(structured(1, "[abc]{9}", [B, B]))
        chain = pushed(drafter, Part(1, 0, [B, B], [0, 1, 2], slots=range(4))).tokens.tolist()
        answer = [B, B, *chain[:kept], C]
        start = 2 + min(kept, 3)
        after = pushed(drafter, Part(1, start, answer[start:], [0, 1, 2], slots=range(4))).tokens.tolist()
        fresh = worker(3)
        fresh.handle(structured(1, "[abc]{9}", answer))
        assert pushed(fresh, Part(1, 0, answer, [0, 1, 2], slots=range(4))).tokens.tolist() == after


def test_a_row_without_anything_to_draft_leaves_the_others_theirs() -> None:
    """A finished answer, a refused one and one without grammar in a plan: chains of their own lengths."""
    drafter = worker(1)
    drafter.handle(structured(1, "c", [B, B, C]))
    drafter.handle(structured(2, "c", [B, B, A]))
    drafter.handle(structured(3, "(a", [B, B, A]))
    drafter.handle(opened(4))
    drafter.handle(structured(5, "ab", [B, B, AB, END]))
    parts = [
        Part(row, 0, [B, B, token][: 3 + (row == 5)], [2 * row], slots=range(4 * row, 4 * row + 4))
        for row, token in ((1, C), (2, A), (3, A), (4, A))
    ]
    parts.append(Part(5, 0, [B, B, AB, END], [10, 11], slots=range(20, 24)))
    for part in parts:
        part.table = [part.table[0], part.table[0] + 1]
    push = pushed(drafter, *parts)
    assert push.chain_lengths.tolist() == [1, 0, 0, 4, 0]
    assert push.tokens[0] == END


@pytest.mark.parametrize("ranks", [0, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["rejection", "coupled", "exact"])
def test_an_answer_that_ends_in_its_draft_spoils_no_draft(rule: str, temperature: float, ranks: int) -> None:
    """Steps go on behind its end for the other rows: its own place there holds nothing, and everybody is served."""
    for seed in range(5):
        drafter = worker(seed, ranks)
        drafter.handle(structured(1, "c", [B, B], temperature=temperature, rule=rule, seed=seed))
        drafter.handle(opened(2, temperature=temperature, rule=rule, seed=seed))
        parts = [Part(1, 0, [B, B], [0, 1], slots=range(5)), Part(2, 0, [B, B], [2, 3], slots=range(5, 10))]
        push = pushed(drafter, *parts)
        assert push.chain_lengths.tolist() == [2, 5]
        assert push.tokens.tolist()[:2] == [C, END]


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_drafts_follow_the_grammar_where_an_option_forbids_all_of_it(rule: str) -> None:
    """As the target does: the grammar goes first."""
    drafter = worker()
    drafter.handle(structured(1, "c{3}", [B, B], rule=rule, allowed_token_ids=(A, B)))
    assert pushed(drafter, Part(1, 0, [B, B], [0, 1], slots=range(4))).tokens.tolist() == [C, C, C, END]
