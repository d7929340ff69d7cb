"""Every rule through the whole engine, on table models whose logits are the same bits in any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from table_backend import TableBackend
from tiny_tokenizer import byte_level

from specserve.config import Config, parse
from specserve.drafting import _chains, _kernels, ngram, small_model
from specserve.drafting.worker import DraftWorker
from specserve.drafting.workspace import SparseDists, Workspace
from specserve.errors import SpecserveError
from specserve.local import LocalEngine, Parts
from specserve.sampling import noise as noises
from specserve.sampling.dists import process
from specserve.text import Tokenizer
from specserve.transport import PeerLost
from specserve.transport.local import LocalChannel
from specserve.transport.messages import Failed, Verify
from specserve.types import Request, RequestId, Sampling, WorkerInfo
from specserve.verification import all_rules
from specserve.verification.verifier import Verifier

VOCAB, BLOCK_TOKENS = 16, 4
LOSSLESS = sorted(name for name, rule in all_rules().items() if rule.LOSSLESS)
SAMPLE = 8_000
"""Tokens of a check of a law by default: enough to see what is known to go wrong."""


class MarkovBackend(TableBackend):
    """A first-order chain over 16 tokens: a table that looks at the last token only, without its book-keeping."""

    def __init__(self, seed: int) -> None:
        rows = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 1.2
        if seed != 1:  # a draft resembles its target
            rows += torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 0.5
        super().__init__(rows.expand(VOCAB, VOCAB, VOCAB), context_length=512)

    def forward(self, batch):
        """The table's rows for the wanted tokens; they need no history."""
        return self.logits[0, torch.from_numpy(batch.tokens[batch.wanted].astype(np.int64))].clone()


def backend(kind, seed: int, blocks: int) -> TableBackend:
    if kind is TableBackend:
        generator = torch.Generator().manual_seed(seed)
        made = TableBackend(torch.randn(VOCAB, VOCAB, VOCAB, generator=generator) * 1.5, context_length=64)
    else:
        made = kind(seed)
    made.allocate(blocks, BLOCK_TOKENS)
    return made


def config_of(depth: int, *, lookup: str = "none", **engine) -> Config:
    limits = {"max_requests": 64, "max_batch_tokens": 1024, "queue_limit": 4096, "block_tokens": BLOCK_TOKENS}
    return parse({"engine": limits | {"depth": depth} | engine, "draft": {"lookup": lookup}})


def worker_info(role: str, made: TableBackend, blocks: int, rules) -> WorkerInfo:
    return WorkerInfo(role, "cpu", blocks, BLOCK_TOKENS, made.context_length, VOCAB, 0, 0.0, rules)


def engine_of(
    kind=TableBackend, *, draft_seed: int | None = 2, depth: int = 3, blocks: int = 4096, k: int = 16, **engine
):
    """An engine on two table models; draft_seed None takes the model-free speculator."""
    config = config_of(depth, **engine)
    target = backend(kind, 1, blocks)
    verifier = Verifier(target, vocab_size=VOCAB, engine=config.engine)
    draft, worker, guesser = None, None, None
    if draft_seed is None:
        guesser = ngram.build(config.draft)
    else:
        model, slots = backend(kind, draft_seed, 4096), config.engine.slot_count
        workspace = Workspace(slots, SparseDists(slots, k, model.device), model.device, ranks=config.engine.ranks)
        speculator = small_model.SmallModel(model, VOCAB)
        shape = config.engine.tree_shape
        worker = DraftWorker(speculator, workspace, vocab_size=VOCAB, block_tokens=BLOCK_TOKENS, shape=shape)
        draft = worker_info("draft", model, 4096, {})
    info = worker_info("target", target, blocks, verifier.rules)
    return LocalEngine(config, parts=Parts(verifier, info, worker, draft, guesser, Tokenizer(byte_level())))


def request(number: int, rule: str | None, *, length: int, depth: int | None = None, **sampling) -> Request:
    prompt = tuple((number * 7 + j * 3) % VOCAB for j in range(3 + number % 4))
    return Request(
        RequestId(f"r{number}"),
        prompt,
        length,
        Sampling(**({"temperature": 1.0} | sampling)),
        seed=1000 + number,
        ignore_eos=True,
        depth=depth,
        rule=rule,
    )


# ---- distribution ------------------------------------------------------------------------------------------------


LONG = 60


def transitions(rule: str, tokens: int, kind=MarkovBackend, *, top_p: float = 1.0, **options) -> np.ndarray:
    """Counts [from, to] over the tokens of many answers."""
    counts = np.zeros((VOCAB, VOCAB))
    with engine_of(kind, depth=4, **options) as engine:
        while counts.sum() < tokens:
            first = int(counts.sum())
            lacking = min(256, -(-(tokens - first) // LONG))
            batch = [request(first + i, rule, length=LONG, top_p=top_p) for i in range(lacking)]
            for asked, answer in zip(batch, engine.complete(batch), strict=True):
                walk = np.array([asked.prompt[-1], *answer.tokens])
                np.add.at(counts, (walk[:-1], walk[1:]), 1)
        assert engine._loop.call(lambda: (engine._engine.check(), True)[1]).result()
        if "outcomes" in options:
            hits, misses = engine._engine._drafts.hits, engine._engine._drafts.misses
            assert hits > 0.05 * (hits + misses), f"{hits} of {hits + misses} came true: nothing was tested"
    return counts


def p_value(counts: np.ndarray, top_p: float = 1.0) -> float:
    """Of all transitions together: given the token before, each row is a multinomial sample. 0 for what cannot be."""
    ones = torch.ones(VOCAB)
    rows = process(MarkovBackend(1).logits[0].clone(), ones, ones * top_p, ones.int() * 0, VOCAB).double().numpy()
    if counts[rows == 0].any():
        return 0.0
    expected = rows * counts.sum(1, keepdims=True)
    statistic = ((counts - expected) ** 2 / np.maximum(expected, 1e-9))[expected > 5].sum()
    return float(stats.chi2.sf(statistic, (expected > 5).sum() - VOCAB))


@pytest.mark.parametrize(
    ("rule", "tokens"),
    [
        *((rule, SAMPLE) for rule in LOSSLESS),
        *(pytest.param(rule, 200_000, marks=pytest.mark.full) for rule in LOSSLESS),
    ],
)
def test_drawn_tokens_have_the_targets_law(rule: str, tokens: int) -> None:
    """A first-order Markov target on 16 tokens, a draft that is another one, 64 requests at once, depth 4."""
    assert p_value(transitions(rule, tokens)) > 1e-3


@pytest.mark.parametrize("lookup", ["ngram", "suffix"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_lookup_beside_a_draft_model_keeps_the_law(rule: str, lookup: str) -> None:
    """Which of both drafts is decided by lengths of matches and by means: with a biased choice this fails."""
    assert p_value(transitions(rule, SAMPLE, lookup=lookup)) > 1e-3


def test_a_lossy_rule_is_noticed() -> None:
    """The same check on `typical`: what it puts out is not the target's law."""
    assert p_value(transitions("typical", SAMPLE)) < 1e-9


def test_shared_noise_is_noticed_under_a_ratio_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were proposals drawn with the noise that chooses, the check would see it."""

    def choosing(seeds, _purpose, positions, branches, _places):
        return noises.uniform(seeds, noises.Purpose.CHOOSE, positions, branches)

    monkeypatch.setattr(_kernels, "pick", lambda *_: None)  # C has the stream written in it
    monkeypatch.setattr(_chains, "uniform", choosing)
    assert p_value(transitions("rejection", 2 * SAMPLE)) < 1e-6  # it shows less than others


# ---- one answer, whatever happens --------------------------------------------------------------------------------


COUNT, LENGTH = 12, 40


def answers(engine: LocalEngine, rule: str, numbers=range(COUNT), **options) -> dict[int, tuple[int, ...]]:
    batch = [request(n, rule, length=LENGTH, **({"temperature": 0.5 + 0.1 * (n % 6)} | options)) for n in numbers]
    done = engine.complete(batch)
    return {n: one.tokens for n, one in zip(numbers, done, strict=True)}


@pytest.fixture(scope="module")
def plain():
    """What the target says alone, without speculation, one request at a time, by rule."""
    with engine_of(draft_seed=None, depth=1) as engine:
        return {
            rule: {n: answers(engine, rule, [n], depth=0)[n] for n in range(COUNT)} for rule in ("coupled", "exact")
        }


@pytest.mark.parametrize("rule", ["coupled", "exact"])
@pytest.mark.parametrize(
    ("draft_seed", "depth", "k"), [(2, 1, 16), (2, 3, 16), (3, 3, 4), (1, 3, 16), (1, 5, 2), (None, 4, 16)]
)
def test_a_seeded_answer_does_not_depend_on_draft_depth_or_company(plain, rule, draft_seed, depth, k) -> None:
    """Other drafts, truncated ones, the target itself, prompt lookup: in company the tokens are those of each alone."""
    with engine_of(draft_seed=draft_seed, depth=depth, k=k) as engine:
        assert answers(engine, rule) == plain[rule]
        assert answers(engine, rule, [3, 4], depth=0) == {n: plain[rule][n] for n in (3, 4)}


def test_coupled_keeps_what_an_equal_draft_offers(plain) -> None:
    """With the target itself as draft nearly every token is kept: both run the same race on nearly the same dists."""
    with engine_of(draft_seed=1, depth=4) as engine:
        done = engine.complete([request(n, "coupled", length=LENGTH) for n in range(COUNT)])
    drafted, kept = (sum(getattr(one.stats, name) for one in done) for name in ("drafted_tokens", "kept_tokens"))
    assert kept > 0.98 * drafted


def test_coupled_ships_no_dists() -> None:
    """Ids are all that a coupled plan pushes."""
    pushed = []
    with engine_of(depth=3) as engine:
        worker = engine._engine._drafts.link._channel._worker
        handle = worker.handle
        worker.handle = lambda message: pushed.append(handle(message)) or pushed[-1]
        answers(engine, "coupled")
    failures = [reply.reason for replies in pushed for reply in replies if isinstance(reply, Failed)]
    assert not failures
    dists = [reply.dists for replies in pushed for reply in replies if len(reply.tokens)]
    assert len(dists) > 5
    assert not any(len(one.rows) for one in dists)


@pytest.mark.parametrize("rule", ["coupled", "exact"])
def test_a_seeded_answer_survives_preemption(plain, rule) -> None:
    """With KV for a few requests only, some are thrown out and refilled; nobody's tokens change."""
    with engine_of(depth=3, blocks=24) as engine:
        assert answers(engine, rule) == plain[rule]
        preempted = [
            line for line in engine.metrics_text().splitlines() if line.startswith("specserve_preemptions_total")
        ]
    assert float(preempted[0].split()[-1]) > 0


@pytest.mark.parametrize("rule", ["coupled", "exact"])
def test_a_seeded_answer_survives_a_lost_verifier(plain, rule) -> None:
    """The verifier dies in the middle and a new one with empty KV takes over; nobody's tokens change."""
    lost = []
    with engine_of(depth=3) as engine:
        lose_after(engine, rounds=6, lost=lost)
        assert answers(engine, rule) == plain[rule]
    assert lost


def lose_after(engine: LocalEngine, rounds: int, lost: list[bool]) -> None:
    """Let the verifier die before it answers a round, and a fresh one with a new life join after it."""
    mind, mailbox = engine._engine, engine._mailbox
    worker, seen = mind._verifier._channel._worker, []
    handle = worker.handle
    fresh = Verifier(backend(TableBackend, 1, mind._target.blocks), vocab_size=VOCAB)

    def dying(message):
        seen.append(message)
        if isinstance(message, Verify) and len(seen) > rounds and not lost:
            lost.append(True)
            mailbox.put(PeerLost("target", 0, "killed"))
            engine._loop.call(lambda: mind.attach("target", LocalChannel(fresh, mailbox, "target", 1), 1, mind._target))
            return []
        return handle(message)

    worker.handle = dying


def test_rules_mix_in_one_batch(plain) -> None:
    """Requests under every rule run together; those whose answers are fixed by their seed get them."""
    rules = [*LOSSLESS, "typical"]
    with engine_of(depth=3) as engine:
        batch = [
            request(n, rules[n % len(rules)], length=LENGTH, temperature=0.5 + 0.1 * (n % 6)) for n in range(COUNT)
        ]
        done = dict(enumerate(engine.complete(batch)))
    for n, one in done.items():
        rule = rules[n % len(rules)]
        if rule in plain:
            assert one.tokens == plain[rule][n]


def test_branches_of_a_seed_are_independent_answers() -> None:
    """Answers of one request share its seed and differ by their branch."""
    with engine_of(depth=2) as engine:
        for rule in LOSSLESS:
            batch = [
                Request(RequestId(f"{rule}{b}"), (1, 2), 30, seed=5, ignore_eos=True, rule=rule, branch=b)
                for b in range(3)
            ]
            assert len({one.tokens for one in engine.complete(batch)}) == 3


@pytest.mark.parametrize("rule", ["guess", "synthetic", ""])
def test_a_rule_that_is_not_served_is_refused_at_the_door(rule: str) -> None:
    """An unknown rule, and made-up acceptance where it is not configured, are the client's error, in words."""
    with engine_of(depth=1) as engine, pytest.raises(SpecserveError, match="no rule called") as refused:
        engine.complete([request(1, rule, length=3)])
    assert (refused.value.status, refused.value.param) == (400, "speculation.rule")


def test_metrics_say_which_rules_are_lossy() -> None:
    """Each rule that is served has a gauge: 1 lossless, 0 lossy."""
    with engine_of(depth=1) as engine:
        lines = [line for line in engine.metrics_text().splitlines() if line.startswith("specserve_rule_lossless{")]
    found = {line.split('rule="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}
    assert found == dict.fromkeys(LOSSLESS, 1.0) | {"typical": 0.0}


def test_made_up_acceptance_is_what_was_asked_for() -> None:
    """With shares .8 and .4 configured, 1 + .8 + .4 tokens come out of a round of depth 3 at any temperature."""
    for temperature in (0.0, 1.0):
        with engine_of(depth=3, rule="synthetic", synthetic_acceptance=[0.8, 0.4]) as engine:
            done = engine.complete([request(n, None, length=61, temperature=temperature) for n in range(40)])
        rounds, tokens = (sum(getattr(one.stats, name) for one in done) for name in ("rounds", "generated_tokens"))
        assert tokens / rounds == pytest.approx(2.2, abs=0.12)
