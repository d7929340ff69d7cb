"""Two engines with one draft worker that drafts ahead of their verdicts, on emulated devices in this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from paced_profiles import paced

from specserve import config as configs
from specserve.drafting import worker as draft_workers
from specserve.drafting._sharing import Turns, shares
from specserve.local import Completion, LocalEngine, load_parts
from specserve.models import _device_profile

PROMPTS = ["One prompt", "Another one"]
TOKENS = 24


@pytest.fixture
def slow(tmp_path):
    """A measured pair, slower: the target so much that the draft is done for two of them, even on a busy host."""
    return str(paced(tmp_path, "llama-8b-1b-h100", target=20, draft=4))


def test_both_engines_keep_what_was_drafted_ahead(slow) -> None:
    """Each at the same time, with branches of several outcomes: the texts of an engine alone, much of them drafted."""
    asked = {"engine.depth": 3, "engine.outcomes": 4, "draft.model.kv_blocks": 1024, "target.kv_blocks": 512}
    asked |= {"target.context_length": 2048, "draft.model.context_length": 2048}
    config = configs.parse(configs.override({}, _device_profile.settings(slow) | asked))
    with LocalEngine(config) as engine:
        alone = engine.generate(PROMPTS, max_tokens=TOKENS, ignore_eos=True)

    worker, info = draft_workers.build(config, pipelines=2)
    turns = Turns(worker)
    halves = shares(info.blocks, 2 * config.engine.slot_count, 2)

    def answered(half: int) -> list[Completion]:
        share = halves[half]
        mine = replace(info, blocks=len(share.blocks))
        parts = replace(load_parts(config), draft_worker=turns.tenant(share), draft=mine)
        with LocalEngine(config, parts=parts) as engine:
            return engine.generate(PROMPTS, max_tokens=TOKENS, ignore_eos=True)

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(answered, range(2)))
    turns.close()
    for answers in both:
        assert [answer.text for answer in answers] == [answer.text for answer in alone]
        assert sum(answer.stats.kept_tokens for answer in answers) > 0
