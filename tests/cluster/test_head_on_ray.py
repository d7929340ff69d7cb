"""Draft heads on real Ray, in a worker of their own or beside the verifier: the text is that of one process."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import tiny_heads
import tiny_mtp
from bare_pipeline import greedy, serving
from deployment import served
from tiny_models import tiny_llama

from specserve import config as configs
from specserve.config import Config
from specserve.local import LocalEngine
from specserve.models.vocabulary import token_ids
from specserve.types import Delta

pytestmark = pytest.mark.ray

PROMPT = list(range(10, 54))
TOKENS = 24


def config_of(speculator: str, base: Path, outcomes: int = 0) -> Config:
    """EAGLE-3, whose hidden states cross sockets between the actors, or heads in the target's checkpoint."""
    model, draft = {"kv_blocks": 128, "threads": 1}, {"speculator": speculator}
    if speculator == "eagle":
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
            "engine": {"depth": 3, "prefill_chunk": 8, "outcomes": outcomes},
            "server": {"port": 0},
        }
    )


def expected(config: Config):
    """The greedy answer of one process."""
    with LocalEngine(config) as engine:
        return engine.generate([PROMPT], max_tokens=TOKENS, ignore_eos=True)[0]


def test_heads_beside_the_verifier_need_no_other_process(tmp_path, ray_here) -> None:
    """Without Serve: coordinator and verifier are all there is, it drafts, the tokens are those of one process."""
    config = config_of("mtp", tmp_path)
    request = replace(greedy("a", PROMPT), max_tokens=TOKENS)

    async def run() -> tuple[set[str], list[Delta]]:
        async with serving(config) as (supervisor, engine):
            return set(supervisor.pids), [delta async for delta in engine.stream(request)]

    processes, deltas = asyncio.run(run())
    assert "draft" not in processes
    assert tuple(token for delta in deltas for token in delta.tokens) == expected(config).tokens
    assert deltas[-1].stats.drafted_tokens > 0


@pytest.mark.full
@pytest.mark.parametrize(("speculator", "outcomes"), [("eagle", 0), ("eagle", 4), ("mtp", 0)])
def test_the_endpoint_answers_with_the_text_of_the_local_engine(speculator, outcomes, tmp_path, ray_here) -> None:
    """Greedy, two answers to one prompt, with drafts: actors, sockets and HTTP change nothing."""
    config = config_of(speculator, tmp_path, outcomes)
    text = expected(config).text
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "n": 2, "ignore_eos": True}
    with served(config) as url:
        pair = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        answer = httpx.post(f"{url}/v1/completions", json=body | {"n": 1}, timeout=60).json()
    assert [choice["text"] for choice in pair["choices"] + answer["choices"]] == [text] * 3
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
