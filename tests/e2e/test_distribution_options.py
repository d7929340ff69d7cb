"""With penalties and filters at temperature 1.1, answers have the law that these options define."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from test_distribution import LENGTH, PROMPT, VOCAB, engine, p_value, tiny_llama

from specserve.types import Request, RequestId, Sampling

OPTIONS = Sampling(
    temperature=1.1,
    min_p=0.03,
    repetition_penalty=1.2,
    presence_penalty=-0.4,
    frequency_penalty=0.6,
    logit_bias=((1, 0.5),),
    bad_words=((2, 2), (0, 1, 0)),
)


def next_law(logits, said):
    """float64 [VOCAB]: the options, each as documented, on one row of logits after an answer so far."""
    row = logits
    row[1] += 0.5
    for token in range(VOCAB):
        if token in PROMPT or token in said:
            row[token] = row[token] / 1.2 if row[token] > 0 else row[token] * 1.2
        row[token] -= 0.6 * said.count(token) - 0.4 * (token in said)
    if said[-1:] == [2]:
        row[2] = -np.inf
    if said[-2:] == [0, 1]:
        row[0] = -np.inf
    dist = np.exp(row / 1.1 - (row / 1.1).max())
    dist[dist < 0.03 * dist.max()] = 0
    return dist / dist.sum()


def joint_law(model):
    """P(answer) of every answer of LENGTH tokens under OPTIONS, from the model's own logits."""
    answers = list(itertools.product(range(VOCAB), repeat=LENGTH))
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *answer] for answer in answers])).logits.double().numpy()
    law = np.ones(len(answers))
    for index, answer in enumerate(answers):
        for step, token in enumerate(answer):
            law[index] *= next_law(logits[index, len(PROMPT) - 1 + step].copy(), list(answer[:step]))[token]
    return law


def sample(running, count):
    requests = [
        Request(RequestId(f"s{seed}"), PROMPT, LENGTH, OPTIONS, seed=seed, ignore_eos=True) for seed in range(count)
    ]
    return Counter(completion.tokens for completion in running.complete(requests))


@pytest.mark.parametrize(
    ("rule", "count"),
    [
        ("rejection", 2500),
        pytest.param("rejection", 4000, marks=pytest.mark.full),
        pytest.param("exact", 4000, marks=pytest.mark.full),
    ],
)
def test_answers_under_options_have_their_law(tmp_path_factory, rule, count):
    """243 cells, depth 3, another model as draft, whose own law does not fit; the impossible never happens."""
    folders = [tmp_path_factory.mktemp(name) for name in ("target", "draft")]
    target, draft = (tiny_llama(folder, seed) for folder, seed in zip(folders, (1, 2), strict=True))
    law = joint_law(target)
    assert abs(law.sum() - 1) < 1e-9
    with engine(folders, rule) as running:
        found = sample(running, count)
    cells = np.array([found[cell] for cell in itertools.product(range(VOCAB), repeat=LENGTH)])
    assert cells[law == 0].sum() == 0
    assert p_value(found, law, count) > 1e-3
    assert p_value(found, joint_law(draft), count) < 1e-9
