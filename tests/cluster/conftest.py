"""One local Ray, one pair of tiny models and their answer, for all tests of the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_facts import PROMPT, TOKENS
from tiny_models import equal_pair

from specserve import config as configs
from specserve.config import Config
from specserve.local import LocalEngine
from specserve.text import Tokenizer
from specserve.types import Sampling


@pytest.fixture(scope="session")
def config(tmp_path_factory) -> Config:
    """Two equal tiny models, so that drafts are kept."""
    return configs.parse(
        {
            "model_name": "tiny",
            **equal_pair(tmp_path_factory.mktemp("models"), kv_blocks=128, threads=1),
            "engine": {"depth": 3, "draft_wait_s": 0.5},
            "server": {"port": 0},
        }
    )


@pytest.fixture(scope="session")
def expected(config) -> tuple[int, ...]:
    """The greedy answer of the same models in this process."""
    with LocalEngine(config) as engine:
        (answer,) = engine.generate([PROMPT], max_tokens=TOKENS, sampling=Sampling(temperature=0.0), ignore_eos=True)
    assert len(answer.tokens) == TOKENS
    return answer.tokens


@pytest.fixture(scope="session")
def expected_text(config, expected) -> str:
    """The same answer as text."""
    return Tokenizer.load(Path(config.target.source)).decode(expected)


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """A local Ray that leaves no process and no file."""
    from specserve.cluster import processes
    from specserve.cluster.local_ray import local_ray

    before = processes.descendants()
    with local_ray(ingresses=2, pipelines=2):
        yield
    assert processes.descendants() <= before
