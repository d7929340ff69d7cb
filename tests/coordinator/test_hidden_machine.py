"""Any order of admissions, losses, cancels and preemptions: every token reaches the draft beside the right state.

So too ahead of verdicts, where pushes come late, twice, in any order or never.

The toy target's state at a position is a hash of all tokens up to it; the toy draft works the same out from what it was
told, and looks at every page that it may read.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
from harness import Pipeline
from machines import histories, hold
from test_ahead_machine import AheadMachine, LateChannel
from test_engine_machine import EngineMachine
from toy_workers import ToyDraft, ToyVerifier, split

from specserve.coordinator import hidden_drafts
from specserve.transport.messages import Close, Hidden, Open, Plan, PlanAhead, Verdict


def state(prefix) -> np.ndarray:
    """uint8 [8]: the position, and a hash of what stands there and before."""
    told = np.array([len(prefix) - 1, zlib.crc32(np.asarray(prefix, np.int32).tobytes())], dtype=np.uint32)
    return told.view(np.uint8)


class ShowingVerifier(ToyVerifier):
    """Shows the states of the rows that ask."""

    def _verify(self, batch):
        verdict = super()._verify(batch)
        if not isinstance(verdict, Verdict) or not len(batch.shown):
            return verdict
        rows = []
        for index, table in enumerate(split(batch.tables, batch.table_lengths)):
            fed, shown = int(batch.starts[index]) + int(batch.feed_lengths[index]), int(batch.shown[index])
            for position in range(fed - shown, fed + int(verdict.kept[index])) if shown else ():
                rows.append(state(self.pages.read(table, position + 1)))
        return replace(verdict, hidden=Hidden("float32", np.array(rows, np.uint8).reshape(-1, 8)))


class ReadingDraft(ToyDraft):
    """Knows each row's text from what it was told, None where it was not, and checks states and pages against it."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.texts: dict[int, list[int | None]] = {}

    def handle(self, message):
        if isinstance(message, Open):
            self.texts[message.row] = message.tokens.tolist()
        if isinstance(message, Close):
            self.texts.pop(message.row, None)
        return super().handle(message)

    def _plan(self, plan: Plan):
        feeds, tables = split(plan.feeds, plan.feed_lengths), split(plan.tables, plan.table_lengths)
        states = np.split(plan.hidden.rows, np.cumsum(plan.feed_lengths)[:-1])
        assert len(plan.hidden.rows) == len(plan.feeds)
        for row, start, feed, table, origin, shown in zip(
            plan.rows.tolist(), plan.starts.tolist(), feeds, tables, plan.origins.tolist(), states, strict=True
        ):
            assert 1 <= origin <= start
            text = self.texts[row]
            text += [None] * (start - len(text))
            text[start:] = feed
            for place, told in enumerate(shown, start - 1):
                before = text[: place + 1]
                assert told.view(np.uint32)[0] == place
                assert None in before or (told == state(before)).all()
            cells = self.pages.read(table, start)[origin:]
            assert all(token in (None, cell) for token, cell in zip(text[origin:start], cells, strict=True))
        return super()._plan(plan)

    def _guess(self, prefix):
        """Where reading begins late the prefix is not known, and the guess is no good."""
        known = next((text for text in self.texts.values() if prefix[1:] == text[1 : len(prefix)]), prefix)
        return super()._guess([known[0], *prefix[1:]])


class ReadingAhead(ToyDraft):
    """The same ahead of verdicts: committed tokens come beside the target's states, those of chains without."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.texts: dict[int, list[int]] = {}  # committed
        self.origins: dict[int, int] = {}

    def handle(self, message):
        if isinstance(message, Open):
            self.texts[message.row] = message.tokens.tolist()
        if isinstance(message, Close):
            self.texts.pop(message.row, None)
        return super().handle(message)

    def _plan_ahead(self, plan: PlanAhead):
        counts = np.maximum(plan.bases - plan.starts, 0)
        assert len(plan.hidden.rows) == counts.sum()
        columns = (plan.rows, plan.text_starts, plan.bases, plan.starts, plan.origins)
        told = np.split(plan.hidden.rows, np.cumsum(counts)[:-1])
        texts, tables = split(plan.texts, plan.text_lengths), split(plan.tables, plan.table_lengths)
        for (row, text_start, base, start, origin), shown, written, table in zip(
            zip(*(column.tolist() for column in columns), strict=True), told, texts, tables, strict=True
        ):
            assert 1 <= origin <= start
            text = self.texts[row][:text_start] + written
            for place, told_there in enumerate(shown, start - 1):
                assert (told_there == state(text[: place + 1])).all()
            assert self.pages.read(table, start)[origin:] == text[origin:start]
            self.texts[row], self.origins[row] = text[:base], origin
        return super()._plan_ahead(plan)

    def _guess(self, prefix):
        """What is not read of a prefix is known from what was told."""
        for row, text in self.texts.items():
            origin = self.origins.get(row, 0)
            if len(prefix) >= len(text) and prefix[origin : len(text)] == text[origin:]:
                return super()._guess([*text, *prefix[len(text) :]])
        return super()._guess(prefix)


class HiddenMachine(EngineMachine):
    """The same pools and events, with workers that show and read states."""

    def pipeline_of(self, **options):
        """The workers under test."""
        options["depth"] = max(1, options["depth"])
        return Pipeline(make_verifier=ShowingVerifier, make_draft=ReadingDraft, reads_hidden=True, **options)


class HiddenAheadMachine(AheadMachine):
    """Likewise, ahead of verdicts and with a way back that loses, repeats and reorders."""

    def pipeline_of(self, **options):
        """The workers under test."""
        workers = {"make_channel": LateChannel, "make_verifier": ShowingVerifier, "make_draft": ReadingAhead}
        options |= {"outcomes": self.outcomes, "draft_blocks": 40}
        return Pipeline(reads_hidden=True, **workers, **options)


@histories(25, 200)
def test_ahead_of_verdicts_committed_tokens_come_beside_the_right_states(examples):
    """Whatever was pushed when, the text is the target's and all pools add up."""
    hold(HiddenAheadMachine, examples, steps=60)


@histories(25, 100)
def test_every_token_comes_beside_the_right_state(examples):
    """Whatever happened before."""
    hold(HiddenMachine, examples, steps=40)


@histories(25, 100)
def test_prompts_whose_states_are_not_wanted_leave_a_window_behind_them(examples):
    """Before drafting pays, and of prompts in chunks: what the draft is fed stands beside its state all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hidden_drafts, "_WINDOW", 2)
        hold(HiddenMachine, examples, steps=40)


class CountingVerifier(ShowingVerifier):
    """Counts the states that it was asked for."""

    asked = 0

    def _verify(self, batch):
        CountingVerifier.asked += int(batch.shown.sum())
        return super()._verify(batch)


class CountedMachine(HiddenMachine):
    """Likewise, counted."""

    def pipeline_of(self, **options):
        """The workers under test."""
        return Pipeline(
            make_verifier=CountingVerifier, make_draft=ReadingDraft, reads_hidden=True, **{**options, "depth": 2}
        )


@pytest.mark.parametrize(("policy", "asked"), [("fixed", 40), ("adaptive", 32)])
def test_while_nothing_is_drafted_a_window_of_the_prompt_is_asked_for(policy, asked):
    """And all of it where drafts follow at once."""
    machine = CountedMachine()
    machine.build(depth=2, blocks=40, slots=6, policy=policy)
    CountingVerifier.asked = 0
    machine.submit(after=0, branches=1, depth=None, length=40, max_tokens=1)
    machine.teardown()
    assert CountingVerifier.asked == asked


def test_a_target_that_reads_again_shows_states_from_the_first_on():
    """Lost where nothing was kept of a row, it starts before what the draft covers: nothing is there to be cut then."""
    machine = HiddenMachine()
    machine.build(depth=0, blocks=16, slots=6, policy="fixed")
    machine.submit(after=0, branches=1, depth=None, length=1, max_tokens=2)
    machine.run(count=3)
    machine.lose(which="target")
    machine.teardown()
    machine.pools_add_up()


def test_a_new_window_is_not_widened_by_what_a_sibling_covers():
    """Answers to one prompt push each other's blocks out: who begins behind a gap has no states for the prompt."""
    machine = HiddenMachine()
    machine.build(depth=0, blocks=16, slots=6, policy="fixed")
    machine.submit(after=0, branches=3, depth=None, length=6, max_tokens=17)
    machine.teardown()
    machine.pools_add_up()
