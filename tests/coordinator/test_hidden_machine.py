"""Any order of admissions, losses, cancels and preemptions: every token reaches the draft beside the right state.

The toy target's state at a position is a hash of all tokens up to it; the toy draft works the same out from what it was
told, and looks at every page that it may read.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
from harness import Pipeline
from machines import histories, hold
from test_engine_machine import EngineMachine
from toy_workers import ToyDraft, ToyVerifier, split

from specserve.transport.messages import Close, Hidden, Open, Plan, Verdict


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
            start = int(batch.starts[index])
            end = start + int(batch.feed_lengths[index]) + int(verdict.kept[index])
            for position in range(start, end) if batch.shown[index] else ():
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


class HiddenMachine(EngineMachine):
    """The same pools and events, with workers that show and read states."""

    def pipeline_of(self, **options):
        """The workers under test."""
        options["depth"] = max(1, options["depth"])
        return Pipeline(make_verifier=ShowingVerifier, make_draft=ReadingDraft, reads_hidden=True, **options)


@histories(25, 100)
def test_every_token_comes_beside_the_right_state(examples):
    """Whatever happened before."""
    hold(HiddenMachine, examples, steps=40)


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
