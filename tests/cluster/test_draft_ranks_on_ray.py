"""A draft of two processes on real Ray, before a target of one."""

from __future__ import annotations

import pytest
from cluster_facts import TOKENS
from deployment import complete, pids, served

from specserve.config import Config

pytestmark = [pytest.mark.ray, pytest.mark.full]


def test_a_draft_of_two_processes_drafts_as_one(config: Config, ray_here: None, expected_text: str) -> None:
    """The draft's ranks are its own setting; its drafts are kept by a target of one process."""
    model = config.draft.model.model_copy(update={"tensor_parallel": 2})
    draft = config.draft.model_copy(update={"model": model})
    cluster = config.cluster.model_copy(update={"lost_after_s": 4.0})
    with served(config.model_copy(update={"draft": draft, "cluster": cluster})) as address:
        assert "draft/1" in pids()
        answer = complete(address)
    assert answer["choices"][0]["text"] == expected_text
    assert answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > TOKENS / 2
