"""The suffix automaton in the engine: it changes how fast an answer comes, and nothing else."""

from __future__ import annotations

import pytest
from tiny_models import tiny_llama

from specserve.local import LocalEngine
from specserve.types import Request, RequestId, Sampling


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Completions of the same requests, greedy and sampled, twice each: without speculation and with the automaton."""
    folder = tiny_llama(tmp_path_factory.mktemp("target"), seed=5)
    found = {}
    for speculator, depth in (("none", 0), ("suffix", 6)):
        tree = {
            "target": {"source": str(folder), "kv_blocks": 400},
            "draft": {"speculator": speculator},
            "engine": {"depth": depth, "max_requests": 4},
        }
        with LocalEngine(tree) as engine:
            found[speculator] = [engine.complete(requests(attempt)) for attempt in range(2)]
    return found


def requests(attempt: int) -> list[Request]:
    return [
        Request(
            RequestId(f"{attempt}-{temperature}-{number}"),
            tuple(range(9 + number, 21 + number)),
            40,
            Sampling(temperature),
            seed=number,
            ignore_eos=True,
            rule="coupled",
        )
        for temperature in (0.0, 1.0)
        for number in range(2)
    ]


def test_answers_are_those_of_plain_decoding(answers) -> None:
    """Greedy ones, and under `coupled` the seeded ones as well."""
    for attempt in range(2):
        plain, speculated = (answers[name][attempt] for name in ("none", "suffix"))
        assert [one.tokens for one in speculated] == [one.tokens for one in plain]


def test_an_answer_that_was_given_before_comes_in_few_rounds(answers) -> None:
    """The second time past answers vouch for nearly all tokens; the first time they cannot."""
    first, second = (sum(one.stats.rounds for one in some) for some in answers["suffix"])
    assert second < 0.4 * first
