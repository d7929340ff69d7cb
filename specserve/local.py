"""The same engine with no Ray and no server: both workers in this process, for notebooks, tests and a debugger.

    with LocalEngine() as engine:
        print(engine.generate("Once upon a time", max_tokens=40)[0].text)

One background thread drives the coordinator and, through local channels, both workers in turn; where the draft works
ahead of the verdict, each worker has a thread of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from queue import SimpleQueue
from reprlib import repr as shortened
from types import TracebackType
from typing import Any, Self, TypeGuard

import numpy as np
from pydantic import ValidationError

from specserve import __version__, drafting, model_sampling
from specserve import config as configs
from specserve.api.messages import conversation_of
from specserve.api.schemas import Generation, field_error
from specserve.config import Config
from specserve.coordinator.drafts import Guesser
from specserve.coordinator.engine import Engine
from specserve.coordinator.loop import Loop
from specserve.coordinator.worker_drafts import takes_turns
from specserve.errors import InvalidField, SpecserveError, Unavailable
from specserve.metrics import EngineMetrics, Ledger, Snapshot
from specserve.metrics.ledger import COORDINATOR
from specserve.sampling.grammar import Grammars
from specserve.text import AnswerText, Tokenizer
from specserve.timeline import chrome_trace
from specserve.tracing import tracer_of
from specserve.transport import Mailbox, Worker
from specserve.transport.local import LocalChannel, ThreadChannel
from specserve.types import (
    Delta,
    FinishReason,
    Health,
    ModelCard,
    PoolLevels,
    Request,
    RequestId,
    RequestStats,
    Sampling,
    Structured,
    TokenLogprob,
    WorkerInfo,
)

_OWNER = "local"

_PATIENCE_S = 30.0  # longest wait, at the end, for a batch that a worker computes


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: RequestStats
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of, loaded and ready. `draft` is None without a draft worker."""

    verifier: Worker
    target: WorkerInfo
    draft_worker: Worker | None
    draft: WorkerInfo | None
    guesser: Guesser | None
    tokenizer: Tokenizer
    sampling: Sampling = field(default_factory=Sampling)
    """As the target's makers would have its tokens drawn."""


def load_parts(config: Config, progress: Callable[[str], None] = lambda _: None) -> Parts:
    """Load both models and check that they fit together. Raises ConfigError."""
    from specserve.models import _memory_plan
    from specserve.models.loading import prepare
    from specserve.models.vocabulary import check
    from specserve.verification import verifier as verification

    has_worker = drafting.has_worker(config.draft)  # what is no speculator is refused before anything is loaded
    folder = prepare(config.target, progress, role="target")
    progress("loading the target")
    verifier, target = verification.build(config)
    progress(f"target on {target.device}: {_memory_plan.line(target.memory, target.quantization)}")
    draft_worker, draft = None, None
    if config.engine.depth > 0 and has_worker:
        from specserve.drafting import worker as draft_workers

        draft_folder = prepare(config.draft_model, progress, role="draft")
        progress("loading the draft")
        draft_worker, draft = draft_workers.build(config)
        progress(f"draft on {draft.device}: {_memory_plan.line(draft.memory, draft.quantization)}")
        check(folder, draft_folder, target.vocab_size, draft.vocab_size)
    usual = model_sampling.read(folder)
    guesser = drafting.guesser_of(config.draft)
    return Parts(verifier, target, draft_worker, draft, guesser, Tokenizer.load(folder), usual)


@dataclass(frozen=True, slots=True)
class _Ticket:
    """Requests on their way in, who hears of them, and the ids of those that were admitted."""

    requests: Sequence[Request]
    receive: Callable[[Delta], None]
    admitted: list[RequestId] = field(default_factory=list)


class LocalEngine:
    """A whole pipeline in this process; an `EngineClient` for the HTTP room, and a plain object for everybody else."""

    def __init__(
        self,
        config: Config | Mapping[str, Any] | Path | None = None,
        *,
        progress: Callable[[str], None] = lambda _: None,
        parts: Parts | None = None,
        metrics: EngineMetrics | None = None,
    ) -> None:
        """config is a Config, plain data with the same names, a YAML file, or None for the demo pair.

        parts takes workers that are already loaded; metrics counts instead of what a server has. Raises ConfigError.
        """
        self.config = _as_config(config)
        parts = load_parts(self.config, progress) if parts is None else parts
        self.tokenizer = parts.tokenizer
        self._grammars = Grammars(parts.tokenizer)
        served, depth = self.config.served_name, self.config.engine.depth
        self._metrics = EngineMetrics(served, depth, self.config.observe.slo) if metrics is None else metrics
        self._metrics.configured(self.config, __version__)
        self._ledger = Ledger(aliases=self.config.observe.vllm_aliases)
        self._tracer = tracer_of(self.config.observe.tracing, "coordinator")
        self._receivers: dict[str, Callable[[Delta], None]] = {}
        self._numbers = itertools.count()
        self._closed = False
        mailbox = Mailbox()
        # Workers that take turns share the engine's thread; one that drafts ahead needs the target to run beside it.
        channel = ThreadChannel if _work_at_once(self.config, parts) else LocalChannel
        verifier = channel(parts.verifier, mailbox, "target")
        drafter = None if parts.draft_worker is None else channel(parts.draft_worker, mailbox, "draft")
        self._engine = Engine(
            self.config,
            target=parts.target,
            draft=parts.draft,
            verifier=verifier,
            drafter=drafter,
            guesser=parts.guesser,
            guessers=drafting.guessers_of(self.config.draft),
            tokenizer=parts.tokenizer,
            metrics=self._metrics,
            sink=self._deliver,
            tracer=self._tracer,
        )
        self._channels = [each for each in (verifier, drafter) if each is not None]
        self._mailbox = mailbox
        self._loop = Loop(self._engine, mailbox)
        self._loop.start()
        self.card = ModelCard(
            name=self.config.served_name,
            created=int(time.time()),
            context_length=parts.target.context_length,
            vocab_size=parts.target.vocab_size,
            max_depth=self.config.engine.depth,
            speculator=self.config.draft.speculator,
            rules=parts.target.rules,
            sources=drafting.sources_of(self.config.draft, self.config.engine.depth),
            sampling=parts.sampling,
        )

    def _deliver(self, _owner: str, deltas: tuple[Delta, ...]) -> None:
        for delta in deltas:
            receive = self._receivers.get(delta.request)
            if receive is not None:
                receive(delta)

    # ---- for people -----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        max_tokens: int = 64,
        sampling: Sampling | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = (),
        depth: int | None = None,
        ignore_eos: bool = False,
        structured: Structured | None = None,
    ) -> list[Completion]:
        """Complete all prompts together, in order; a prompt is a text or token ids. Greedy where sampling is left out.

        A text alone, or the ids of one prompt, are a list of one, as over HTTP. Raises a SpecserveError; what it is
        that HTTP answers with a 400 is refused here in the same words.
        """
        max_tokens, seed, depth, ignore_eos = map(_plain, (max_tokens, seed, depth, ignore_eos))
        _check_options(max_tokens, sampling, seed, depth, ignore_eos, structured)
        requests = [
            Request(
                RequestId(f"local-{next(self._numbers)}"),
                tuple(self.tokenizer.encode(prompt, special=True)) if isinstance(prompt, str) else prompt,
                max_tokens,
                Sampling(temperature=0.0) if sampling is None else sampling,
                seed=secrets.randbits(63) if seed is None else seed,
                stop=_stops(stop),
                ignore_eos=ignore_eos,
                depth=depth,
                structured=structured,
            )
            for prompt in _prompts(prompts)
        ]
        return self.complete(requests)

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> Completion:
        """Answer a conversation in the model's own template; messages are those of OpenAI's API.

        Options are those of `generate`. Raises a SpecserveError, as `generate` does.
        """
        strange = sorted(options.keys() - _OPTIONS)
        if strange:
            known = ", ".join(sorted(_OPTIONS))
            raise InvalidField(
                f"chat has no option {strange[0]!r}; there are: {known}. What tokens are drawn by goes into sampling, "
                "as in sampling=Sampling(temperature=0.7)",
                param=strange[0],
            )
        turns = conversation_of(messages, takes_calls=self.tokenizer.takes_calls)
        return self.generate([self.tokenizer.chat_prompt(turns)], **options)[0]

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Run requests together and wait for all of them. Raises the error of the first that failed."""
        inbox: SimpleQueue[Delta] = SimpleQueue()
        found: dict[str, list[Delta]] = {request.id: [] for request in requests}
        ticket = _Ticket(requests, inbox.put)
        try:
            self._submit(ticket).result()
            waiting = len(requests)
            while waiting:
                delta = inbox.get()
                found[delta.request].append(delta)
                waiting -= delta.finish is not None
        finally:
            self._forget(ticket)
        return [self._completion(request, found[request.id]) for request in requests]

    def _completion(self, request: Request, deltas: list[Delta]) -> Completion:
        last = deltas[-1]
        if last.failure is not None or last.stats is None or last.finish is None:
            raise SpecserveError("the request failed" if last.failure is None else last.failure.message)
        if last.finish == "abort":
            raise Unavailable("the engine was closed before the answer ended")
        tokens = tuple(token for delta in deltas for token in delta.tokens)
        logprobs = tuple(score for delta in deltas for score in delta.logprobs)
        prompt_logprobs = tuple(score for delta in deltas for score in delta.prompt_logprobs)
        text = AnswerText(self.tokenizer, request.stop, request.sampling.min_tokens)
        shown = "".join(map(text.push, tokens)) + text.flush()
        return Completion(shown, tokens, last.finish, last.stats, logprobs, prompt_logprobs)

    # ---- for the HTTP room ----------------------------------------------------------------------------------

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        """Admit a request and yield its deltas; closing the iterator early cancels it."""
        inbox: asyncio.Queue[Delta] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def receive(delta: Delta) -> None:
            with suppress(RuntimeError):  # the caller's event loop is closed: nobody listens any more
                loop.call_soon_threadsafe(inbox.put_nowait, delta)

        ticket = _Ticket([request], receive)
        try:
            # A caller that is cancelled while it waits here still reaches `_forget`, which runs after the admission.
            await asyncio.wrap_future(self._submit(ticket))
            while True:
                delta = await inbox.get()
                yield delta
                if delta.finish is not None:
                    return
        finally:
            self._forget(ticket)

    async def health(self) -> Health:
        """What a health check should say."""
        if self._closed:
            return Health("dead", "closed")
        return await asyncio.wrap_future(self._loop.call(self._engine.health))

    async def metrics(self, own: Snapshot) -> str:
        """See `EngineClient.metrics`."""
        self._ledger.take("http", own)
        return await asyncio.to_thread(self.metrics_text)

    async def status(self) -> dict[str, Any]:
        """See `EngineClient.status`."""
        return self._metrics.status()

    async def timeline(self) -> dict[str, Any]:
        """See `EngineClient.timeline`."""
        if self._closed:
            raise Unavailable("this engine is closed; make a new one")
        spans = await asyncio.wrap_future(self._loop.call(lambda: self._engine.activity.spans))
        return chrome_trace(spans, self.config.served_name)

    # ---- the engine's thread --------------------------------------------------------------------------------

    def _submit(self, ticket: _Ticket) -> Future[None]:
        """Admit a ticket's requests on the engine's thread, in one go: each hop would wait for a step."""
        if self._closed:
            raise Unavailable("this engine is closed; make a new one")
        for structured in {request.structured for request in ticket.requests if request.structured is not None}:
            self.check_structured(structured)

        def admit() -> None:
            for request in ticket.requests:
                self._engine.submit(request, _OWNER)
                self._receivers[request.id] = ticket.receive
                ticket.admitted.append(request.id)

        return self._loop.call(admit)

    def _forget(self, ticket: _Ticket) -> None:
        """Stop listening, and cancel what of the ticket still runs."""

        def release() -> None:
            for request_id in ticket.admitted:
                self._receivers.pop(request_id, None)
                self._engine.cancel(request_id)

        if not self._closed:
            self._loop.call(release)

    def check_structured(self, structured: Structured) -> None:
        """Compile a specification, in bounded time. Raises a RequestError that says why it cannot be served."""
        self._grammars.check(structured, max_bytes=self.config.server.max_schema_bytes)

    def metrics_text(self) -> str:
        """The engine's metrics in Prometheus text format."""
        if not self._closed:
            self._loop.call(self._engine.activity.settle).result()
        self._ledger.take(COORDINATOR, self._metrics.snapshot())
        return self._ledger.render()

    def levels(self) -> PoolLevels:
        """How full the pools are, taken between two events."""
        return self._loop.call(self._engine.levels).result()

    def close(self) -> None:
        """Cancel what runs and end the thread. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.call(lambda: self._engine.cancel_owner(_OWNER)).result()
            self._loop.stop()
            for each in self._channels:
                each.close()
            for each in self._channels:
                if isinstance(each, ThreadChannel):
                    each.join(_PATIENCE_S)
            if self._tracer is not None:
                self._tracer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_OPTIONS = frozenset(inspect.signature(LocalEngine.generate).parameters) - {"self", "prompts"}
"""What `generate` takes by name."""


def _prompts(given: object) -> list[str | tuple[int, ...]]:
    """The prompts that these are. Raises InvalidField for what is none."""
    if not isinstance(given, str):
        parts = _listed(given)
        if parts is None:
            raise InvalidField(
                f"prompts: must be a text, token ids, or a list of either, found {shortened(given)}", param="prompt"
            )
        if not parts or not all(map(_is_whole, parts)):
            return [_prompt(part, f"prompts: prompt {number}") for number, part in enumerate(parts)]
    return [_prompt(given, "prompts: the prompt")]


def _prompt(given: object, what: str) -> str | tuple[int, ...]:
    if isinstance(given, str):
        if not given:
            raise InvalidField(f"{what} is empty", param="prompt")
        return given
    ids = _listed(given)
    if ids is None or not all(map(_is_whole, ids)):
        raise InvalidField(
            f"{what} must be a text or a list of token ids, found {shortened(given)}; conversations go to chat()",
            param="prompt",
        )
    return tuple(int(token) for token in ids)


def _stops(given: object) -> tuple[str, ...]:
    """Texts, or whatever else these are; the engine takes no others. Raises InvalidField."""
    stops = [] if given is None else [given] if isinstance(given, str) else _listed(given)
    if stops is None:
        raise InvalidField(f"stop: must be a text or a list of texts, found {shortened(given)}", param="stop")
    return tuple(stops)


def _listed(given: object) -> list[Any] | None:
    """The parts of a list, a tuple, an array and the like; None for what has none, or parts that are no list."""
    if isinstance(given, (bytes, bytearray, Mapping)) or not isinstance(given, Iterable):
        return None
    return list(given)


def _is_whole(value: object) -> TypeGuard[Integral]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_options(
    max_tokens: object, sampling: object, seed: object, depth: object, ignore_eos: object, structured: object
) -> None:
    """Raise InvalidField for what no body could ask for, by the schema of bodies, so that both doors refuse alike."""
    if max_tokens is None:  # in a body that is the deployment's default; here it has one of its own
        raise InvalidField("max_tokens: must be a whole number, found None; leave it out for 64", param="max_tokens")
    body = {"max_tokens": max_tokens, "seed": seed, "ignore_eos": ignore_eos, "speculation": {"depth": depth}}
    try:
        Generation.model_validate(body)
    except ValidationError as error:
        wrong = field_error(error)
        found = shortened(error.errors()[0]["input"])
        raise InvalidField(f"{wrong.message}, found {found}", param=wrong.param) from None
    for name, value, kind, example in (
        ("sampling", sampling, Sampling, "Sampling(temperature=0.7)"),
        ("structured", structured, Structured, 'Structured("regex", "[0-9]+")'),
    ):
        if value is not None and not isinstance(value, kind):
            raise InvalidField(
                f"{name}: must be a {kind.__name__}, as in {name}={example}, found {shortened(value)}", param=name
            )


def _plain(value: Any) -> Any:
    """Numbers and truth values of numpy and the like as Python's own, which are all that a schema knows."""
    return value.item() if isinstance(value, np.generic) else value


def _work_at_once(config: Config, parts: Parts) -> bool:
    return parts.draft is not None and not takes_turns(config.engine, parts.target, parts.draft)


def _as_config(config: Config | Mapping[str, Any] | Path | None) -> Config:
    if config is None:
        return Config()
    if isinstance(config, Config):
        return config
    if isinstance(config, Path):
        return configs.load(config)
    return configs.parse(dict(config))
