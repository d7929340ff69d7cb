"""Draft heads draft what a plain implementation of one sequence drafts, whatever the engine does around them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_heads
from draft_first import draft_first
from heads_reference import AheadReference, Reference
from worker_messages import opened

from specserve.config import parse
from specserve.local import LocalEngine, load_parts
from specserve.models._stretches import split
from specserve.transport.messages import Failed, Hidden, Plan, PlanAhead, Push, PushAhead
from specserve.types import Request, RequestId, Sampling

VOCAB, LAYERS, DEPTH, BLOCK = 12, 6, 4, 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that knows twelve words, so that drafts are often kept by chance."""
    return tiny_heads.few_words(tmp_path_factory.mktemp("target"), VOCAB, layers=LAYERS)


KINDS = {
    "eagle": lambda folder: tiny_heads.eagle(folder, vocab_size=VOCAB),
    "eagle with parts of its own": lambda folder: tiny_heads.eagle(folder, vocab_size=VOCAB, own=True, layers=2),
    "eagle3": lambda folder: tiny_heads.eagle3(folder, vocab_size=VOCAB, read=(1, 3, 4), spoken=9),
}


@pytest.fixture(scope="module", params=KINDS)
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head in a published layout."""
    return KINDS[request.param](tmp_path_factory.mktemp(request.param.replace(" ", "-")))


def settings(target: Path, head: Path, **engine):
    limits = {"depth": DEPTH, "block_tokens": BLOCK, "prefill_chunk": 8, "max_requests": 6, "max_batch_tokens": 64}
    model = {"device": "cpu", "kv_blocks": 512}
    return parse(
        {
            "target": {"source": str(target), **model},
            "draft": {"speculator": "eagle", "model": {"source": str(head), **model, "quantization": "none"}},
            "engine": limits | engine,
        }
    )


class Recorder:
    """The draft worker, and what it was told and answered."""

    def __init__(self, worker):
        self.worker, self.plans, self.pushes = worker, [], []

    def handle(self, message):
        replies = list(self.worker.handle(message))
        if isinstance(message, Plan):
            self.plans.append(message)
            self.pushes += [reply for reply in replies if isinstance(reply, Push)]
        return replies

    def chains(self):
        """(row, committed tokens, chain, where reading began) of every chain that was drafted."""
        for plan, push in zip(self.plans, self.pushes, strict=True):
            at = 0
            columns = zip(push.rows, push.bases, push.chain_lengths, plan.origins, strict=True)
            for row, base, length, origin in columns:
                if length:
                    yield int(row), int(base), push.tokens[at : at + length].tolist(), int(origin)
                at += int(length)


class AheadRecorder:
    """The draft worker ahead of verdicts: each plan, and what was pushed of its branches, by place; −1 is a guess."""

    def __init__(self, worker):
        self.worker, self.told = worker, []

    def handle(self, message):
        replies = self.worker.handle(message)
        return self._pushed(message, replies) if isinstance(message, PlanAhead) else replies

    def _pushed(self, plan, replies):
        branches = [{} for _ in plan.parents]
        self.told.append((plan, branches))
        for reply in replies:
            for branch, place, token in zip(reply.branches, reply.places, reply.tokens, strict=True):
                branches[branch][int(place)] = int(token)
            yield reply


def run(config, requests, recorder=Recorder):
    """The answers, and the recorded draft worker."""
    parts = load_parts(config)
    parts = replace(parts, draft_worker=recorder(parts.draft_worker))
    recorder = parts.draft_worker
    with LocalEngine(config, parts=draft_first(parts) if config.engine.outcomes else parts) as engine:
        answers = engine.complete(requests)
        levels = engine.levels()
    assert (levels.slots_held, levels.target_blocks_held, levels.draft_blocks_held) == (0, 0, 0)
    return answers, recorder


def asked(prompts, *, tokens=16, name="r", **more):
    return [
        Request(RequestId(f"{name}{number}"), tuple(prompt), tokens, Sampling(temperature=0.0), ignore_eos=True, **more)
        for number, prompt in enumerate(prompts)
    ]


def compare(reference, requests, answers, recorder, origins=None):
    """Answers are the target's own, and every chain that of the plain implementation. Returns how many those were."""
    compared = 0
    read = {}
    for row, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        tokens = [*request.prompt, *answer.tokens]
        choices, states = reference.read_target(tokens)
        assert choices[len(request.prompt) - 1 : -1] == list(answer.tokens)
        read[row] = tokens, states
    for row, base, chain, origin in recorder.chains():
        tokens, states = read[row]
        assert origin == 1 if origins is None else origin in origins
        assert chain == reference.drafts(tokens[:base], states, len(chain), origin), (row, base, origin)
        compared += 1
    return compared


def test_drafts_are_those_of_a_plain_implementation(target: Path, head: Path) -> None:
    """Twenty prompts of up to five chunks, six at a time: every chain of every round, and answers are the target's."""
    noise = random.Random(5)
    prompts = [[noise.randrange(VOCAB) for _ in range(noise.randint(1, 38))] for _ in range(20)]
    reference = Reference(target, head, third="eagle3" in head.name)
    requests = asked(prompts)
    answers, recorder = run(settings(target, head), requests)
    assert compare(reference, requests, answers, recorder) > 200
    assert sum(answer.stats.kept_tokens for answer in answers) > 10


def test_answers_to_one_prompt_share_what_was_read_of_it(target: Path, head: Path) -> None:
    """Three answers to each prompt, at lengths around a block's end: shared pages, and no token lost or doubled."""
    noise = random.Random(6)
    prompts = [[noise.randrange(VOCAB) for _ in range(length)] for length in (7, 8, 9, 12, 21)]
    reference = Reference(target, head, third="eagle3" in head.name)
    requests = [
        request
        for number, prompt in enumerate(prompts)
        for request in asked([prompt] * 3, tokens=8, family=f"f{number}", name=f"f{number}-")
    ]
    answers, recorder = run(settings(target, head, max_requests=15), requests)
    assert compare(reference, requests, answers, recorder) > 60
    fed = sum(int(plan.feed_lengths.sum()) for plan in recorder.plans)
    alone = sum(len(request.prompt) + len(answer.tokens) for request, answer in zip(requests, answers, strict=True))
    assert fed < alone - 2 * sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts) + len(requests) * 2


def test_preempted_requests_are_read_again_from_their_first_token(target: Path, head: Path) -> None:
    """With too few blocks requests lose their places; what the target reads again, the draft reads again."""
    noise = random.Random(7)
    prompts = [[noise.randrange(VOCAB) for _ in range(30)] for _ in range(4)]
    reference = Reference(target, head, third="eagle3" in head.name)
    requests = asked(prompts, tokens=24)
    config = settings(target, head, max_requests=4)
    config = config.model_copy(
        update={
            "target": config.target.model_copy(update={"kv_blocks": 36, "context_length": 128}),
            "engine": config.engine.model_copy(update={"prefix_cache": False}),  # what is cached is not read again
        }
    )
    answers, recorder = run(config, requests)
    assert any(plan.epochs.max() > 0 for plan in recorder.plans)
    assert compare(reference, requests, answers, recorder) > 50


def test_a_draft_that_lost_its_cache_goes_on_with_a_short_window(target: Path, head: Path) -> None:
    """Where the draft has room for one request only, the others' windows begin where they have to, and say so."""
    noise = random.Random(8)
    prompts = [[noise.randrange(VOCAB) for _ in range(30)] for _ in range(3)]
    reference = Reference(target, head, third="eagle3" in head.name)
    requests = asked(prompts, tokens=24)
    config = settings(target, head, max_requests=3)
    model = config.draft.model.model_copy(update={"kv_blocks": 32, "context_length": 128})
    config = config.model_copy(update={"draft": config.draft.model_copy(update={"model": model})})
    answers, recorder = run(config, requests)
    begun = {origin for _, _, _, origin in recorder.chains()}
    assert max(begun) > 20
    assert compare(reference, requests, answers, recorder, origins=begun) > 20


@pytest.mark.parametrize("tree", [[2, 2], [3], "dynamic"])
def test_the_likeliest_path_of_a_tree_is_the_plain_implementations_chain(target: Path, head: Path, tree) -> None:
    """First children of first children, each read with the state of its own parent; answers are the target's."""
    noise = random.Random(9)
    prompts = [[noise.randrange(VOCAB) for _ in range(noise.randint(1, 30))] for _ in range(8)]
    reference = Reference(target, head, third="eagle3" in head.name)
    requests = asked(prompts)
    answers, recorder = run(settings(target, head, tree=tree, tree_nodes=8, tree_width=3), requests)
    recorder.pushes = [along_first_children(push) for push in recorder.pushes]
    assert compare(reference, requests, answers, recorder) > 60
    assert sum(answer.stats.kept_tokens for answer in answers) > 10


def along_first_children(push: Push) -> Push:
    """The push of chains that takes the first child at each node of the trees."""
    chains, at = [], 0
    for length in push.chain_lengths.tolist():
        parents, tokens = push.parents[at : at + length].tolist(), push.tokens[at : at + length].tolist()
        chain, node = [], -1
        while node in parents:
            node = parents.index(node)
            chain.append(tokens[node])
        chains.append(chain)
        at += length
    lengths = np.array([len(chain) for chain in chains], dtype=np.int32)
    return replace(push, chain_lengths=lengths, tokens=np.array([t for c in chains for t in c], dtype=np.int32))


def test_what_is_drafted_ahead_is_what_a_plain_implementation_drafts(target: Path, head: Path) -> None:
    """Every guess and every token of every branch, over hits and misses; prompts of several chunks, and shared ones."""
    noise = random.Random(10)
    prompts = [[noise.randrange(VOCAB) for _ in range(length)] for length in (1, 5, 21, 30)]
    requests = [
        request
        for number, prompt in enumerate(prompts)
        for request in asked([prompt] * 2, tokens=14, family=f"f{number}", name=f"f{number}-")
    ]
    limits = {"max_requests": 8, "outcomes": 8, "fan_out": 8}  # of twelve words, one is guessed often
    answers, recorder = run(settings(target, head, **limits), requests, AheadRecorder)
    plain = Reference(target, head, third="eagle3" in head.name)
    texts = [[*request.prompt, *answer.tokens] for request, answer in zip(requests, answers, strict=True)]
    read = {row: (tokens, plain.read_target(tokens)) for row, tokens in enumerate(texts)}
    for request, (_, (choices, _)), answer in zip(requests, read.values(), answers, strict=True):
        assert choices[len(request.prompt) - 1 : -1] == list(answer.tokens)
    reference = AheadReference(plain, {row: (tokens, states) for row, (tokens, (_, states)) in read.items()})
    compared = [follow(reference, plan, branches) for plan, branches in recorder.told]
    assert sum(drafted for drafted, _ in compared) > 500
    assert sum(adopted for _, adopted in compared) > 5


def follow(reference: AheadReference, plan: PlanAhead, pushed) -> tuple[int, int]:
    """Compare what was pushed of a plan's branches; how many tokens that were, and chains that had been adopted."""
    assert (plan.origins == 1).all()
    columns = (plan.rows, plan.starts, plan.bases, plan.next_slots, plan.next_plans, plan.branch_counts)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    owned = [slots.tolist() for slots in split("chain slots", plan.chain_slots, plan.chain_lengths)]
    texts = [text.tolist() for text in split("texts", plan.texts, plan.text_lengths)]
    branches = zip(
        pushed, plan.parents.tolist(), plan.ranks.tolist(), split("slots", plan.slots, plan.depths), strict=True
    )
    compared = 0
    for (row, start, base, slot, number, count), own, text in zip(rows, owned, texts, strict=True):
        chain = text[len(text) - len(own) :]
        read, states = reference.follow(row, start, base, chain, own, (slot, number))
        for got, kept, rank, slots in itertools.islice(branches, count):
            ranking = reference.head.ranking(states[kept])
            assert got[-1] == [token for token in ranking if token not in chain[kept : kept + 1]][rank]
            drafted = reference.grow(plan.plan, read[: base + kept - 1], got[-1], states[kept], slots.tolist())
            assert drafted == [got[place] for place in range(len(slots))]
            compared += len(slots)
    return compared, sum(map(bool, owned))


def test_a_plan_ahead_without_the_states_it_needs_fails_alone(target: Path, head: Path) -> None:
    """Told to feed committed tokens without states, or before they begin, the worker says so and goes on."""
    requests = asked([[1, 2, 3, 4, 5]], tokens=4)
    _, recorder = run(settings(target, head, outcomes=1), requests, AheadRecorder)
    (plan, _), worker = recorder.told[0], recorder.worker
    worker.handle(opened(int(plan.rows[0]), temperature=0.0, tokens=[1, 2, 3, 4, 5], prompt_length=5))
    broken = {
        "0 hidden states for": replace(plan, hidden=Hidden.none()),
        "before the target's states do": replace(plan, origins=plan.origins * 0),
    }
    for reason, told in broken.items():
        (failed,) = worker.handle(told)
        assert isinstance(failed, Failed)
        assert reason in failed.reason
    assert all(isinstance(reply, PushAhead) for reply in worker.handle(plan))
