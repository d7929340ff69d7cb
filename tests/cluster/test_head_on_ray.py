"""Draft heads on real Ray, in a worker of their own or beside the verifier: the text is that of one process."""

from __future__ import annotations

import httpx
import pytest
import tiny_heads
import tiny_mtp
from deployment import served
from tiny_models import tiny_llama

from specserve import config as configs
from specserve.local import LocalEngine
from specserve.models.vocabulary import token_ids

pytestmark = pytest.mark.ray

PROMPT = list(range(10, 54))


@pytest.fixture(scope="module", params=[pytest.param("eagle", marks=pytest.mark.full), "mtp"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """EAGLE-3, whose hidden states cross sockets between the actors, or heads in the target's checkpoint."""
    base = tmp_path_factory.mktemp("heads")
    model, draft = {"kv_blocks": 128, "threads": 1}, {"speculator": request.param}
    if request.param == "eagle":
        target = tiny_llama(base / "target", seed=1, layers=4)
        head = tiny_heads.eagle3(base / "head", vocab_size=len(token_ids(target)), read=(1, 2, 3), spoken=200)
        draft["model"] = model | {"source": str(head)}
    else:
        target = tiny_mtp.target(base / "target", "deepseek", tiny_mtp.heads(1), vocab_size=60)
    return configs.parse(
        {
            "model_name": "tiny",
            "target": model | {"source": str(target)},
            "draft": draft,
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
