"""Drafts that come with verdicts: any order of events, whatever the verifier says, and no block taken from anybody."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
from harness import Pipeline, info
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from test_engine_machine import EngineMachine
from toy_workers import VOCAB, ToyVerifier, next_token, reference, split
from worker_messages import Part, verify

from specserve.coordinator.beside_drafts import BesideDrafts
from specserve.coordinator.depth import FixedDepth
from specserve.coordinator.limits import check_limits
from specserve.coordinator.rounds import Round
from specserve.errors import ConfigError, ProtocolError
from specserve.transport.messages import Dists, Drafted, Verdict


class DraftingVerifier(ToyVerifier):
    """Drafts its own next tokens behind each verdict, every third one wrong, and scribbles where heads keep theirs."""

    def _verify(self, batch):
        verdict = super()._verify(batch)
        if not isinstance(verdict, Verdict):
            return verdict
        chains = [self._draft(batch, verdict, index, table) for index, table in enumerate(tables_of(batch))]
        lengths = np.array([len(chain) for chain in chains], np.int32)
        tokens = np.array([token for chain in chains for token in chain], np.int32)
        return replace(verdict, drafted=Drafted(lengths, tokens, Dists.none(), 0.0))

    def _draft(self, batch, verdict, index, table):
        end = int(batch.starts[index] + batch.feed_lengths[index] + verdict.kept[index])
        depth = min(int(batch.depths[index]), len(table) * self.pages.block_tokens - end)
        if not batch.due[index]:
            return []
        prefix, chain = [*self.pages.read(table, end), int(verdict.next[index])], []
        for place in range(depth):
            self.pages.write(table, end + place, -5)
            token = next_token([*prefix, *chain])
            wrong = zlib.crc32(bytes([len(prefix) % 251, place])) % 3 == 0
            chain.append((token + wrong) % VOCAB)
        return chain


def tables_of(batch):
    return split(batch.tables, batch.table_lengths)


def pipeline(make_verifier=DraftingVerifier, **options):
    return Pipeline(make_verifier=make_verifier, draft=False, drafts=True, **options)


class BesideMachine(EngineMachine):
    """The same pools and events, with a verifier that drafts."""

    def pipeline_of(self, **options):
        """The workers under test."""
        options["depth"] = max(1, options["depth"])
        return pipeline(**options)

    @rule(which=st.just("target"))
    def lose(self, which):
        super().lose(which)

    @rule(which=st.just("target"))
    def restart(self, which):
        super().restart(which)


TestBeside = BesideMachine.TestCase
TestBeside.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    derandomize=True,
)


def test_each_verdict_brings_the_draft_of_the_next_round() -> None:
    """Fewer rounds than tokens, the answer is the target's, and nothing is drafted past the answer's end."""
    here = pipeline(depth=3, end=1000)
    here.submit("a", [1, 2, 3], 12)
    here.settle()
    assert here.tokens("a") == reference([1, 2, 3], 12)
    stats = here.last("a").stats
    assert stats.kept_tokens > 4
    assert stats.rounds == 12 - stats.kept_tokens
    assert here.idle()


def test_a_request_without_speculation_asks_for_no_drafts() -> None:
    """Its rows say 0, beside others that say more."""
    asked = []

    class Listening(DraftingVerifier):
        def _verify(self, batch):
            asked.append(dict(zip(batch.rows.tolist(), batch.depths.tolist(), strict=True)))
            return super()._verify(batch)

    here = pipeline(make_verifier=Listening, depth=3, end=1000)
    here.submit("a", [1, 2, 3], 8, depth=0)
    here.submit("b", [4, 5, 6], 8)
    here.settle()
    assert {depths[0] for depths in asked if 0 in depths} == {0}
    assert max(depths.get(1, 0) for depths in asked) == 3
    assert here.last("a").stats.drafted_tokens == 0 < here.last("b").stats.drafted_tokens


SPOILT = {
    "another number of rows": lambda drafted: replace(drafted, lengths=drafted.lengths[:-1]),
    "a negative length": lambda drafted: replace(drafted, lengths=drafted.lengths - 9),
    "more than was asked for": lambda drafted: Drafted(
        np.array([9], np.int32), np.arange(9, dtype=np.int32), Dists.none(), 0.0
    ),
    "another number of tokens": lambda drafted: replace(drafted, tokens=drafted.tokens[:-1]),
    "a token that there is not": lambda drafted: replace(drafted, tokens=drafted.tokens - VOCAB),
    "another number of dists": lambda drafted: replace(drafted, dists=Dists("sparse", 1, np.zeros((1, 6), "uint8"))),
}


@pytest.mark.parametrize("how", SPOILT)
def test_drafts_that_nobody_asked_for_cost_the_verifier(how: str) -> None:
    """It is treated as lost before anything of its verdict is committed; its successor goes on with the answer."""

    class Spoiling(DraftingVerifier):
        def _verify(self, batch):
            verdict = super()._verify(batch)
            return replace(verdict, drafted=SPOILT[how](verdict.drafted)) if batch.round == 2 else verdict

    here = pipeline(make_verifier=Spoiling, depth=3, end=1000)
    here.submit("a", [1, 2, 3], 12)
    here.settle()
    assert not here.engine._verifier.up
    assert here.tokens("a") == reference([1, 2, 3], 12)[: len(here.tokens("a"))]
    here.makers["target"] = DraftingVerifier
    here.restart("target")
    here.settle()
    assert here.tokens("a") == reference([1, 2, 3], 12)
    assert here.idle()


ASKED = [2, 3]
"""Tokens to draft behind each row's verdict."""


def take(drafted, asked=ASKED):
    """The chains, by row, that a verdict of two rows brings."""
    rows = [Part(row, 0, [1], [row]) for row in (4, 7)]
    sent = replace(verify(rows), depths=np.array(asked, np.int32))
    nothing = np.zeros(2, np.int32)
    verdict = Verdict(sent.round, sent.rows, sent.epochs, nothing, nothing, 0.0, 0.0, drafted=drafted)
    source = BesideDrafts(FixedDepth(3, 64, None), VOCAB, 64)
    source.take(Round(sent, [], [], 0.0), verdict)
    return {row: chain.tokens for row, chain in source._came.items()}


def drafted_as(lengths, tokens, dists=0):
    rows = Dists("sparse", 2, np.zeros((dists, 12), np.uint8)) if dists else Dists.none()
    return Drafted(np.array(lengths, np.int32), np.array(tokens, np.int32), rows, 0.0)


@pytest.mark.parametrize(
    ("drafted", "chains"),
    [
        (drafted_as([2, 3], [1, 2, 3, 4, 5]), {4: [1, 2], 7: [3, 4, 5]}),
        (drafted_as([2, 3], [1, 2, 3, 4, 5], dists=5), {4: [1, 2], 7: [3, 4, 5]}),
        (drafted_as([0, 1], [VOCAB - 1]), {4: [], 7: [VOCAB - 1]}),
        (drafted_as([0, 0], []), {4: [], 7: []}),
    ],
    ids=["without dists", "with dists", "fewer", "none"],
)
def test_drafts_of_at_most_what_was_asked_for_are_taken(drafted, chains) -> None:
    """Each row gets its own tokens, in order."""
    assert take(drafted) == chains


@pytest.mark.parametrize(
    ("drafted", "asked", "reason"),
    [
        (drafted_as([2], [1, 2]), ASKED, r"of \[2, 3\]"),
        (drafted_as([2, 3, 0], [1, 2, 3, 4, 5]), ASKED, r"of \[2, 3\]"),
        (drafted_as([], []), ASKED, r"of \[2, 3\]"),
        (drafted_as([1, 0], [1]), [], r"of \[\]"),
        (drafted_as([-1, 3], [1, 2]), ASKED, r"of \[2, 3\]"),
        (drafted_as([3, 2], [1, 2, 3, 4, 5]), ASKED, r"of \[2, 3\]"),
        (drafted_as([2, 1], [1, 2]), ASKED, "of another number"),
        (drafted_as([1, 0], [1, 2]), ASKED, "of another number"),
        (drafted_as([0, 0], [1]), ASKED, "of another number"),
        (drafted_as([1, 1], [1, 2], dists=1), ASKED, "of another number"),
        (drafted_as([1, 1], [1, 2], dists=3), ASKED, "of another number"),
        (drafted_as([0, 0], [], dists=1), ASKED, "of another number"),
        (drafted_as([1, 1], [1, -1]), ASKED, "outside the vocabulary"),
        (drafted_as([1, 1], [1, VOCAB]), ASKED, "outside the vocabulary"),
    ],
    ids=[
        *("a row too few", "a row too many", "no rows", "nothing was asked for", "a negative length", "a longer chain"),
        *("a token too few", "a token too many", "tokens of no row", "a dist too few", "a dist too many"),
        *("dists of no token", "a negative token", "a token that there is not"),
    ],
)
def test_drafts_of_any_other_shape_break_the_protocol(drafted, asked, reason) -> None:
    """With a ProtocolError, whatever is wrong about them: that costs the verifier its life, and nobody else."""
    with pytest.raises(ProtocolError, match=reason):
        take(drafted, asked)


OTHER_DISTS = {
    "another form": lambda count: Dists("dense", 2, np.zeros((count, 12), np.uint8)),
    "another width": lambda count: Dists("sparse", 3, np.zeros((count, 12), np.uint8)),
    "rows of more bytes": lambda count: Dists("sparse", 2, np.zeros((count, 18), np.uint8)),
}


@pytest.mark.parametrize("how", OTHER_DISTS)
def test_dists_that_change_their_layout_cost_the_verifier(how: str) -> None:
    """Chains of two verdicts are put together. A successor's dists may be laid out as those were that cost it."""

    class Drawing(DraftingVerifier):
        def _verify(self, batch):
            verdict = super()._verify(batch)
            count = len(verdict.drafted.tokens)
            return replace(verdict, drafted=replace(verdict.drafted, dists=self.dists(batch, count)))

        def dists(self, batch, count):
            return OTHER_DISTS[how](count)

    class Changing(Drawing):
        def dists(self, batch, count):
            usual = Dists("sparse", 2, np.zeros((count, 12), np.uint8))
            return usual if batch.round < 3 else super().dists(batch, count)

    here = pipeline(make_verifier=Changing, depth=3, end=1000)
    here.submit("a", [1, 2, 3], 12)
    here.settle()
    assert here.engine.away == ("target",)
    assert 0 < len(here.tokens("a")) < 12
    here.makers["target"] = Drawing
    here.restart("target")
    here.settle()
    assert here.engine.away == ()
    assert here.tokens("a") == reference([1, 2, 3], 12)
    assert here.idle()


def test_outcomes_are_refused() -> None:
    """A target that drafts behind its verdicts cannot draft ahead of them."""
    engine = pipeline(depth=3).config.engine.model_copy(update={"outcomes": 1})
    with pytest.raises(ConfigError, match=r"set engine\.outcomes to 0 or auto"):
        check_limits(engine, info("target", drafts=True), None)
