"""An exhaustive explorer of the coordinator's protocol: every order of events within stated bounds, on the real engine.

A state is reached by replaying its events on a fresh engine with toy workers, whose messages wait until an event lets
one through. Two states are the same when the coordinator knows the same, the same messages are under way, and the same
budget of rare events is left. In each new state the invariants are proven, and from each the pipeline must come to its
end: every request ended once, with the target's text, and nothing is held.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import numpy as np
from harness import Pipeline, info
from test_ahead_machine import LateChannel
from tiny_tokenizer import byte_level
from toy_workers import reference

from specserve.coordinator.requests import Stage
from specserve.metrics import EngineMetrics
from specserve.text import Tokenizer
from specserve.transport import Arrived
from specserve.transport.messages import Message

Event = tuple[str, ...]

WORKERS = ("draft", "target")

RARE = frozenset({"late", "double", "drop", "lose", "cancel", "stale", "wait"})


@dataclass(frozen=True)
class Bounds:
    """How much may happen: `rare` events of any of the kinds in RARE in one history, and all others without limit."""

    prompts: dict[str, tuple[int, ...]]
    max_tokens: int
    rare: int
    settings: dict[str, Any]


@cache
def _shared() -> dict[str, Any]:
    """What costs most to make, and holds nothing of an engine's state but counters."""
    end = 1000
    return {"tokenizer": Tokenizer(byte_level(), end_tokens=frozenset({end})), "metrics": EngineMetrics("toy")}


class World:
    """One engine with its workers and the messages between them."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        settings = {"make_channel": LateChannel, "draft_wait_s": 1.0, "hang_after_s": 4.0} | bounds.settings
        self.here = Pipeline(**_shared(), **settings)
        self.here.verifier = LateChannel(self.here.verifier.worker, "target")
        self.here.engine._verifier._channel = self.here.verifier
        self.admitted: list[str] = []
        self.cancelled: list[str] = []
        self.away: set[str] = set()
        self.rare = bounds.rare
        self.waited_for_verifier = False  # longer than anybody has to
        self.stale: list[Arrived] = []  # what workers said in lives that are over

    def channel(self, role: str) -> LateChannel:
        return self.here.verifier if role == "target" else self.here.draft

    # ---- events

    def events(self) -> Iterator[Event]:
        """What may happen now."""
        for name in self.bounds.prompts:
            if name not in self.admitted:
                yield ("admit", name)
                break  # requests are alike: the order of their names says nothing
        for role in WORKERS:
            if role in self.away:
                yield ("rejoin", role)
            else:
                yield from self._worker_events(role)
        for name in self.admitted:
            if name in self.here.engine._states:
                yield from self._if_left("cancel", name)
        if self.stale:
            yield from self._if_left("stale", "")
        if self.here.engine.deadline_s is not None:
            yield from self._if_left("wait", "")

    def _worker_events(self, role: str) -> Iterator[Event]:
        channel = self.channel(role)
        if channel.held:
            yield ("work", role)
        if channel.replies:
            yield ("arrive", role)
        if len(channel.replies) > 1:
            yield from self._if_left("late", role)
        if channel.replies and role == "draft":
            yield from self._if_left("double", role)
            yield from self._if_left("drop", role)
        yield from self._if_left("lose", role)

    def _if_left(self, kind: str, subject: str) -> Iterator[Event]:
        if self.rare:
            yield (kind, subject)

    def apply(self, event: Event) -> None:
        """Let it happen, then do what the loop does after each event."""
        kind, subject = event
        self.rare -= kind in RARE
        getattr(self, f"_{kind}")(subject)
        self.here.engine.advance()
        self.here.engine.flush()

    def _admit(self, name: str) -> None:
        self.here.submit(name, self.bounds.prompts[name], self.bounds.max_tokens)
        self.admitted.append(name)

    def _work(self, role: str) -> None:
        self.channel(role).work()

    def _arrive(self, role: str) -> None:
        self.channel(role).let_through(self.here.engine)

    def _late(self, role: str) -> None:
        self.channel(role).let_through(self.here.engine, which=1)

    def _double(self, role: str) -> None:
        self.channel(role).let_through(self.here.engine, keep=True)

    def _drop(self, role: str) -> None:
        self.channel(role).replies.pop(0)

    def _lose(self, role: str) -> None:
        channel = self.channel(role)
        self.stale += [Arrived(role, channel.life, reply) for reply in channel.replies]
        channel.replies.clear()
        self.here.lose(role)
        self.away.add(role)

    def _rejoin(self, role: str) -> None:
        life = self.channel(role).life + 1
        channel = LateChannel(self.here.makers[role](), role, life)
        levels = self.here.engine.levels()
        capacity = levels.target_blocks_capacity if role == "target" else self.bounds.settings["draft_blocks"]
        setattr(self.here, "verifier" if role == "target" else "draft", channel)
        context = self.here.engine._target.context_length
        self.here.engine.attach(role, channel, life, info(role, capacity, context=context))
        self.away.discard(role)

    def _cancel(self, name: str) -> None:
        self.cancelled.append(name)
        self.here.engine.cancel(name)

    def _stale(self, _: str) -> None:
        """What carries an old life changes nothing (I5)."""
        item = self.stale.pop(0)
        before = self.fingerprint()
        self.here.engine.receive(item)
        assert self.fingerprint() == before, "a message of an old life changed something"

    def _wait(self, _: str) -> None:
        deadline = self.here.engine.deadline_s
        assert deadline is not None
        self.waited_for_verifier |= "target" in self.here.engine.away
        self.here.clock.now = max(self.here.clock.now, deadline)

    # ---- what must hold

    def check(self) -> None:
        """I1 to I4 in this state."""
        self.here.engine.check()
        for name in self.admitted:
            self._check_answer(name)

    def _check_answer(self, name: str) -> None:
        expected = reference(self.bounds.prompts[name], self.bounds.max_tokens)
        said = self.here.tokens(name)
        assert said == expected[: len(said)], f"{name} said {said}"
        deltas = self.here.deltas.get(name, [])
        for delta in deltas:
            assert delta.kept <= self.here.config.engine.depth
            ended = delta.finish is not None
            assert len(delta.tokens) == delta.kept + 1 or ended, "a decode row yields kept + 1 tokens"
        assert sum(delta.finish is not None for delta in deltas) == (name not in self.here.engine._states)

    def finish(self) -> None:
        """Whatever happened: workers come back, time passes, and every request comes to its one end."""
        for _ in range(2):
            for role in sorted(self.away | set(self.here.engine.away)):
                self._rejoin(role)
            self._settle()
            self.here.clock.now += 100  # a worker whose answer was lost is given up
            self.here.engine.advance()
        for role in self.here.engine.away:
            self._rejoin(role)
        self._settle()
        self.check()
        for name in self.admitted:
            self._check_end(name)
        assert self.here.idle()

    def _check_end(self, name: str) -> None:
        last = self.here.last(name)
        whole = last.finish == "length" and len(self.here.tokens(name)) == self.bounds.max_tokens
        cancelled = last.finish == "abort" and name in self.cancelled
        given_up = self.waited_for_verifier and last.failure is not None and last.failure.code == "verifier_lost"
        assert whole or cancelled or given_up, f"{name}: {last}"

    def _settle(self) -> None:
        for _ in range(1000):
            self.here.engine.advance()
            self.here.engine.flush()
            moved = [role for role in WORKERS if self._move(role)]
            if not moved:
                return
        raise AssertionError("the engine never settles")

    def _move(self, role: str) -> bool:
        channel = self.channel(role)
        if role in self.here.engine.away or not (channel.held or channel.replies):
            return False
        channel.deliver(self.here.engine)
        while channel.replies:
            channel.let_through(self.here.engine)
        return True

    # ---- identity

    def fingerprint(self) -> tuple[object, ...]:
        """What tells two states apart."""
        engine = self.here.engine
        numbers = {"round": engine._round_number, "plan": getattr(engine._drafts, "_number", 0)}
        requests = tuple(self._request(name) for name in self.admitted)
        under_way = tuple(
            tuple(_message(each, numbers) for each in queue)
            for role in WORKERS
            for queue in (self.channel(role).held, self.channel(role).replies)
        )
        flags = (engine._round is None, engine._planned is None, engine.away, engine.levels())
        queues = tuple(tuple(state.request.id for state in queue) for queue in _queues(engine))
        due = engine.deadline_s is not None and self.here.clock.now >= engine.deadline_s
        return (requests, under_way, flags, queues, self.rare, tuple(sorted(self.away)), len(self.stale), due)

    def _request(self, name: str) -> tuple[object, ...]:
        state = self.here.engine._states.get(name)
        if state is None:
            return (name, name in self.cancelled, tuple(self.here.tokens(name)))
        opened = (state.target_opened is not None, state.draft_opened is not None)
        current = self.here.engine._round
        in_flight = current is not None and current.names(state)
        stage = (state.stage is Stage.RUNNING, state.epoch, in_flight, state.suspect)
        blame = (state.losses, any(each is state for each in self.here.engine._accused))
        caches = (state.target_cached, state.draft_cached, tuple(state.target_table), tuple(state.draft_table))
        return (name, len(state.tokens), stage, blame, caches, tuple(state.chain.tokens), opened, state.draft_known)


def _queues(engine: Any) -> tuple[Any, Any]:
    return engine._scheduler.waiting, engine._scheduler.running


def _message(message: Message, numbers: dict[str, int]) -> tuple[object, ...]:
    """A message with its number told relative to the newest one, so that histories of other lengths may meet."""
    parts: list[object] = [type(message).__name__]
    for each in fields(message):  # type: ignore[arg-type]
        value = getattr(message, each.name)
        if each.name in numbers:
            value -= numbers[each.name]
        if each.name == "batch":
            value -= numbers["plan"]
        parts.append(_plain(value))
    return tuple(parts)


def _plain(value: Any) -> object:
    if isinstance(value, np.ndarray):
        return (value.shape, value.tobytes())
    return repr(value)


@dataclass
class Found:
    """What was explored: distinct states, events tried, the longest history, and states after a preemption."""

    states: int = 0
    steps: int = 0
    longest: int = 0
    preempted: int = 0
    kinds: Counter[str] = field(default_factory=Counter)


def explore(bounds: Bounds, *, most: int, make: type[World] = World) -> Found:
    """Reach every state within the bounds, breadth first. Raises AssertionError or PoolError where one is bad.

    Raises OverflowError when there are more than `most`.
    """
    found, seen = Found(), set()
    frontier: deque[tuple[Event, ...]] = deque([()])
    while frontier:
        path = frontier.popleft()
        for event in [*_replayed(bounds, path, make).events()]:
            found.steps += 1
            found.kinds[event[0]] += 1
            history = (*path, event)
            world = _replayed(bounds, path, make)
            try:
                world.apply(event)
                world.check()
                mark = world.fingerprint()
                if mark in seen:
                    continue
                preempted = any(state.epoch for state in world.here.engine._states.values())
                world.finish()
            except Exception as error:
                error.add_note(f"after {' '.join('-'.join(each) for each in history)}")
                raise
            seen.add(mark)
            if len(seen) > most:
                raise OverflowError(f"more than {most} states")
            found.longest = max(found.longest, len(history))
            found.preempted += preempted
            frontier.append(history)
    found.states = len(seen)
    return found


def _replayed(bounds: Bounds, path: tuple[Event, ...], make: type[World]) -> World:
    world = make(bounds)
    for event in path:
        world.apply(event)
    return world
