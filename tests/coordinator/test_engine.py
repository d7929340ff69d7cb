"""The engine against toy workers that notice every wrong token, position or block."""

from __future__ import annotations

import time

import pytest
from harness import END, Pipeline, info
from toy_workers import ToyVerifier, reference

from specserve.config import parse
from specserve.coordinator.endings import cut
from specserve.coordinator.limits import check_limits
from specserve.coordinator.loop import Loop
from specserve.coordinator.requests import MOST_LOSSES, RequestState, StopScan
from specserve.errors import ConfigError, ContextLengthExceeded, InvalidField, Overloaded, Unavailable
from specserve.text import Detokenizer, StopText
from specserve.transport import Arrived, Mailbox
from specserve.transport.messages import Verify
from specserve.types import Request, RequestId, RowId, Sampling

PROMPTS = {f"r{i}": [(7 * i + j) % 90 for j in range(3 + 5 * i)] for i in range(8)}


@pytest.mark.parametrize("depth", [0, 1, 4, 8])
def test_speculation_never_changes_the_text(depth):
    """Eight requests at once, prompts longer than the prefill chunk: the target's own text at every depth."""
    pipeline = Pipeline(depth=depth, end=1000)
    for name, prompt in PROMPTS.items():
        pipeline.submit(name, prompt, max_tokens=12)
    pipeline.settle()

    assert {name: pipeline.tokens(name) for name in PROMPTS} == {n: reference(p, 12) for n, p in PROMPTS.items()}
    assert all(pipeline.last(name).finish == "length" for name in PROMPTS)
    assert pipeline.idle()


def test_a_perfect_draft_yields_depth_plus_one_tokens_a_round():
    """I1: a decode row yields kept + 1 tokens, and the statistics say so."""
    pipeline = Pipeline(depth=4, miss=10**9, end=1000)
    pipeline.submit("a", [1, 2, 3], max_tokens=11)
    pipeline.settle()

    stats = pipeline.last("a").stats
    assert [len(delta.tokens) for delta in pipeline.deltas["a"]] == [1, 5, 5]
    assert (stats.generated_tokens, stats.rounds, stats.kept_tokens, stats.histogram) == (11, 3, 8, (1, 0, 0, 0, 2))


def kv_after(kept, depth=4, committed=10):
    """KV lengths of both models after one verification of a chain of 4 of which `kept` are right."""
    pipeline = Pipeline(depth=depth, miss=10**9, end=1000)
    draft = pipeline.draft.worker
    right = draft._guess
    base = committed + 1
    draft._guess = lambda prefix: right(prefix) if len(prefix) - base < kept else (right(prefix) + 1) % 90
    pipeline.submit("a", list(range(committed)), max_tokens=40)
    state = pipeline.engine._states["a"]
    while len(state.tokens) < committed + 1 + kept + 1:
        pipeline.step()
    return state, pipeline


@pytest.mark.parametrize(("kept", "target", "draft"), [(0, 11, 11), (2, 13, 13), (3, 14, 14), (4, 15, 14)])
def test_kv_lengths_after_a_verification(kept, target, draft):
    """T8 read with I2: N = 10 cached, L = 4; the target covers committed − 1, the draft one less after keeping all."""
    state, _ = kv_after(kept)

    assert (len(state.tokens) - 1, state.target_cached, state.draft_cached) == (target, target, draft)


def test_after_full_acceptance_the_draft_is_fed_two_tokens():
    """T8: the last drafted token was never fed; the next plan feeds it together with the bonus token."""
    state, pipeline = kv_after(4)
    pipeline.engine.advance()
    plan = next(message for message in pipeline.draft.held if hasattr(message, "plan"))

    assert plan.feeds.tolist() == state.tokens[-2:]
    assert plan.starts.tolist() == [len(state.tokens) - 2]


def ending(emitted, *, max_tokens=100, context=1000, stop=(), stop_ids=(), ignore_eos=False, tokenizer=None):
    scan = StopScan(Detokenizer(tokenizer), StopText(stop)) if stop else None
    request = Request(
        RequestId("a"), (1,), max_tokens, stop=stop, stop_token_ids=tuple(stop_ids), ignore_eos=ignore_eos
    )
    state = RequestState(RowId(0), request, "me", 0.0, [1], scan)
    result = cut(state, emitted, frozenset({END}), context)
    return (result.length, result.finish, result.stop_reason)


def test_endings_cut_at_the_first_reason():
    """T16: an end inside an accepted run cuts there; a stop before the limit wins, and so does one at the limit."""
    run = [10, 11, 12, 13, 14]

    assert ending(run) == (5, None, None)
    assert ending(run, max_tokens=5) == (5, "length", None)
    assert ending(run, max_tokens=3) == (3, "length", None)
    assert ending(run, context=4) == (3, "length", None)
    assert ending([10, 11, END, 13, 14]) == (2, "stop", END)
    assert ending([10, 11, END, 13, 14], max_tokens=3) == (2, "stop", END)
    assert ending([10, 11, 12, END], max_tokens=3) == (3, "length", None)
    assert ending([10, 11, END, 13, 14], ignore_eos=True) == (5, None, None)
    assert ending(run, stop_ids=[12], max_tokens=4) == (2, "stop", 12)
    assert ending(run, stop_ids=[12], ignore_eos=True) == (2, "stop", 12)
    assert ending([END]) == (0, "stop", END)


def test_a_stop_text_ends_with_the_token_that_completes_it():
    """Stop text across token seams: the completing token is the last one kept; the match is named."""
    tokenizer = Pipeline(draft=False).tokenizer
    tokens = tokenizer.encode("one two STOP three", special=False)
    length, finish, reason = ending(tokens, stop=("nothing", "o ST"), tokenizer=tokenizer)

    assert (finish, reason) == ("stop", "o ST")
    assert "o ST" in tokenizer.decode(tokens[:length])
    assert "o ST" not in tokenizer.decode(tokens[: length - 1])


def test_max_tokens_five_gives_exactly_five_tokens():
    """T16: with four of four kept twice in a row, five tokens and not one more come out."""
    pipeline = Pipeline(depth=4, miss=10**9, end=1000)
    pipeline.submit("a", [1, 2, 3], max_tokens=5)
    pipeline.settle()

    assert pipeline.tokens("a") == reference([1, 2, 3], 5)
    assert pipeline.last("a").stats.generated_tokens == 5


def test_the_end_token_inside_a_kept_run_is_the_last_thing_seen():
    """An end token that the draft proposed and the target confirmed ends the request before itself."""
    answer = reference([5, 6], 20)
    end = answer[7]
    pipeline = Pipeline(depth=8, miss=10**9, end=end)
    pipeline.submit("a", [5, 6], max_tokens=20)
    pipeline.settle()

    wanted = answer[: answer.index(end)]
    assert pipeline.tokens("a") == wanted
    assert (pipeline.last("a").finish, pipeline.last("a").stop_reason) == ("stop", end)
    assert pipeline.last("a").stats.generated_tokens == len(wanted)
    assert pipeline.idle()


def test_a_storm_of_cancels_between_draft_and_verify_leaves_nothing():
    """T17: ten times the slot capacity of cancels while drafts are in flight; all pools are empty afterwards."""
    pipeline = Pipeline(depth=4, slots=8)
    for number in range(80):
        pipeline.submit(f"r{number}", [number % 90, 1, 2], max_tokens=20)
        for _ in range(3):
            pipeline.step()
        pipeline.engine.advance()
        pipeline.engine.cancel(f"r{number}")
        if number % 2:
            pipeline.settle()
            assert pipeline.gauges() == 0
    pipeline.settle()

    assert pipeline.idle()
    assert pipeline.gauges() == 0
    assert all(deltas[-1].finish == "abort" for deltas in pipeline.deltas.values())


def test_blocks_of_a_cancelled_request_stay_held_while_the_verifier_writes_them():
    """A client that leaves mid-verification frees nothing that is still being computed."""
    pipeline = Pipeline(depth=0)
    pipeline.submit("a", [1, 2, 3], max_tokens=9)
    pipeline.engine.advance()
    held = pipeline.engine.levels().target_blocks_held
    pipeline.engine.cancel("a")

    assert held > 0
    assert pipeline.engine.levels().target_blocks_held == held
    pipeline.settle()
    assert pipeline.idle()


def test_impossible_limits_are_refused_with_numbers():
    """T18: limits that can never admit a request are a start-up error that names them, never a silent queue."""
    with pytest.raises(ConfigError, match=r"depth 4 needs 5 positions.*max_batch_tokens is 4"):
        parse({"engine": {"depth": 4, "max_batch_tokens": 4, "max_requests": 2}})
    with pytest.raises(ConfigError, match=r"max_batch_tokens 8 can never hold max_requests 8"):
        parse({"engine": {"depth": 4, "max_batch_tokens": 8, "max_requests": 8}})
    with pytest.raises(ConfigError, match=r"depth 4 needs 4 slots.*slots is 3"):
        parse({"engine": {"depth": 4, "slots": 3}})
    engine = parse({"engine": {"block_tokens": 4}}).engine
    with pytest.raises(ConfigError, match=r"10 blocks × 4 = 40 positions.*context \(64\)"):
        check_limits(engine, info("target", blocks=10), None)
    with pytest.raises(
        ConfigError, match=r"share of the draft's KV that each of 2 pipelines.*10 blocks × 4.*2 × 16 bl"
    ):
        check_limits(engine, info("target"), info("draft", blocks=10), pipelines_per_draft=2)


def test_the_youngest_is_preempted_and_refilled_without_a_changed_token():
    """Short of target blocks, the youngest loses its cache, waits, is fed from its committed tokens, and goes on."""
    pipeline = Pipeline(depth=4, blocks=16, draft_blocks=64, end=1000)
    prompts = {name: PROMPTS[name][:7] for name in list(PROMPTS)[:6]}
    for name, prompt in prompts.items():
        pipeline.submit(name, prompt, max_tokens=25)
    pipeline.settle()

    assert {name: pipeline.tokens(name) for name in prompts} == {n: reference(p, 25) for n, p in prompts.items()}
    assert "specserve_preemptions_total" in pipeline.metrics.render()
    assert pipeline.engine._next_row == 6
    assert preemptions(pipeline) > 0
    assert pipeline.idle()


def preemptions(pipeline):
    lines = [line for line in pipeline.metrics.render().splitlines() if line.startswith("specserve_preemptions_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_short_of_draft_blocks_requests_run_at_depth_zero():
    """The draft's KV holds two requests; the others decode plainly, in their place, with the right text."""
    pipeline = Pipeline(depth=4, draft_blocks=17, end=1000)
    for name, prompt in PROMPTS.items():
        pipeline.submit(name, prompt[:9], max_tokens=20)
    pipeline.settle()

    assert all(pipeline.tokens(name) == reference(prompt[:9], 20) for name, prompt in PROMPTS.items())
    assert preemptions(pipeline) == 0
    assert pipeline.idle()


def test_decode_goes_on_beside_a_long_prompt():
    """No starvation: while a 60-token prompt is fed in chunks, a running stream gets a token in every round."""
    pipeline = Pipeline(depth=0, end=1000, prefill_chunk=4)
    pipeline.submit("short", [1], max_tokens=30)
    pipeline.step()
    pipeline.submit("long", [i % 90 for i in range(60)], max_tokens=2)
    while not pipeline.deltas.get("long"):
        before = len(pipeline.tokens("short"))
        pipeline.engine.advance()
        pipeline.verifier.deliver(pipeline.engine) if pipeline.verifier.held else None
        pipeline.engine.flush()
        assert len(pipeline.tokens("short")) <= before + 1
    assert len(pipeline.tokens("short")) >= 12
    pipeline.settle()


def test_a_prompt_gets_its_share_beside_a_full_decode_batch():
    """No starvation the other way: seven deep decode rows leave room for a waiting prompt."""
    pipeline = Pipeline(depth=8, end=1000, max_batch_tokens=24, max_requests=8)
    for number in range(7):
        pipeline.submit(f"d{number}", [number], max_tokens=50)
    for _ in range(6):
        pipeline.step()
    pipeline.submit("late", PROMPTS["r7"], max_tokens=2)
    finished_first = None
    while finished_first is None:
        assert pipeline.step()
        ended = [name for name, deltas in pipeline.deltas.items() if deltas[-1].finish]
        finished_first = ended[0] if ended else None
    assert finished_first == "late"
    pipeline.settle()


def test_a_full_queue_says_so():
    """With one place and a queue of two, the fourth request is refused and nothing of it is kept."""
    pipeline = Pipeline(depth=0, max_requests=1, queue_limit=2)
    for number in range(3):
        pipeline.submit(f"r{number}", [1, 2])
    with pytest.raises(Overloaded):
        pipeline.submit("r3", [1, 2])

    pipeline.settle()
    assert sorted(pipeline.deltas) == ["r0", "r1", "r2"]
    assert pipeline.idle()


BAD_SAMPLING = [
    Sampling(temperature=-1),
    Sampling(temperature=float("nan")),
    Sampling(min_p=1.5),
    Sampling(repetition_penalty=0),
    Sampling(repetition_penalty=1e-320),
    Sampling(repetition_penalty=float("inf")),
    Sampling(presence_penalty=2.1),
    Sampling(frequency_penalty=float("nan")),
    Sampling(logit_bias=((97, 1.0),)),
    Sampling(logit_bias=((5, float("inf")),)),
    Sampling(min_tokens=9),
    Sampling(bad_words=((5, -1),)),
    Sampling(bad_words=((),)),
    Sampling(allowed_token_ids=()),
    Sampling(allowed_token_ids=(97,)),
]


@pytest.mark.parametrize(
    ("prompt", "fields", "error"),
    [
        ([], {}, InvalidField),
        ([1] * 64, {}, ContextLengthExceeded),
        ([1, 97], {}, InvalidField),
        ([-1], {}, InvalidField),
        ([1], {"max_tokens": -1}, InvalidField),
        ([1], {"logprobs": 21}, InvalidField),
        ([1], {"prompt_logprobs": -1}, InvalidField),
        *[([1], {"sampling": sampling}, InvalidField) for sampling in BAD_SAMPLING],
        ([1], {"depth": 5}, InvalidField),
        ([1], {"depth": -1}, InvalidField),
    ],
)
def test_a_request_that_can_never_be_served_is_refused(prompt, fields, error):
    """Bad requests are refused at the door and leave the engine untouched."""
    pipeline = Pipeline(depth=4)
    with pytest.raises(error):
        pipeline.submit("a", prompt, **fields)

    assert not pipeline.step()
    assert pipeline.idle()


def test_a_doubled_id_is_refused_while_the_first_one_runs():
    """Request ids are unique among the living."""
    pipeline = Pipeline(depth=0)
    pipeline.submit("a", [1])
    with pytest.raises(InvalidField, match="already running"):
        pipeline.submit("a", [1])


def test_draining_takes_nothing_new_and_finishes_what_runs():
    """After `drain`, running requests end as usual and new ones get a 503."""
    pipeline = Pipeline(depth=4, end=1000)
    pipeline.submit("a", [1, 2], max_tokens=9)
    pipeline.engine.drain()
    with pytest.raises(Unavailable):
        pipeline.submit("b", [1])

    pipeline.settle()
    assert pipeline.tokens("a") == reference([1, 2], 9)


def test_a_lost_draft_worker_costs_nothing_but_speed():
    """Draft lost mid-plan: the very next round decodes plainly; after a restart drafts are kept again."""
    pipeline = Pipeline(depth=4, miss=10**9, end=1000)
    pipeline.submit("a", [1, 2, 3], max_tokens=50)
    for _ in range(7):
        pipeline.step()
    pipeline.engine.advance()
    pipeline.lose("draft")
    pipeline.step()
    assert pipeline.engine.levels().slots_held == 0
    assert pipeline.engine.health().status == "degraded"
    while len(pipeline.tokens("a")) < 25:
        assert pipeline.step()
    before = pipeline.engine._states["a"].kept
    pipeline.restart("draft")
    pipeline.settle()

    assert pipeline.tokens("a") == reference([1, 2, 3], 50)
    assert pipeline.last("a").stats.kept_tokens > before
    assert pipeline.idle()


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 9])
def test_a_lost_verifier_is_refilled_without_a_lost_or_repeated_token(steps):
    """Verifier lost at any moment: requests wait, then go on exactly where they were."""
    pipeline = Pipeline(depth=4, end=1000)
    for name, prompt in list(PROMPTS.items())[:4]:
        pipeline.submit(name, prompt, max_tokens=20)
    for _ in range(steps):
        pipeline.step()
    pipeline.engine.advance()
    pipeline.lose("target")
    pipeline.engine.check()
    for _ in range(4):
        pipeline.step()
    pipeline.restart("target")
    pipeline.settle()

    for name, prompt in list(PROMPTS.items())[:4]:
        assert pipeline.tokens(name) == reference(prompt, 20)
    assert pipeline.idle()


class Fragile(ToyVerifier):
    """Dies of every batch with the token 88."""

    def handle(self, message):
        if isinstance(message, Verify) and 88 in message.feeds:
            raise SystemExit
        return super().handle(message)


def test_a_request_that_ends_its_verifier_is_given_up_and_nobody_else():
    """It dies with the others in its batch twice, then alone: they get their text, and the verifier has peace."""
    pipeline = Pipeline(depth=4, end=1000, make_verifier=Fragile)
    for name, prompt in list(PROMPTS.items())[:3]:
        pipeline.submit(name, prompt, max_tokens=20)
    pipeline.submit("poison", [88, 1, 2], max_tokens=20)
    deaths = 0
    for _ in range(5000):
        try:
            if not pipeline.step():
                break
        except SystemExit:
            deaths += 1
            pipeline.lose("target")
            pipeline.restart("target", process=f"verifier {deaths}")
    assert deaths == MOST_LOSSES
    assert pipeline.last("poison").failure.status == 500
    assert "died 3 times" in pipeline.last("poison").failure.message
    for name, prompt in list(PROMPTS.items())[:3]:
        assert pipeline.tokens(name) == reference(prompt, 20)
    assert pipeline.idle()


@pytest.mark.parametrize("process", ["the same", ""])
def test_only_a_verifier_that_died_is_held_against_a_request(process):
    """One that was cut off comes back as the process that it was: however often, the answer goes on."""
    pipeline = Pipeline(depth=4, end=1000)
    pipeline.submit("a", [1, 2, 3], max_tokens=20)
    pipeline.restart("target", process=process)
    for _ in range(3 * MOST_LOSSES):
        while pipeline.engine._round is None and pipeline.step():
            pass
        pipeline.lose("target")
        pipeline.restart("target", process=process)
    pipeline.settle()
    if process:
        assert pipeline.tokens("a") == reference([1, 2, 3], 20)
    else:
        assert pipeline.last("a").finish == "error"
    assert pipeline.idle()


def test_a_verifier_that_never_returns_fails_its_requests_within_the_bound():
    """Nothing hangs: after recovery_wait_s every waiting request ends with a 503."""
    pipeline = Pipeline(depth=4, recovery_wait_s=5)
    pipeline.submit("a", [1, 2, 3], max_tokens=20)
    pipeline.step()
    pipeline.lose("target")
    assert pipeline.engine.deadline_s == 5
    pipeline.clock.now = 6
    pipeline.settle()

    assert (pipeline.last("a").finish, pipeline.last("a").failure.status) == ("error", 503)
    assert pipeline.idle()


def test_a_late_draft_never_delays_a_round_past_its_bound():
    """After draft_wait_s the round goes on plainly; the late push is dropped and its slots come back."""
    pipeline = Pipeline(depth=4, draft_wait_s=1, end=1000)
    pipeline.submit("a", [1, 2, 3], max_tokens=12)
    state = pipeline.engine._states["a"]
    while len(state.tokens) == 3:
        pipeline.step()
    pipeline.engine.advance()
    assert not pipeline.verifier.held
    pipeline.clock.now += 2
    pipeline.engine.advance()
    pipeline.verifier.deliver(pipeline.engine)
    pipeline.engine.flush()
    assert len(state.tokens) == 5
    pipeline.settle()

    assert pipeline.tokens("a") == reference([1, 2, 3], 12)
    assert pipeline.idle()


def test_an_owner_that_dies_takes_its_requests_along():
    """An ingress that is gone frees everything it brought; others do not notice."""
    pipeline = Pipeline(depth=4, end=1000)
    pipeline.submit("mine", [1, 2], max_tokens=30, owner="a")
    pipeline.submit("theirs", [3, 4], max_tokens=30, owner="b")
    for _ in range(6):
        pipeline.step()
    pipeline.engine.cancel_owner("a")
    pipeline.settle()

    assert pipeline.tokens("theirs") == reference([3, 4], 30)
    assert pipeline.idle()


def test_each_owner_gets_one_batch_of_deltas_a_round():
    """Eight streams of one ingress cost one message per round, not one per token."""
    pipeline = Pipeline(depth=0, end=1000)
    for number in range(8):
        pipeline.submit(f"r{number}", [number], max_tokens=10)
    pipeline.settle()

    assert pipeline.owners == {"me": 10}


@pytest.mark.parametrize(("round_s", "messages"), [(0.0, 2), (0.1, 4), (1.0, 10)])
def test_an_answer_that_nobody_reads_before_its_end_is_told_now_and_then(round_s, messages):
    """The first round and the end at once, what lies between together: each once, in order, within a bound in time."""
    pipeline = Pipeline(depth=0, end=1000, round_s=round_s)
    pipeline.submit("a", [1, 2], max_tokens=10, patient=True)
    pipeline.settle()

    assert pipeline.tokens("a") == reference([1, 2], 10)
    assert [len(delta.tokens) for delta in pipeline.deltas["a"]] == [1] * 10
    assert pipeline.owners == {"me": messages}


def test_the_first_tokens_of_an_answer_are_told_at_once():
    """Also where others were just told: they show that this coordinator got on with it, whatever ends it then."""
    pipeline = Pipeline(depth=0, end=1000)
    for name in ("a", "b", "c"):
        pipeline.submit(name, [1, 2], max_tokens=9, patient=True)
        while not pipeline.engine._states[name].generated:
            pipeline.step()
        pipeline.engine.flush()
        assert pipeline.tokens(name)


def test_who_reads_while_it_is_written_is_told_each_round_beside_those_who_wait():
    """What others of the same owner need not know yet goes along; other owners' answers wait on."""
    pipeline = Pipeline(depth=0, end=1000)
    pipeline.submit("read", [1, 2], max_tokens=4, owner="a")
    pipeline.submit("beside", [3, 4], max_tokens=9, owner="a", patient=True)
    pipeline.submit("apart", [5, 6], max_tokens=9, owner="b", patient=True)
    pipeline.settle()

    assert [pipeline.tokens(name) for name in ("beside", "apart")] == [reference([3, 4], 9), reference([5, 6], 9)]
    assert pipeline.owners == {"a": 5, "b": 2}


def test_messages_of_an_old_life_change_nothing():
    """I5: what a dead worker said arrives late and is dropped."""
    pipeline = Pipeline(depth=4, end=1000)
    pipeline.submit("a", [1, 2, 3], max_tokens=9)
    while not pipeline.tokens("a"):
        pipeline.step()
    pipeline.engine.advance()
    old_draft = pipeline.draft
    pipeline.restart("draft")
    while old_draft.held:
        old_draft.deliver(pipeline.engine)
    pipeline.settle()

    assert pipeline.tokens("a") == reference([1, 2, 3], 9)
    assert pipeline.idle()


def test_a_bug_in_the_coordinator_ends_every_request_instead_of_hanging():
    """Nothing hangs: an unexpected exception reaches every client as a 500 and turns health to dead."""
    pipeline = Pipeline(depth=0, end=1000)
    mailbox = Mailbox()
    loop = Loop(pipeline.engine, mailbox)
    pipeline.submit("a", [1, 2, 3], max_tokens=9)
    pipeline.engine._commit = None  # whatever comes next breaks
    loop.start()
    loop.call(lambda: None)
    while len(pipeline.verifier.held) < 2:
        time.sleep(0.001)
    for reply in [r for m in list(pipeline.verifier.held) for r in pipeline.verifier.worker.handle(m)]:
        mailbox.put(Arrived("target", 0, reply))
    health = loop.call(pipeline.engine.health).result(timeout=5)
    loop.stop()

    assert health.status == "dead"
    assert pipeline.last("a").failure.status == 500
    with pytest.raises(Unavailable):
        pipeline.submit("b", [1])


def test_a_cancelled_call_is_skipped_and_the_loop_goes_on():
    """A caller that gives up before its call ran leaves no trace."""
    pipeline = Pipeline(depth=0)
    loop = Loop(pipeline.engine, Mailbox())
    ran = []
    first = loop.call(lambda: ran.append(1))
    assert first.cancel()
    second = loop.call(lambda: ran.append(2))
    loop.start()
    second.result(timeout=5)
    loop.stop()

    assert ran == [2]


def test_prompt_positions_are_counted_once_and_decode_rows_never():
    """Of prompts of 3, 20 and 9 tokens all but the last count, which the first token's base; none does later."""
    pipeline = Pipeline(depth=2, end=1000)
    for name, length in [("a", 3), ("b", 20), ("c", 9)]:
        pipeline.submit(name, range(length), max_tokens=9)
    pipeline.settle()

    counted = next(
        line for line in pipeline.metrics.render().splitlines() if line.startswith("specserve_prefill_tokens_total")
    )
    assert float(counted.rsplit(" ", 1)[1]) == 2 + 19 + 8
