"""Log-probabilities in a verdict: the target's own, for exactly those tokens that were asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from table_backend import TableBackend
from worker_messages import Part, opened, verify

from specserve.coordinator.logprobs import read
from specserve.errors import ProtocolError
from specserve.transport.messages import Scores, Verdict, pack, unpack
from specserve.verification.verifier import Verifier

VOCAB, REAL = 9, 7


def backend():
    model = TableBackend(torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)) * 2)
    model.logits[..., REAL:] = 50.0  # padding that no score may see
    model.allocate(64, 4)
    return model


def answered(worker, parts) -> Verdict:
    (reply,) = worker.handle(verify(parts))
    assert isinstance(reply, Verdict), reply
    return unpack(pack(reply))


def expected(model, history, token):
    """The token's log-probability after a history, and all of them, likeliest first."""
    logs = torch.log_softmax(model.logits[history[-2] if len(history) > 1 else 0, history[-1], :REAL], -1)
    return float(logs[token]), logs.sort(descending=True)


def check(model, tokens, first, found, width):
    """These records are the scores of tokens[first:]."""
    assert len(found) == len(tokens) - first
    for at, score in enumerate(found, start=first):
        value, ranked = expected(model, tokens[:at], tokens[at])
        assert (score.token, score.logprob) == (tokens[at], pytest.approx(value, abs=1e-5))
        assert [token for token, _ in score.top] == ranked.indices[:width].tolist()
        assert [value for _, value in score.top] == pytest.approx(ranked.values[:width].tolist(), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_emitted_tokens_carry_raw_scores(temperature):
    """Kept, corrected and bonus tokens, before temperature, filters and masks; rows that did not ask have none."""
    model = backend()
    worker = Verifier(model, vocab_size=REAL)
    asked = {1: 0, 2: 3, 3: None, 4: 20}
    for row, width in asked.items():
        options = {"allowed_token_ids": (1, 2, 3), "frequency_penalty": 1.0} if row == 2 else {"top_k": 2}
        worker.handle(opened(row, temperature=temperature, tokens=[1, 2], prompt_length=2, logprobs=width, **options))
    chains = {1: [3, 1], 2: [2, 3, 1], 3: [1], 4: []}
    verdict = answered(
        worker, [Part(row, 0, [1, 2], [2 * row, 2 * row + 1], chain=chain) for row, chain in chains.items()]
    )
    emitted = [
        [*chain[:kept], token] if asked[row] is not None else []
        for (row, chain), kept, token in zip(chains.items(), verdict.kept.tolist(), verdict.next.tolist(), strict=True)
    ]
    for (_, width), tokens, found in zip(asked.items(), emitted, read(verdict.scores, emitted), strict=True):
        check(model, [1, 2, *tokens], 2, found, min(width or 0, REAL))


def test_prompts_are_scored_chunk_by_chunk():
    """Each prompt token but the first has a score, also where a chunk ends before it; the answer has its own."""
    model = backend()
    worker = Verifier(model, vocab_size=REAL)
    prompt = [1, 2, 3, 4, 5, 6]
    asks = {"tokens": prompt, "prompt_length": 6, "prompt_logprobs": 2, "temperature": 0}
    worker.handle(opened(1, logprobs=1, **asks))
    worker.handle(opened(2, temperature=0))
    found = []
    for start, end in ((0, 2), (2, 3), (3, 6)):
        other = Part(2, 0, [1, 2], [9], chain=[3])
        verdict = answered(worker, [Part(1, start, prompt[start:end], [1, 2], due=end == 6), other])
        following = prompt[start + 1 : end + 1]
        found += read(verdict.prompt_scores, [following, []])[0]
    check(model, prompt, 1, found, 2)
    token = int(verdict.next[0])
    check(model, [*prompt, token], 6, read(verdict.scores, [[token], []])[0], 1)
    assert token == int(model.logits[5, 6, :REAL].argmax())


def test_nothing_is_computed_for_nobody():
    """Rounds without a request for scores carry none, and look at due positions only."""
    model = backend()
    worker = Verifier(model, vocab_size=REAL)
    worker.handle(opened(1))
    verdict = answered(worker, [Part(1, 0, [1, 2, 3], [0])])
    assert verdict.scores.lengths.size == verdict.prompt_scores.logprobs.size == 0
    assert model.forwards[-1].wanted.tolist() == [2]


@pytest.mark.parametrize("field", ["lengths", "widths", "logprobs", "top_ids", "top_logprobs"])
def test_scores_of_other_tokens_are_refused(field):
    """Each column is checked against what was asked for."""
    floats = np.zeros(4, dtype="float32")
    columns = {
        "lengths": np.array([2, 0]),
        "widths": np.array([2, 0]),
        "logprobs": floats[:2],
        "top_ids": np.zeros(4, dtype="int32"),
        "top_logprobs": floats,
    }
    assert len(read(Scores(**columns), [[1, 2], []])[0]) == 2
    columns[field] = columns[field][:-1] if len(columns[field]) > 2 or field == "logprobs" else columns[field] + 1
    with pytest.raises(ProtocolError):
        read(Scores(**columns), [[1, 2], []])
