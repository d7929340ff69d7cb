"""Greedy chains under options: the published table of penalties, bad words and allowed ids, on one verification."""

from __future__ import annotations

import pytest
import torch
from worker_messages import Part, opened, verify

from specserve.models import NoRowStates
from specserve.transport.messages import Verdict
from specserve.verification.verifier import Verifier

VOCAB = 100


class FixedBackend:
    """A `Backend` that says these tokens, one per wanted row: logit 100, the runner-up 15 has 99, others -100."""

    vocab_size = VOCAB
    device = torch.device("cpu")
    states = NoRowStates()

    def __init__(self, tokens):
        self._tokens = tokens

    def forward(self, batch):
        logits = torch.full((len(batch.wanted), VOCAB), -100.0)
        logits[:, 15] = 99.0
        logits[torch.arange(len(self._tokens)), torch.tensor(self._tokens)] = 100.0
        return logits


def outcome(chains, says, options):
    """What one round emits for each row; row r's answer so far is the one token r + 2 after a prompt of three."""
    worker = Verifier(FixedBackend([token for row in says for token in row]), vocab_size=VOCAB)
    parts = []
    for r, (chain, sampling) in enumerate(zip(chains, options, strict=True)):
        worker.handle(opened(r, temperature=0, tokens=[5, 6, 7, r + 2], prompt_length=3, **sampling))
        parts.append(Part(r, 3, [r + 2], [r], chain=chain))
    (verdict,) = worker.handle(verify(parts))
    assert isinstance(verdict, Verdict), verdict
    return [
        [*chain[:kept], token]
        for chain, kept, token in zip(chains, verdict.kept.tolist(), verdict.next.tolist(), strict=True)
    ]


EVERY = tuple(range(VOCAB))


def test_frequency_penalties_act_inside_the_chain():
    """A token drafted again and again falls below the runner-up exactly where its count says."""
    chains, says = [[1, 1, 1], [], [1, 1, 1]], [[1, 1, 1, 1], [7], [1, 1, 1, 1]]
    options = [{"frequency_penalty": value} for value in (1.5, 1.5, 0.7)]
    assert outcome(chains, says, options) == [[1, 15], [7], [1, 1, 15]]
    assert outcome(chains, says, [{}] * 3) == [[1, 1, 1, 1], [7], [1, 1, 1, 1]]


def test_a_bad_word_is_refused_inside_the_chain():
    """The drafted bad word is replaced by the runner-up; a row without it is kept whole."""
    chains, says = [[1, 2, 3], [1, 15, 3], [1, 2, 3]], [[1, 2, 3, 4], [1, 15, 3, 4], [1, 2, 3, 4]]
    assert outcome(chains, says, [{"bad_words": ((2,),)}] * 3) == [[1, 15], [1, 15, 3, 4], [1, 15]]
    assert outcome(chains, says, [{"bad_words": ((1, 2, 3),)}] * 3) == [[1, 2, 15], [1, 15, 3, 4], [1, 2, 15]]


def test_ids_that_are_not_allowed_are_refused_inside_the_chain():
    """Row 0 may not say 0 to 4, row 1 anything, row 2 all but 2 to 4."""
    chains, says = [[1, 2, 10], [10, 5, 3], [7, 10, 12]], [[1, 2, 10, 5], [10, 5, 10, 5], [7, 10, 12, 5]]
    options = [{"allowed_token_ids": EVERY[5:]}, {}, {"allowed_token_ids": EVERY[:2] + EVERY[5:]}]
    assert outcome(chains, says, options) == [[15], [10, 5, 10], [7, 10, 12, 5]]


@pytest.mark.parametrize(("least", "kept"), [(2, [1, 0]), (3, [1, 15]), (4, [1, 15])])
def test_an_end_is_refused_until_min_tokens(least, kept):
    """One token of answer and one of the chain stand before the end token 0."""
    options = {"min_tokens": least, "end_tokens": (0,)}
    assert outcome([[1, 0]], [[1, 0, 9]], [options])[0][:2] == kept


def test_repetition_reaches_the_prompt():
    """Token 6 stands in the prompt and nowhere else: halving 100 lets the runner-up pass."""
    assert outcome([[1, 6]], [[1, 6, 9]], [{"repetition_penalty": 2.0}]) == [[1, 15]]
