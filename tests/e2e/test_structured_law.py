"""A structured answer has exactly the target's distribution under its masks, whatever the draft."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from grammar_tokens import END, WIDTH, A, B, abc_grammars, abc_tokenizer, ids, regex
from scipy import stats
from table_backend import TableBackend

from specserve.config import parse
from specserve.drafting.small_model import SmallModel
from specserve.drafting.worker import DraftWorker
from specserve.drafting.workspace import SparseDists, Workspace
from specserve.local import LocalEngine, Parts
from specserve.sampling.constraint import Constraint
from specserve.types import Request, RequestId, Sampling, WorkerInfo
from specserve.verification.verifier import Verifier

PROMPT, BLOCKS, BLOCK_TOKENS, VOCAB = (B, A), 2048, 4, 5
GRAMMARS = abc_grammars()
CPU = torch.device("cpu")


def table(seed):
    backend = TableBackend(torch.randn(WIDTH, WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)), 64)
    backend.allocate(BLOCKS, BLOCK_TOKENS)
    return backend


def law(backend, answer=(), mass=1.0):
    """The probability of every whole answer: the table's dists, each renormalised over what the grammar allows."""
    allowed = ids(Constraint(regex(), GRAMMARS, [*PROMPT, *answer], len(PROMPT)).allowed())
    before, last = [*PROMPT, *answer][-2:]
    weights = {token: float(backend.logits[before, last, token].double().exp()) for token in allowed}
    found = {}
    for token, weight in weights.items():
        share = mass * weight / sum(weights.values())
        if token == END:
            found[answer] = share
        else:
            found |= law(backend, (*answer, token), share)
    return found


def engine(rule, target, draft):
    config = parse({"engine": {"depth": 3, "rule": rule, "block_tokens": BLOCK_TOKENS, "queue_limit": 4096}})
    infos = [WorkerInfo(role, "cpu", BLOCKS, BLOCK_TOKENS, 64, VOCAB, 0, 0.0) for role in ("target", "draft")]
    slots = config.engine.slot_count
    drafter = DraftWorker(
        SmallModel(draft, VOCAB),
        Workspace(slots, SparseDists(slots, VOCAB, CPU), CPU),
        vocab_size=VOCAB,
        grammars=GRAMMARS,
    )
    parts = Parts(
        Verifier(target, vocab_size=VOCAB, grammars=GRAMMARS), infos[0], drafter, infos[1], None, abc_tokenizer()
    )
    return LocalEngine(config, parts=parts)


def p_value(found, expected, count):
    """Pearson's chi-square over all answers; those expected fewer than 8 times are counted as one."""
    observed = np.array([found[answer] for answer in expected], dtype=float)
    wanted = np.array(list(expected.values())) * count
    small = wanted < 8
    observed = np.append(observed[~small], observed[small].sum())
    wanted = np.append(wanted[~small], wanted[small].sum())
    return stats.chisquare(observed[wanted > 0], wanted[wanted > 0] * observed.sum() / wanted.sum()).pvalue


@pytest.mark.parametrize("rule", ["rejection", pytest.param("exact", marks=pytest.mark.full)])
def test_structured_answers_have_the_masked_targets_law(rule):
    """Every answer of a small grammar, counted against its probability, with a draft that is another model."""
    target, draft, count = table(1), table(2), 1500
    expected = law(target)
    assert abs(sum(expected.values()) - 1) < 1e-9
    with engine(rule, target, draft) as running:
        requests = [
            Request(RequestId(str(seed)), PROMPT, 10, Sampling(1.0), seed=seed, structured=regex())
            for seed in range(count)
        ]
        answers = running.complete(requests)
    found = Counter(answer.tokens for answer in answers)
    assert set(found) <= set(expected)
    assert sum(answer.stats.kept_tokens for answer in answers) > count / 2
    assert p_value(found, expected, count) > 1e-3
    # The same numbers must not fit the draft's law, or the test could not fail.
    assert p_value(found, law(draft), count) < 1e-9
