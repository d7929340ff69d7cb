"""A draft head on real Ray: hidden states cross sockets between the actors, and the text is that of one process."""

from __future__ import annotations

import httpx
import pytest
import tiny_heads
from deployment import served
from tiny_models import tiny_llama

from specserve import config as configs
from specserve.local import LocalEngine
from specserve.models.vocabulary import token_ids

pytestmark = pytest.mark.ray

PROMPT = "a prompt that is longer than one chunk of it"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory):
    base = tmp_path_factory.mktemp("heads")
    target = tiny_llama(base / "target", seed=1, layers=4)
    head = tiny_heads.eagle3(base / "head", vocab_size=len(token_ids(target)), read=(1, 2, 3), spoken=200)
    model = {"kv_blocks": 128, "threads": 1}
    return configs.parse(
        {
            "model_name": "tiny",
            "target": model | {"source": str(target)},
            "draft": {"speculator": "eagle", "model": model | {"source": str(head)}},
            "engine": {"depth": 3, "prefill_chunk": 8},
            "server": {"port": 0},
        }
    )


def test_the_endpoint_answers_with_the_text_of_the_local_engine(config, ray_here) -> None:
    """Greedy, two answers to one prompt, with drafts: actors, sockets and HTTP change nothing."""
    with LocalEngine(config) as engine:
        (expected,) = engine.generate([PROMPT], max_tokens=24, ignore_eos=True)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "n": 2, "ignore_eos": True}
    with served(config) as url:
        pair = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        answer = httpx.post(f"{url}/v1/completions", json=body | {"n": 1}, timeout=60).json()
    assert [choice["text"] for choice in pair["choices"] + answer["choices"]] == [expected.text] * 3
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
