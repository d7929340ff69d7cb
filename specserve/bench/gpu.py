"""`specserve bench gpu`: on one device, without Ray: is it right, what does each step cost, and what comes out.

Random weights in the shapes of a published pair, so nothing is downloaded; acceptance is made up by the rule
`synthetic`. Steps are timed against the device's own copy bandwidth: a step of few rows has to read every weight once,
and cannot take less time than that (Williams et al., "Roofline", 2009). Each is timed eagerly and then as it is served,
recorded, where it can be; the target's once more with int8 and with fp8 weights. Draft and target share the device,
each on a stream of its own. With `--shape tiny` the same runs on a CPU in seconds, and says nothing about speed.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import numpy as np
import torch

from specserve.bench import gpu_rounding
from specserve.bench.gpu_checks import BLOCK_TOKENS, checks, row
from specserve.bench.report import Row
from specserve.config import Config, EngineConfig, parse
from specserve.drafting.small_model import SmallModel
from specserve.drafting.worker import DraftWorker
from specserve.drafting.workspace import SparseDists, Workspace
from specserve.errors import ConfigError
from specserve.local import LocalEngine, Parts
from specserve.models import _rounded_layers, emulated, loading
from specserve.models._rounded_layers import Quantization
from specserve.models._step_shapes import StepShape, by_cost, planned
from specserve.models._stretches import Stretch, ragged
from specserve.models.paged_transformers import PagedTransformers
from specserve.text import Tokenizer
from specserve.transport import Worker
from specserve.transport.messages import Message
from specserve.types import Request, RequestId, Role, Sampling, WorkerInfo
from specserve.verification.verifier import Verifier

Progress = Callable[[str], None]

_SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
_LLAMA = {"vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8}

SHAPES: dict[str, dict[Role, dict[str, int]]] = {
    "8b": {
        "target": _LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        "draft": _LLAMA | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    },
    "tiny": {
        "target": _SMALL | {"num_hidden_layers": 3, "num_key_value_heads": 2},
        "draft": _SMALL | {"num_hidden_layers": 1, "num_key_value_heads": 2},
    },
}
"""Of each pair as transformers' LlamaConfig names them; 8b are Llama 3.1 8B and Llama 3.2 1B."""

_ACCEPTANCE = (0.8, 0.65, 0.55, 0.45)


@dataclass(frozen=True, slots=True)
class Options:
    """What to run; every step is timed `repeats` times, answers have `max_tokens`, caches hold `context` tokens."""

    shape: str = "8b"
    device: str = "auto"
    dtype: str = "bfloat16"
    rows: tuple[int, ...] = (1, 8, 32)
    depths: tuple[int, ...] = (1, 4)
    context: int = 512
    repeats: int = 10
    max_tokens: int = 48

    def check(self) -> None:
        """Raise ConfigError for values that cannot be run."""
        if self.shape not in SHAPES:
            raise ConfigError(f"no shape called {self.shape!r}; there are: {', '.join(SHAPES)}")
        if min(*self.rows, *self.depths, self.context, self.repeats) < 1 or self.max_tokens < 2:
            raise ConfigError("--rows, --depth, --context and --repeats take numbers from 1, --max-tokens from 2")


@dataclass(frozen=True, slots=True)
class Report:
    """Tables by what they show: facts that must hold, times of steps, and tokens of the whole pipeline."""

    checks: list[Row]
    steps: list[Row]
    pipeline: list[Row]


def measure(options: Options, progress: Progress) -> Report:
    """Check, then measure. Raises ConfigError."""
    options.check()
    device = loading.device_of(parse({"target": {"device": options.device}}).target)
    if device.type == "cpu" and options.device == "auto" and options.shape != "tiny":
        raise ConfigError(
            f"no GPU is here, and steps in the shape {options.shape} take a CPU hours; use --shape tiny or --device cpu"
        )
    progress(f"checks on {device}")
    facts = list(checks(device, lambda where: _Model.random(SHAPES["tiny"]["target"], torch.float32, where).backend))
    facts += gpu_rounding.checks(device, tiny_rounded)
    progress(f"random weights in the shape {options.shape}")
    dtype = getattr(torch, options.dtype)
    models = {role: _Model.random(shape, dtype, device) for role, shape in SHAPES[options.shape].items()}
    for role, model in models.items():
        model.backend.plan_steps(_recorded(role, options))
        model.backend.allocate(_blocks(options), BLOCK_TOKENS)
        progress(f"the {role} attends over pages by {model.backend.attention.name}")
    copied = copy_gb_per_s(device, 1 << (30 if device.type == "cuda" else 24), options.repeats)
    steps = [_step("copy", 0, 0, None, copied, None), *_steps(models, options, copied, progress, "")]
    for role, model in models.items():
        facts += _record(role, model, progress)
    steps += _steps(models, options, copied, progress, ", recorded")
    pipeline = [each for mode in _MODES for each in _pipeline(models, mode, options, progress)]
    models.clear()  # a rounded target has the device to itself, as a card that holds the pair needs it
    for quantization in gpu_rounding.QUANTIZATIONS:
        _let_go(device)
        found, timed = _rounded(quantization, options, device, copied, progress)
        facts += found
        steps += timed
    return Report(facts, steps, pipeline)


def tiny_rounded(device: torch.device, dtype: torch.dtype, quantization: Quantization) -> PagedTransformers:
    """The small target with rounded weights, the same on every device."""
    return _Model.random(SHAPES["tiny"]["target"], dtype, device, quantization).backend


@dataclass(frozen=True, slots=True)
class _Model:
    """A backend, and the bytes that each of its steps reads at least: all weights but the table of token embeddings."""

    backend: PagedTransformers
    weight_bytes: int

    @staticmethod
    def random(
        shape: dict[str, int], dtype: torch.dtype, device: torch.device, quantization: Quantization | None = None
    ) -> _Model:
        """Random weights, rounded where a quantization is given; those of small models are the same on every device."""
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(**shape, max_position_embeddings=8192, tie_word_embeddings=False, initializer_range=0.05)
        torch.manual_seed(0)
        small = shape["hidden_size"] < 1024  # large ones are made where they stay: nobody compares their weights
        with torch.device("cpu" if small else device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if quantization is not None:
            _rounded_layers.round_weights(model, quantization, device)
        held = [*model.parameters(), *model.buffers()]
        size = sum(each.nbytes for each in held) - model.get_input_embeddings().weight.nbytes
        return _Model(PagedTransformers(model.eval().requires_grad_(False).to(device), None), size)


def _blocks(options: Options) -> int:
    each = -(-(options.context + max(options.depths) + options.max_tokens + 1) // BLOCK_TOKENS)
    return max(options.rows) * (each + 8 * (max(options.depths) + 1))


# ---- steps --------------------------------------------------------------------------------------------------


def _recorded(role: Role, options: Options) -> tuple[StepShape, ...]:
    """The steps that an engine would record for these rows and depths, up to the context that is measured."""
    reached = options.context + max(options.depths) + options.max_tokens + 1
    keys = 256 << ((reached - 1) // 256).bit_length()
    rows = max(options.rows)
    engines = [EngineConfig(depth=each, max_requests=rows, max_batch_tokens=512 + 8 * rows) for each in options.depths]
    return by_cost({shape for engine in engines for shape in planned(role, engine, keys)})


def _record(role: Role, model: _Model, progress: Progress, how: str = "") -> Iterator[Row]:
    """Record a model's steps: whether that works and, on a GPU, whether they take no more memory than was planned.

    A model whose steps cannot be recorded goes on without. how stands behind its role.
    """
    backend, steps = model.backend, model.backend.planned_steps
    planned_size, free = backend.step_bytes(BLOCK_TOKENS), _free(backend.device)
    began, done, wrong = time.perf_counter(), 0, ""
    try:
        for done, _ in enumerate(backend.record_steps(), 1):
            if done % 16 == 0 or done == steps:
                progress(f"recording the {role}'s steps, {done} of {steps}")
    except RuntimeError as error:
        wrong = f": {error}"
    yield row(f"steps of the {role}{how} that were recorded, of {steps}{wrong}", done, done == steps)
    yield row(f"ms to record each step of the {role}{how}", 1000 * (time.perf_counter() - began) / steps, not wrong)
    if backend.device.type == "cuda":
        taken = free - _free(backend.device)
        yield row(
            f"memory of the {role}'s recorded steps{how}, of what is planned",
            taken / planned_size,
            taken <= planned_size,
        )


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _steps(models: dict[Role, _Model], options: Options, copied: float, progress: Progress, how: str) -> Iterator[Row]:
    """A draft step, plain decoding, and verifications, over rows and depths.

    copied: gigabytes that a copy moves per second. how stands behind each step's name.
    """
    device = models["target"].backend.device
    cases: list[tuple[str, Role, int]] = [("draft step", "draft", 1), ("plain decode", "target", 1)]
    cases += [(f"verify depth {depth}", "target", depth + 1) for depth in options.depths]
    cases = [each for each in cases if each[1] in models]
    for name, role, positions in cases:
        for rows in options.rows:
            progress(f"{name}{how}, {rows} rows")
            seconds = _timed(
                partial(_forward, models[role].backend, rows, positions, options.context), device, options.repeats
            )
            read = models[role].weight_bytes / seconds / 1e9
            yield _step(name + how, rows, rows * positions, 1000 * seconds, read, 2 * read / copied)


def _rounded(
    quantization: Quantization, options: Options, device: torch.device, copied: float, progress: Progress
) -> tuple[list[Row], list[Row]]:
    """Facts and recorded steps of a target with rounded weights, at the largest depth; that it cannot run is a fact."""
    progress(f"random weights, rounded to {quantization}")
    name = f", recorded, {quantization} weights"
    most = replace(options, depths=(max(options.depths),))
    try:
        model = _Model.random(SHAPES[options.shape]["target"], getattr(torch, options.dtype), device, quantization)
        ends = options.context + 1
        wanted = [each for each in _recorded("target", most) if each.rows in options.rows and each.keys >= ends]
        model.backend.plan_steps(wanted)
        model.backend.allocate(_blocks(options), BLOCK_TOKENS)
        facts = list(_record("target", model, progress, name))
        steps = list(_steps({"target": model}, most, copied, progress, name))
    except RuntimeError as error:
        return [row(f"steps of the target{name}: {error}", 0, False)], []
    return facts, steps


def _let_go(device: torch.device) -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _step(case: str, rows: int, positions: int, ms: float | None, gb_per_s: float, share: float | None) -> Row:
    """gb_per_s: weights read once per step, or read and written by the copy; share: of what half the copy could read.

    A copy reads as much as it writes, so half of its traffic is what reading alone is compared with at least.
    """
    figures = {"ms": ms, "gb_per_s": gb_per_s, "of_reading_in_a_copy": share}
    return {"case": case, "rows": rows, "positions": positions, **figures}


def _forward(model: PagedTransformers, rows: int, positions: int, context: int) -> None:
    each = -(-(context + positions) // BLOCK_TOKENS)
    tables = np.arange(rows * each, dtype=np.int32).reshape(rows, each)
    tokens = np.full(positions, 7)
    model.forward(ragged([Stretch(context, tokens, table, positions) for table in tables])).argmax(-1)


def copy_gb_per_s(device: torch.device, size: int, repeats: int) -> float:
    """Gigabytes read and written per second when so many bytes are copied within the device."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _timed(lambda: target.copy_(source), device, repeats) / 1e9


def _timed(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds until the device is done, after two runs that do not count."""
    times = []
    for _ in range(repeats + 2):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - began)
    return median(times[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- the whole pipeline -------------------------------------------------------------------------------------

_MODES = ("plain", "serial", "ahead")


class OnStream:
    """A worker whose work goes to a stream of its own, so that two of them can share a device at once."""

    def __init__(self, worker: Worker, device: torch.device) -> None:
        self._worker = worker
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def handle(self, message: Message) -> Iterable[Message]:
        """See `transport.Worker`."""
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            yield from self._worker.handle(message)


def _pipeline(models: dict[Role, _Model], mode: str, options: Options, progress: Progress) -> Iterator[Row]:
    """Tokens per second of greedy answers of one length, for each number of requests at once."""
    depth = 0 if mode == "plain" else min(max(options.depths), len(_ACCEPTANCE))
    engine = {
        "depth": depth,
        "outcomes": 1 if mode == "ahead" else 0,
        "rule": "synthetic",
        "synthetic_acceptance": _ACCEPTANCE,
        "max_requests": max(options.rows),
        "max_batch_tokens": max(512, 8 * max(options.rows)),
        "prefix_cache": False,
    }
    config = parse({"engine": engine, "model_name": f"random-{options.shape}"})
    with LocalEngine(config, parts=_parts(config, models, _blocks(options))) as running:
        for rows in options.rows:
            progress(f"pipeline, {mode}, {rows} requests")
            running.complete(_requests(f"first-{rows}", 1, options))
            began = time.perf_counter()
            done = running.complete(_requests(f"timed-{rows}", rows, options))
            seconds = time.perf_counter() - began
            tokens, rounds = (
                sum(getattr(each.stats, name) for each in done) for name in ("generated_tokens", "rounds")
            )
            yield {
                "mode": mode,
                "requests": rows,
                "depth": depth,
                "tokens_per_s": tokens / seconds,
                "tokens_per_round": tokens / rounds,
            }


def _requests(name: str, count: int, options: Options) -> Sequence[Request]:
    """Short prompts: what is measured is decoding."""
    prompt = tuple(range(3, 11))
    return [
        Request(RequestId(f"{name}-{at}"), (*prompt, 11 + at), options.max_tokens, Sampling(), seed=at, ignore_eos=True)
        for at in range(count)
    ]


def _parts(config: Config, models: dict[Role, _Model], blocks: int) -> Parts:
    """Workers on these models, which keep their pages from one engine to the next; a tokenizer that nobody reads."""
    target, draft = models["target"].backend, models["draft"].backend
    engine, vocab_size = config.engine, target.vocab_size
    verifier = Verifier(target, vocab_size=vocab_size, engine=engine)
    slots = SparseDists(engine.slot_count, min(config.draft.top_k, vocab_size), draft.device)
    workspace = Workspace(engine.slot_count, slots, draft.device, ranks=engine.ranks)
    worker = DraftWorker(SmallModel(draft, vocab_size), workspace, vocab_size=vocab_size, block_tokens=BLOCK_TOKENS)
    drafts = engine.depth > 0
    return Parts(
        OnStream(verifier, target.device),
        replace(_info("target", models["target"], blocks), rules=verifier.rules),
        OnStream(worker, draft.device) if drafts else None,
        _info("draft", models["draft"], blocks) if drafts else None,
        None,
        Tokenizer.load(emulated.folder("target")),
    )


def _info(role: Role, model: _Model, blocks: int) -> WorkerInfo:
    backend, size = model.backend, model.weight_bytes
    context = min(backend.context_length, blocks * BLOCK_TOKENS)
    return WorkerInfo(
        role, str(backend.device), blocks, BLOCK_TOKENS, context, backend.vocab_size, size, 0.0, place=backend.place
    )
