"""A target of two processes on real Ray: the text is that of one process, and the loss of either replaces both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_facts import TOKENS
from deployment import complete, drafted, kill_mid_stream, pids, served

from specserve.config import Config

pytestmark = [pytest.mark.ray, pytest.mark.full]  # by default tests/models/test_tensor_parallel.py has the ranks


@pytest.fixture(scope="module")
def url(config: Config, ray_here: None) -> Iterator[str]:
    """The deployment of `test_cluster` with its target over two ranks."""
    target = config.target.model_copy(update={"tensor_parallel": 2})
    # While ranks that share a core with other work wait for each other, hearts beat late.
    cluster = config.cluster.model_copy(update={"lost_after_s": 4.0})
    with served(config.model_copy(update={"target": target, "cluster": cluster})) as address:
        yield address


def test_the_text_is_that_of_one_process(url: str, expected_text: str) -> None:
    """Greedy, with drafts of a worker of its own: they are kept as by a target of one process."""
    assert pids().keys() == {"pipeline", "coordinator", "target", "target/1", "draft"}
    assert len(set(pids().values())) == 5
    answer = complete(url)
    assert answer["choices"][0]["text"] == expected_text
    assert drafted(answer) > 0
    assert answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > TOKENS / 2


@pytest.mark.parametrize("role", ["target/1", "target"])
def test_the_loss_of_a_rank_replaces_the_group_under_the_stream(role: str, url: str, expected_text: str) -> None:
    """SIGKILL of one rank in mid stream: the stream waits and ends with the same text; both processes are others."""
    before = pids()
    assert kill_mid_stream(url, role) == expected_text
    after = pids()
    assert not {before["target"], before["target/1"]} & {after["target"], after["target/1"]}
    assert (after["draft"], after["coordinator"]) == (before["draft"], before["coordinator"])
    assert complete(url)["choices"][0]["text"] == expected_text
