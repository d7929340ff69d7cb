"""Serial heads draft what a plain implementation of one sequence drafts, whatever the engine does around them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_mtp
from mtp_reference import AssistantReference, MtpReference
from test_eagle import asked

from specserve.config import parse
from specserve.local import LocalEngine, load_parts
from specserve.models import _mtp_heads
from specserve.models._constant_heads import ConstantHeads
from specserve.models._mtp_heads import AdvancingHeads
from specserve.models._row_groups import RaggedPlan
from specserve.transport.messages import Verdict

VOCAB, DEPTH, BLOCK = 12, 4, 4
FED = _mtp_heads._fed

KINDS = {
    "deepseek, one head": ("deepseek", 1),
    "deepseek, four heads": ("deepseek", 4),
    "qwen": ("qwen", 1),
    "megatron, two heads": ("megatron", 2),
    "constant": ("gemma", 1),
}

SAMPLED = pytest.mark.parametrize(
    "made",
    [kind if kind in ("deepseek, one head", "qwen") else pytest.param(kind, marks=pytest.mark.full) for kind in KINDS],
    indirect=True,
    scope="module",
)
"""The same things happen to all kinds of heads, and these two are quick."""


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MtpReference]:
    """A target with heads in a published layout, and the plain implementation of them."""
    layout, count = KINDS[request.param]
    if layout == "gemma":
        folder = tiny_mtp.gemma(tmp_path_factory.mktemp("target"), vocab_size=VOCAB)
        head = tiny_mtp.assistant(folder / "assistant", vocab_size=VOCAB)
        return folder, AssistantReference(folder, head)
    heads = tiny_mtp.heads(count)
    folder = tiny_mtp.target(tmp_path_factory.mktemp("target"), layout, heads, vocab_size=VOCAB)
    return folder, MtpReference(folder, heads, pair=layout == "deepseek")


def settings(folder: Path, speculator: str = "mtp", target: dict | None = None, **engine):
    own = folder / "assistant"
    limits = {"depth": DEPTH, "block_tokens": BLOCK, "prefill_chunk": 8, "max_requests": 6, "max_batch_tokens": 64}
    return parse(
        {
            "target": {"source": str(folder), "device": "cpu", "kv_blocks": 512} | (target or {}),
            "draft": {"speculator": speculator, "model": {"source": str(own) if own.is_dir() else "demo"}},
            "engine": limits | engine,
        }
    )


class Recorder:
    """The verifier, and what it was told and answered."""

    def __init__(self, worker):
        self.worker, self.rounds = worker, []

    def handle(self, message):
        replies = list(self.worker.handle(message))
        self.rounds += [(message, reply) for reply in replies if isinstance(reply, Verdict)]
        return replies

    def chains(self):
        """(row, committed tokens, chain) of every chain that was drafted."""
        for asked_for, verdict in self.rounds:
            ends = (asked_for.starts + asked_for.feed_lengths + verdict.kept + 1).tolist()
            at = 0
            for row, end, length in zip(verdict.rows.tolist(), ends, verdict.drafted.lengths.tolist(), strict=True):
                if length:
                    yield row, end, verdict.drafted.tokens[at : at + length].tolist()
                at += length


def run(config, *batches):
    """The answers to these batches of requests, one after the other, and the recorded verifier."""
    parts = load_parts(config)
    assert parts.draft_worker is None
    recorder = Recorder(parts.verifier)
    parts = type(parts)(recorder, parts.target, None, None, parts.guesser, parts.tokenizer)
    with LocalEngine(config, parts=parts) as engine:
        answers = [answer for requests in batches for answer in engine.complete(requests)]
        levels = engine.levels()
    assert (levels.slots_held, levels.target_blocks_held, levels.draft_blocks_held) == (0, 0, 0)
    return answers, recorder


def compare(reference, requests, answers, recorder):
    """Answers are the target's own, and every chain that of the plain implementation. Returns how many those were."""
    read = {}
    for row, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        tokens = [*request.prompt, *answer.tokens]
        choices, states = reference.read_target(tokens)
        assert choices[len(request.prompt) - 1 : -1] == list(answer.tokens)
        read[row] = tokens, states
    compared = 0
    for row, length, chain in recorder.chains():
        tokens, states = read[row]
        assert chain == reference.drafts(tokens[:length], states, len(chain)), (row, length)
        compared += 1
    return compared


def random_prompts(seed: int, lengths) -> list[list[int]]:
    noise = random.Random(seed)
    return [[noise.randrange(VOCAB) for _ in range(length)] for length in lengths]


def test_drafts_are_those_of_a_plain_implementation(made) -> None:
    """Twenty prompts of up to five chunks, six at a time: every chain of every round, and answers are the target's."""
    folder, reference = made
    noise = random.Random(5)
    requests = asked(random_prompts(6, [noise.randint(1, 38) for _ in range(20)]))
    answers, recorder = run(settings(folder), requests)
    assert compare(reference, requests, answers, recorder) > 200
    assert sum(answer.stats.kept_tokens for answer in answers) > 10


def test_recorded_steps_of_the_target_leave_their_states_where_heads_find_them(made) -> None:
    """The same where the target's steps are replayed, most of them; its spare block is none of the heads'."""
    folder, reference = made
    requests = asked(random_prompts(7, [3, 14, 25, 9, 1, 30]))
    answers, recorder = run(settings(folder, target={"graphs": "on"}), requests)
    assert compare(reference, requests, answers, recorder) > 40
    target = recorder.worker._backend
    assert target.graphs.replayed > 2 * target.graphs.eager > 0
    assert target._backend.pages.keys[0].shape[0] == (512 + 1) * BLOCK
    assert {len(chain) for _, _, chain in recorder.chains()} >= {1, DEPTH}
    assert not any(len(message.shown) or len(verdict.hidden.rows) for message, verdict in recorder.rounds)


@pytest.mark.parametrize(("depth", "batch"), [(1, 6), (2, 1), (3, 6), (4, 1)])
def test_answers_are_the_targets_at_every_depth(made, depth: int, batch: int) -> None:
    """Alone and together: the answers of plain decoding, and the drafts of the plain implementation."""
    folder, reference = made
    requests = asked(random_prompts(7, (1, 2, 3, 9, 17, 30)[-batch:]), tokens=12)
    answers, recorder = run(settings(folder, depth=depth, max_requests=batch), requests)
    assert compare(reference, requests, answers, recorder) > 3 * batch
    assert max(len(chain) for _, _, chain in recorder.chains()) == depth


def test_answers_to_one_prompt_share_what_was_read_of_it(made) -> None:
    """Three answers to each prompt, at lengths around a block's end: shared pages, and nothing of them read again."""
    folder, reference = made
    prompts = random_prompts(8, (7, 8, 9, 12, 21))
    requests = [
        request
        for number, prompt in enumerate(prompts)
        for request in asked([prompt] * 3, tokens=8, family=f"f{number}", name=f"f{number}-")
    ]
    answers, recorder = run(settings(folder, max_requests=15), requests)
    assert compare(reference, requests, answers, recorder) > 60
    fed = sum(int(message.feed_lengths.sum()) for message, _ in recorder.rounds)
    alone = sum(len(request.prompt) + len(answer.tokens) for request, answer in zip(requests, answers, strict=True))
    assert fed < alone - 2 * sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts) + len(requests)


def test_what_is_cached_of_a_prompt_is_cached_for_the_heads_too(made) -> None:
    """The same beginnings again: neither target nor heads read them, and drafts are the same."""
    folder, reference = made
    prompts = random_prompts(9, (30, 33, 38))
    first = asked(prompts, tokens=6)
    again = asked([[*prompt, 1, 2] for prompt in prompts], tokens=10, name="again")
    answers, recorder = run(settings(folder), first, again)
    assert min(answer.stats.cached_tokens for answer in answers[len(first) :]) >= 28
    assert compare(reference, first + again, answers, recorder) > 30


@SAMPLED
def test_preempted_requests_go_on_with_the_same_drafts(made) -> None:
    """With too few blocks requests lose their places, and drafts the room that they would take beside others."""
    folder, reference = made
    requests = asked(random_prompts(10, (30,) * 4), tokens=24)
    config = settings(folder, target={"kv_blocks": 36, "context_length": 128}, max_requests=4, prefix_cache=False)
    answers, recorder = run(config, requests)
    assert any(message.epochs.max() > 0 for message, _ in recorder.rounds)
    assert compare(reference, requests, answers, recorder) > 40


def test_depth_zero_drafts_nothing_and_reads_for_others(made) -> None:
    """A request without speculation leaves blocks behind from which another one drafts."""
    folder, reference = made
    (prompt,) = random_prompts(11, (33,))
    first, again = asked([prompt], depth=0), asked([prompt], name="again")
    answers, recorder = run(settings(folder), first, again)
    assert answers[0].stats.drafted_tokens == 0 < answers[1].stats.drafted_tokens
    assert answers[1].stats.cached_tokens >= 28
    assert compare(reference, first + again, answers, recorder) > 5


@SAMPLED
def test_an_adaptive_depth_drafts_as_well(made) -> None:
    """Rounds without drafts in between lose nothing of what the heads keep."""
    folder, reference = made
    requests = asked(random_prompts(12, (5, 9, 20)), tokens=120)
    answers, recorder = run(settings(folder, depth_policy="adaptive"), requests)
    assert compare(reference, requests, answers, recorder) > 10


def test_a_failure_beside_the_verdict_costs_drafts_only(made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heads raise in every second step: answers are the target's all the same."""
    folder, reference = made
    kind = ConstantHeads if isinstance(reference, AssistantReference) else AdvancingHeads
    read, calls = kind.read, []

    def failing(self, *arguments):
        calls.append(arguments)
        if len(calls) % 2:
            raise RuntimeError("the heads failed")
        return read(self, *arguments)

    monkeypatch.setattr(kind, "read", failing)
    requests = asked(random_prompts(13, (5, 9, 20)))
    answers, _ = run(settings(folder), requests)
    for request, answer in zip(requests, answers, strict=True):
        choices, _ = reference.read_target([*request.prompt, *answer.tokens])
        assert choices[len(request.prompt) - 1 : -1] == list(answer.tokens)


BROKEN = {
    "the state at the token's own position": (RaggedPlan, "before", lambda plan: plan.new_slots),
    "what was fed in the round before is taken for fed": (
        _mtp_heads,
        "_fed",
        lambda tail, first: FED(replace(tail, start=tail.start + 1, feed=tail.feed[1:]), first),
    ),
    "what earlier heads drafted is not fed": (
        _mtp_heads,
        "_fed",
        lambda tail, first: FED(replace(tail, drafted=tail.drafted[-1:]), first),
    ),
    "one tensor where there are two": (AdvancingHeads, "_pair", property(lambda _: False, lambda *_: None)),
}


@pytest.mark.parametrize("how", BROKEN)
def test_heads_that_read_wrongly_are_noticed(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers stay the target's, but some chain is not that of the plain implementation."""
    heads = tiny_mtp.heads(3)
    folder = tiny_mtp.target(tmp_path / "target", "deepseek", heads, vocab_size=VOCAB)
    reference = MtpReference(folder, heads, pair=True)
    owner, name, variant = BROKEN[how]
    monkeypatch.setattr(owner, name, variant, raising=False)
    requests = asked(random_prompts(15, (3, 12, 21)), tokens=10)
    answers, recorder = run(settings(folder), requests)
    with pytest.raises(AssertionError, match=r"\("):
        compare(reference, requests, answers, recorder)
