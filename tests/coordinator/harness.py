"""An engine with toy workers behind channels that the test opens and closes."""

from __future__ import annotations

from collections import deque

from tiny_tokenizer import byte_level
from toy_workers import VOCAB, ToyDraft, ToyVerifier

from specserve.config import parse
from specserve.coordinator.engine import Engine
from specserve.drafting import guessers_of
from specserve.errors import ChannelError
from specserve.metrics import EngineMetrics
from specserve.text import Tokenizer
from specserve.transport import Arrived, PeerLost
from specserve.types import Delta, Request, RequestId, Sampling, WorkerInfo

END = 96
"""The end token of the toy model."""


class HeldChannel:
    """Keeps messages until the test lets the worker see them; order is kept, as on a real channel."""

    def __init__(self, worker, peer, life=0):
        self.worker, self.peer, self.life = worker, peer, life
        self.held = deque()
        self.closed = False

    def send(self, message):
        if self.closed:
            raise ChannelError(f"the channel to {self.peer} is closed")
        self.held.append(message)

    def close(self):
        self.closed = True

    def deliver(self, engine):
        """Let the worker handle one message; its replies reach the engine at once."""
        for reply in self.worker.handle(self.held.popleft()):
            engine.receive(Arrived(self.peer, self.life, reply))


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def info(role, blocks=64, block_tokens=4, context=64, **more):
    return WorkerInfo(role, "cpu", blocks, block_tokens, context, VOCAB, 0, 0.0, place=role, **more)


class Pipeline:
    """Engine, toy verifier and toy draft worker; `settle` runs until nothing moves."""

    def __init__(
        self,
        *,
        blocks=64,
        draft_blocks=64,
        context=64,
        guesser=None,
        draft=True,
        miss=3,
        end=END,
        make_verifier=ToyVerifier,
        make_draft=None,
        make_channel=HeldChannel,
        round_s=0.0,
        tracer=None,
        tokenizer=None,
        metrics=None,
        reads_hidden=False,
        drafts=False,
        lookup="none",
        guessers=None,
        **engine,
    ):
        self.makers = {"target": make_verifier, "draft": make_draft or (lambda: ToyDraft(miss=miss))}
        settings = {"block_tokens": 4, "max_requests": 8, "max_batch_tokens": 64, "prefill_chunk": 8}
        settings |= {"outcomes": 0} | engine
        self.config = parse({"engine": settings, "draft": {"lookup": lookup}})
        self.clock = Clock()
        self.deltas: dict[str, list[Delta]] = {}
        self.owners: dict[str, int] = {}
        self.make_channel = make_channel
        self.reads_hidden = reads_hidden  # the draft
        self.round_s = round_s  # what the clock says a verification takes
        self.verifier = HeldChannel(self.makers["target"](), "target")
        self.draft = make_channel(self.makers["draft"](), "draft") if draft else None
        self.tokenizer = tokenizer or Tokenizer(byte_level(), end_tokens=frozenset({end}))
        self.metrics = metrics or EngineMetrics("toy")
        self.engine = Engine(
            self.config,
            target=info("target", blocks, context=context, drafts=drafts),
            draft=info("draft", draft_blocks, 4, context, reads_hidden=reads_hidden) if draft else None,
            verifier=self.verifier,
            drafter=self.draft,
            guesser=guesser,
            tokenizer=self.tokenizer,
            metrics=self.metrics,
            sink=self.sink,
            clock=self.clock,
            tracer=tracer,
            guessers=guessers_of(self.config.draft) if guessers is None else guessers,
        )

    def sink(self, owner, deltas):
        self.owners[owner] = self.owners.get(owner, 0) + 1
        for delta in deltas:
            known = self.deltas.setdefault(delta.request, [])
            assert not (known and known[-1].finish), "a delta after the last one"
            known.append(delta)

    def submit(self, name, prompt, max_tokens=8, owner="me", **fields):
        sampling = fields.pop("sampling", Sampling(temperature=0))
        self.engine.submit(Request(RequestId(name), tuple(prompt), max_tokens, sampling, **fields), owner)

    def step(self):
        """Advance, then let one waiting message through; the draft's first. False when nothing waits."""
        self.engine.advance()
        self.engine.flush()
        self.engine.check()
        for channel in (self.draft, self.verifier):
            if channel is not None and channel.held and not channel.closed:
                self.clock.now += self.round_s if channel is self.verifier else 0.0
                channel.deliver(self.engine)
                self.engine.check()
                return True
        return False

    def settle(self, limit=5000):
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("the engine never settles")

    def tokens(self, name):
        return [token for delta in self.deltas.get(name, []) for token in delta.tokens]

    def last(self, name):
        return self.deltas[name][-1]

    def lose(self, which):
        channel = self.verifier if which == "target" else self.draft
        self.engine.receive(PeerLost(which, channel.life, "killed"))
        channel.held.clear()

    def restart(self, which, blocks=None, process=""):
        old = self.verifier if which == "target" else self.draft
        life = old.life + 1
        make = self.make_channel if which == "draft" else HeldChannel
        channel = make(self.makers[which](), which, life)
        if which == "target":
            self.verifier = channel
            capacity = blocks or self.engine._blocks.capacity
            self.engine.attach("target", channel, life, info("target", capacity, process=process))
        else:
            self.draft = channel
            self.engine.attach("draft", channel, life, info("draft", reads_hidden=self.reads_hidden))

    def gauges(self):
        """What the metrics say is held: requests, slots, blocks."""
        text = self.metrics.render().splitlines()
        names = ("specserve_num_requests_running", "specserve_num_requests_waiting")
        mine = [line for line in text if line.startswith(names) or 'state="held"' in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in mine)

    def idle(self):
        """Nothing is held by anybody."""
        levels = self.engine.levels()
        return (
            levels.slots_held + levels.target_blocks_held + levels.draft_blocks_held + levels.running + levels.waiting
            == 0
        )
