"""One ingress and its coordinator, with a wire between them that loses, repeats and reorders, and processes that die.

Everything but the wire is what runs: the engine and its loop's handling, `Ingresses`, `Streams`, and `Peers`, which
judges every frame by nonce, life and number.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

from harness import Clock, Pipeline

from specserve.cluster.streams import Stream, Streams
from specserve.coordinator.ingresses import Ingresses
from specserve.coordinator.loop import Loop
from specserve.errors import ChannelError
from specserve.transport import Arrived, Mailbox, PeerLost
from specserve.transport.messages import Beat, Deltas, Message, Places, Reconnect
from specserve.transport.peers import HEADER, MAGIC, VERSION, Peer, Peers
from specserve.types import Delta, Request, RequestId, RequestStats, Sampling

INGRESS, COORDINATOR = "ingress", "coordinator"
LEASE_S = 1.5


@dataclass
class Way:
    """One direction of one connection. `frames` are under way; the test may tamper with them."""

    peers: Peers
    nonce: bytes
    life: int
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    frames: deque[tuple[bytes, Message]] = field(default_factory=deque)
    closed: bool = False

    def send(self, message: Message) -> None:
        if self.closed:
            raise ChannelError("closed")
        header = HEADER.pack(MAGIC, VERSION, self.nonce, self.life, 1, next(self.numbers))
        self.frames.append((header, message))

    def arrive(self) -> tuple[Peer, Message] | None:
        """The next frame's message, if the receiver takes it."""
        header, message = self.frames.popleft()
        peer = self.peers.admit(header)
        return None if peer is None else (peer, message)


class ModelLine:
    """The coordinator's end of a connection."""

    def __init__(self, side: Coordinator, life: int, way: Way) -> None:
        self.side, self.life, self.way = side, life, way
        self.back = Way(side.peers, side.peers.accept(INGRESS, life), life)
        side.peers.expect(INGRESS)

    @property
    def acknowledged(self) -> int:
        peer = self.side.peers.get(INGRESS)
        return 0 if peer is None else peer.progress

    def send(self, message: Message) -> None:
        self.way.send(message)

    def close(self) -> None:
        self.way.closed = True
        self.side.peers.forget(INGRESS)


class Coordinator:
    """One life of a coordinator's process."""

    def __init__(self, name: str, clock: Clock, make_ingresses, **settings) -> None:
        self.name = name
        self.pipeline = Pipeline(end=1000, max_requests=4, queue_limit=3, max_batch_tokens=24, **settings)
        self.pipeline.engine._clock = clock
        self.mailbox = Mailbox()
        self.peers = Peers(self.mailbox)
        self.ingresses = make_ingresses(clock, LEASE_S)
        self.pipeline.engine._sink = self.ingresses.deliver
        self.pipeline.engine._places._sink = self.ingresses.place
        self.loop = Loop(self.pipeline.engine, self.mailbox, self.ingresses)

    def step(self) -> bool:
        """What the loop does with all that has come, and one message of a worker. False when nothing waits."""
        while (item := self.mailbox.get(0)) is not None:
            self.loop._take(item)
        self.loop._cancel_expired()
        return self.pipeline.step()


class World:
    """The whole: clients above an ingress, and one coordinator after another."""

    def __init__(self, *, streams=Streams, ingresses=Ingresses, **settings) -> None:
        self.clock = Clock()
        self.settings, self.make_ingresses = settings, ingresses
        self.names = itertools.count()
        self.ended_while_open: dict[str, tuple[int, int]] = {}
        self.coordinator = self._coordinator()
        self.mailbox = Mailbox()
        self.peers = Peers(self.mailbox)
        self.streams: Streams = streams()
        self.life = -1
        self.line: ModelLine | None = None
        self.connected = False
        self.open: dict[str, Stream] = {}
        self.deltas: dict[str, list[Delta]] = {}

    def _coordinator(self) -> Coordinator:
        return Coordinator(f"engine {next(self.names)}", self.clock, self.make_ingresses, **self.settings)

    # ---- clients ------------------------------------------------------------------------------------------------

    def ask(self, name: str, prompt: list[int], max_tokens: int, **fields: object) -> None:
        request = Request(RequestId(name), tuple(prompt), max_tokens, Sampling(temperature=0), **fields)
        stream = Stream(request, self.clock.now)
        self.streams.open(stream)
        self.open[name], self.deltas[name] = stream, []
        if self.connected:
            self.send(stream.submission(self.clock.now, self.streams.engine))

    def leave(self, name: str) -> None:
        """The client is gone."""
        cancel = self.streams.close(self.open.pop(name))
        if cancel is not None and self.connected:
            self.send(cancel)

    def read(self) -> None:
        """Clients read what there is for them; a stream that has ended is closed."""
        for name, stream in list(self.open.items()):
            while not stream.unread.empty():
                self.deltas[name].append(stream.unread.get_nowait())
            if self.deltas[name] and self.deltas[name][-1].finish is not None:
                self.leave(name)

    def tokens(self, name: str) -> list[int]:
        return [token for delta in self.deltas[name] for token in delta.tokens]

    # ---- the ingress --------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        assert self.line is not None
        self.line.back.send(message)

    def connect(self) -> None:
        """As `RemoteEngine.connect`."""
        self.life += 1
        way = Way(self.peers, self.peers.accept(COORDINATOR, self.life), self.life)
        lines: list[ModelLine] = []

        def open_line() -> ModelLine:
            lines.append(ModelLine(self.coordinator, self.life, way))
            return lines[0]

        known = self.coordinator.loop.welcome(INGRESS, self.life, self.streams.cursor, open_line)
        self.line, self.connected = lines[0], True
        for message in self.streams.welcomed(self.coordinator.name, known, self.clock.now):
            self.send(message)

    def hear(self) -> None:
        """Take everything that the ingress's mailbox holds."""
        while (item := self.mailbox.get(0)) is not None:
            assert isinstance(item, Arrived | PeerLost)
            if item.life != self.life:
                continue
            if isinstance(item, PeerLost) or isinstance(item.message, Reconnect):
                self.connected = False
            elif isinstance(item.message, Deltas):
                cancels = self.streams.take(item.message, self.clock.now)
                self.connected = self.connected and cancels is not None
            elif isinstance(item.message, Places):
                self.streams.place(item.message)

    def deaths(self, name: str) -> int:
        """Coordinators that died since the last token of a stream came."""
        return self.ended_while_open.get(name, (0, 0))[1]

    def working_on(self) -> list[str]:
        """Requests to which the coordinator gave a place."""
        return [state.request.id for state in self.coordinator.pipeline.engine._scheduler.running]

    # ---- the wire -----------------------------------------------------------------------------------------------

    @property
    def ways(self) -> list[Way]:
        return [] if self.line is None else [self.line.way, self.line.back]

    def carry(self, way: Way) -> None:
        """Let one frame through."""
        if not way.frames:
            return
        mailbox = self.mailbox if way.peers is self.peers else self.coordinator.mailbox
        arrived = way.arrive()
        if arrived is not None:
            peer, message = arrived
            if isinstance(message, Beat):
                peer.progress = message.progress
            else:
                mailbox.put(Arrived(peer.name, peer.life, message))
        self.hear()

    def beat(self) -> None:
        """Both hearts beat: what was lost before shows in their numbers."""
        if self.line is not None and self.connected:
            self.line.back.send(Beat(self.streams.cursor, False))
        if self.line is not None and not self.line.way.closed:
            self.line.way.send(Beat(0, False))

    def kill(self) -> None:
        """The coordinator's process dies, with all that was under way; the workers find another one."""
        for name, stream in self.open.items():
            known, deaths = self.ended_while_open.get(name, (0, 0))
            have = len(stream.tokens)
            self.ended_while_open[name] = (have, 1 + (deaths if have == known else 0))
        if self.line is not None:
            self.line.way.closed = True
            for way in self.ways:
                way.frames.clear()
        self.coordinator = self._coordinator()
        self.connected = False

    def settle(self, limit: int = 4000) -> None:
        """No more faults: until every stream has ended and nothing is held."""
        for _ in range(limit):
            if not self.connected:
                self.connect()
            self.beat()
            for way in self.ways:
                while way.frames:
                    self.carry(way)
            moved = self.coordinator.step()
            self.hear()
            self.read()
            if not self.open and not moved and self.connected and self.coordinator.mailbox.get(0) is None:
                return
        raise AssertionError("the streams never end")


def whole(stats: RequestStats, deltas: list[Delta]) -> bool:
    """The books of an answer agree with what its client got, whoever kept them."""
    rounds = [delta for delta in deltas if delta.tokens]
    return (
        stats.generated_tokens == sum(len(delta.tokens) for delta in deltas)
        and stats.kept_tokens == sum(delta.kept for delta in rounds)
        and stats.drafted_tokens == sum(delta.offered for delta in rounds)
        and sum(stats.histogram) == stats.rounds == len(rounds)
    )


def asking(max_tokens: int, **parts: object) -> World:
    """A world without drafts, connected, whose client "a" asks for so many tokens behind [1, 2, 3]."""
    world = World(depth=0, **parts)
    world.connect()
    world.ask("a", [1, 2, 3], max_tokens)
    return world


def tampered(frames, how):
    """The first frame under way is lost, comes twice, or is overtaken by all others."""
    if frames and how == "lose":
        frames.popleft()
    elif frames and how == "repeat":
        frames.appendleft(frames[0])
    else:
        frames.rotate(-1)


def run(world: World, rounds: int) -> None:
    """Carry what is there to the coordinator, and let it work; nothing is carried back."""
    while world.ways[1].frames:
        world.carry(world.ways[1])
    for _ in range(rounds):
        world.coordinator.step()


def drain(world: World) -> None:
    """Everything that is under way arrives."""
    for way in world.ways:
        while way.frames:
            world.carry(way)


def resumed(world: World) -> int:
    """How often the present coordinator took a request up again."""
    lines = world.coordinator.pipeline.metrics.render().splitlines()
    (line,) = [line for line in lines if line.startswith("specserve_requests_resumed_total")]
    return int(float(line.rsplit(" ", 1)[1]))
