"""Every model-free speculator there is, named by a request of its own beside those of the deployment."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from tiny_models import tiny_llama

from specserve import drafting
from specserve.config import DraftConfig
from specserve.local import LocalEngine
from specserve.types import Request, RequestId, Sampling

PROMPT = tuple([*range(9, 21)] * 3)
PLAIN = Request(RequestId("plain"), PROMPT, 40, Sampling(temperature=0.0), ignore_eos=True, depth=0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tiny_llama(tmp_path_factory.mktemp("target"), seed=5)
    tree = {
        "target": {"source": str(folder), "kv_blocks": 400},
        "draft": {"speculator": "none"},
        "engine": {"depth": 4, "max_requests": 4},
    }
    with LocalEngine(tree) as made:
        yield made


@pytest.mark.parametrize("source", sorted(drafting.guessers_of(DraftConfig())))
def test_a_source_that_a_request_names_drafts_for_it(engine, source: str, caplog) -> None:
    """It drafts and nothing of it fails; the answer is that of plain decoding."""
    assert source in engine.card.sources
    (plain,) = engine.complete([PLAIN])
    expected = plain.tokens if source == "prediction" else ()
    asked = replace(PLAIN, id=RequestId(source), depth=None, source=source, prediction=tuple(expected))
    with caplog.at_level(logging.WARNING):
        (found,) = engine.complete([asked])
    assert found.tokens == plain.tokens
    assert found.stats.drafted_tokens > 0
    assert not caplog.records
