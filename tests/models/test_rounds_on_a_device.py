"""Draft, verification and their models, whole rounds on a device that is not there: the host's answers, few looks."""

from __future__ import annotations

import contextlib

import pytest
from pretend_device import PretendDevice, moved
from test_step_graphs import garbage
from tiny_causal import BLOCK, BLOCKS, VOCABULARY, tiny
from worker_messages import Part, opened, plan, verify, with_drafts

from specserve.config import EngineConfig
from specserve.drafting.small_model import SmallModel
from specserve.drafting.worker import DraftWorker
from specserve.drafting.workspace import SparseDists, Workspace
from specserve.models._recorder import PlainRecorder
from specserve.models._step_shapes import planned
from specserve.models.paged_transformers import PagedTransformers
from specserve.transport.messages import Push, Verdict
from specserve.verification.verifier import Verifier

DEPTH, ROUNDS = 3, 6
ENGINE = EngineConfig(depth=DEPTH, max_requests=4, outcomes=0)
PROMPTS = [[5, 9, 23, 4], [7, 8, 9, 10, 11, 12, 13]]
TABLES = [list(range(16)), list(range(20, 36))]


def backend(on_device: bool, role: str) -> PagedTransformers:
    """The same small model for both, whose usual steps are recorded."""
    made = PagedTransformers(moved(tiny("llama")) if on_device else tiny("llama"), None)
    made.plan_steps(planned(role, ENGINE, made.context_length))
    made.allocate(BLOCKS, BLOCK)
    assert list(made.record_with(PlainRecorder()))
    if not on_device:
        garbage(made)
    return made


def answers(on_device: bool, options: dict) -> tuple[list[list[int]], list[int], list[PagedTransformers]]:
    """Tokens of each request after some rounds; how often each round looked; both backends."""
    device = PretendDevice()
    looks = []
    with device if on_device else contextlib.nullcontext():
        target, draft = backend(on_device, "target"), backend(on_device, "draft")
        workspace = Workspace(16, SparseDists(16, 32, draft.device), draft.device)
        worker = DraftWorker(SmallModel(draft, VOCABULARY), workspace, vocab_size=VOCABULARY)
        verifier = Verifier(target, vocab_size=VOCABULARY, engine=ENGINE)
        texts = [list(prompt) for prompt in PROMPTS]
        for row, text in enumerate(texts):
            for each in (worker, verifier):
                list(each.handle(opened(row, seed=row, tokens=text, prompt_length=len(text), **options)))
        for number in range(ROUNDS):
            device.looks.clear()
            lacks = [len(text) if not number else min(2, len(text)) for text in texts]  # a draft reads one token again
            parts = [
                Part(row, len(text) - lack, text[-lack:], TABLES[row], slots=range(8 * row, 8 * row + DEPTH))
                for row, (text, lack) in enumerate(zip(texts, lacks, strict=True))
            ]
            (push,) = worker.handle(plan(parts, number))
            assert isinstance(push, Push), push
            if number:
                parts = [Part(part.row, part.start + 1, part.feed[1:], part.table) for part in parts]
            offered = with_drafts(parts, push)
            (verdict,) = verifier.handle(verify(offered, push.dists, number))
            assert isinstance(verdict, Verdict), verdict
            looks.append(sum(device.looks.values()))
            for text, part, kept, following in zip(texts, offered, verdict.kept, verdict.next, strict=True):
                text += [*part.chain[: int(kept)], int(following)]
    return texts, looks, [target, draft]


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {}, {"rule": "block", "top_p": 0.9}, {"rule": "coupled"}], ids=str
)
def test_rounds_on_a_device_give_the_hosts_answers(options: dict) -> None:
    """A look for each drafted step, one for what was drawn from where that is shipped, and one for the verdict."""
    expected, _, _ = answers(False, options)
    found, looks, backends = answers(True, options)
    assert found == expected
    shipped = options.get("temperature") != 0 and options.get("rule") != "coupled"
    assert looks == [DEPTH + shipped + 1] * ROUNDS
    for made in backends:
        assert made.graphs is not None
        assert made.graphs.eager <= 1
    assert min(map(len, found)) > len(PROMPTS[1]) + ROUNDS
