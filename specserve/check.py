"""`specserve check`: what will run where, and what cannot, before anything is started. No weights are loaded."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from specserve import drafting, folders, model_sampling, tracing
from specserve.config import Config, ModelConfig, changed_settings
from specserve.coordinator import limits
from specserve.errors import UNREADABLE, SpecserveError, described
from specserve.models import _memory_plan
from specserve.models._memory_plan import told

if TYPE_CHECKING:
    import torch

    from specserve.models import Backend
    from specserve.models._pages import LayerLayout
    from specserve.models._step_shapes import StepShape

Role = Literal["target", "draft"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. A problem is something that keeps the deployment from starting."""

    topic: str
    text: str
    problem: bool = False

    def __str__(self) -> str:
        return f"{'✗' if self.problem else '✓'} {self.topic:<12} {self.text}"


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """What one worker will hold on its device, or on each of them, in bytes; kv is None where config.json is silent."""

    role: Role
    folder: Path
    device: torch.device
    weights: int
    kv: int | None


@dataclass(frozen=True, slots=True)
class _Kv:
    """What a worker keeps per position, as far as it can be told before it is loaded."""

    blocks: int
    context_length: int


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one topic found out and later ones go on from."""

    folders: dict[Role, Path] = field(default_factory=dict)
    needs: list[ModelNeeds] = field(default_factory=list)
    kv: dict[Role, _Kv] = field(default_factory=dict)


def report(config: Config, progress: Callable[[str], None] = lambda _: None) -> Iterator[Finding]:
    """Look at this machine and at the configuration. Builds or converts the demo models if they are not cached.

    What is found is told at once. A problem is told once, by the first topic that meets it. progress gets lines for
    people who wait.
    """
    told_of: set[str] = set()
    for finding in _findings(config, progress):
        if finding.text not in told_of:
            yield finding
        if finding.problem:
            told_of.add(finding.text)


def _findings(config: Config, progress: Callable[[str], None]) -> Iterator[Finding]:
    seen = _Seen()
    yield _settings(config)
    yield from _environment()
    topics: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("speculator", lambda: _speculator(config)),
        ("rule", lambda: _rule(config)),
        ("target", lambda: _model("target", config.target, config, seen, progress)),
        ("sampling", lambda: _sampling(config, seen)),
        ("draft", lambda: _draft(config, seen, progress)),
        ("vocabulary", lambda: _vocabulary(seen.needs, progress)),
        ("memory", lambda: _memory(config, seen.needs)),
        ("limits", lambda: _limits(config)),
        ("placement", lambda: _placement(config)),
        ("port", lambda: _port(config)),
        ("tracing", lambda: _tracing(config)),
    ]
    for topic, look in topics:
        yield from _guarded(topic, look)


def _guarded(topic: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from look()
    except SpecserveError as error:
        yield Finding(topic, error.message, problem=True)
    except UNREADABLE as error:
        yield Finding(topic, described(error), problem=True)


def _settings(config: Config) -> Finding:
    """What is looked at: the flags of a server that are not given here are not known here."""
    changed = changed_settings(config)
    if changed:
        return Finding("settings", f"{', '.join(changed)}; all others by default")
    return Finding(
        "settings",
        "all by default, as `specserve serve` without flags has them; give check the flags of another server "
        "(`make check-serve` gives it those of `make serve`)",
    )


def _environment() -> Iterator[Finding]:
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found = f"{os.cpu_count()} CPU cores, {told(_machine_memory())} memory, " + (", ".join(gpus) if gpus else "no GPU")
    yield Finding("machine", found)
    names = []
    for name in ("torch", "transformers", "ray"):
        try:
            names.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            yield Finding("packages", f"{name} is not installed; run `pip install -c constraints.txt .`", problem=True)
    yield Finding("packages", f"Python {platform.python_version()}, " + ", ".join(names))


def _speculator(config: Config) -> Iterator[Finding]:
    has_worker = drafting.has_worker(config.draft)  # an unknown name is refused at depth 0 too
    name = config.draft.speculator
    if config.engine.depth == 0:
        yield Finding("speculator", "engine.depth is 0: plain decoding")
    elif name == drafting.NO_SPECULATOR:
        yield Finding("speculator", f"draft.speculator is {name}: plain decoding")
    else:
        beside = "verifier" if drafting.lives_beside(config.draft) else "coordinator"
        where = "in a draft worker" if has_worker else f"beside the {beside}"
        yield Finding("speculator", f"{config.draft.told_names} {where}, {config.engine.told_depth}")


def _rule(config: Config) -> Iterator[Finding]:
    from specserve.verification import all_rules, judges_of

    judges_of(config.engine)
    name = config.engine.rule
    law = "lossless" if all_rules()[name].LOSSLESS else "lossy: answers do not follow the target's distribution"
    yield Finding("rule", f"{name} ({law})")


def _sampling(config: Config, seen: _Seen) -> Iterator[Finding]:
    """What a request gets that says nothing of it, where the model has a wish."""
    told_of = model_sampling.described(model_sampling.read(seen.folders["target"])) if "target" in seen.folders else ""
    if not told_of:
        return
    if config.server.sampling_defaults == "model":
        yield Finding("sampling", f"{told_of} where a request says nothing (the model's {model_sampling.FILE})")
    else:
        yield Finding("sampling", f"temperature 1 where a request says nothing; the model's makers have {told_of}")


def _tracing(config: Config) -> Iterator[Finding]:
    settings = config.observe.tracing
    if settings.exporter == "none":
        return
    tracing.check(settings)
    to = {"otlp": settings.endpoint, "file": settings.path}.get(settings.exporter, "the standard error stream")
    yield Finding("tracing", f"{settings.share:.0%} of requests, to {to}")


def _model(
    role: Role, model: ModelConfig, config: Config, seen: _Seen, progress: Callable[[str], None]
) -> Iterator[Finding]:
    progress(f"{role}: looking at {model.source}")
    from specserve.models import _quantization, _servable, loading

    folder = seen.folders[role] = loading.prepare(model, lambda line: progress(f"{role}: {line}"), role=role)
    backend = _servable.backend_for(role, model, folder)
    device = loading.device_of(model)
    model = _quantization.decided(model, role, folder, backend)
    if backend == loading.EMULATED:
        yield _emulated(role, model, config, seen)
        return
    on_disk = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    threads = model.threads or (os.cpu_count() or 1)
    where = f"{device}" + (f" with {threads} threads" if device.type == "cpu" else "")
    held = f"{model.dtype}{_quantized(folder, model, device)}"
    yield Finding(role, f"{model.source}: {on_disk / 2**20:.0f} MiB on disk, as {held} on {where}")
    described = _described(folder, model)
    kv = None
    if described is not None:
        block_tokens = config.engine.block_tokens
        room = _kv_room(role, folder, model, config, device, described)
        rows = config.engine.max_requests
        blocks = loading.derive_blocks(model, cast("Backend", described), block_tokens, rows, room)
        seen.kv[role] = _Kv(blocks, described.context_length)
        kv = blocks * described.bytes_per_block(block_tokens)
        full = blocks * block_tokens // described.context_length
        each = f" for each of {model.tensor_parallel} ranks" if model.tensor_parallel > 1 else ""
        text = (
            f"{blocks} KV blocks, {told(kv)}{each}: {full} sequences of the full {described.context_length} positions"
        )
        yield Finding(role, text)
    # Ranks on a CPU share this machine's memory; on GPUs each has its own.
    ranks, here = model.tensor_parallel, model.tensor_parallel if device.type == "cpu" else 1
    weights = _memory_plan.held_bytes(folder, model, device) * here // ranks
    seen.needs.append(ModelNeeds(role, folder, device, weights, None if kv is None else kv * here))


def _quantized(folder: Path, model: ModelConfig, device: torch.device) -> str:
    """What becomes of the weights, where something does."""
    from specserve.models import _rounded_layers

    if model.quantization == "none":
        return ""
    held = told(_memory_plan.held_bytes(folder, model, device))
    if _rounded_layers.reads_bytes(model, device):
        return f" with {model.quantization} weights ({held})"
    return f" with weights rounded to {model.quantization} but written out, so no faster ({held})"


def _kv_room(
    role: Role, folder: Path, model: ModelConfig, config: Config, device: torch.device, described: _Described
) -> int:
    """Bytes that KV gets where its size is not configured, as the worker will find them once its weights are there."""
    from specserve.models import loading

    vocab_size = int(loading.read_model_config(folder).get("vocab_size", 0))
    weights = _memory_plan.held_bytes(folder, model, device) // model.tensor_parallel
    slots = _memory_plan.slot_bytes(config.draft, config.engine, vocab_size) if role == "draft" else 0
    steps = _step_bytes(role, model, config, device, described)
    plan = _memory_plan.plan(config.engine, vocab_size, device, weights, slots, steps)
    return replace(plan, free=plan.free - weights).kv_room(role, device)


def _step_bytes(role: Role, model: ModelConfig, config: Config, device: torch.device, described: _Described) -> int:
    """Bytes of the steps that the worker will record."""
    from specserve.models import _recording
    from specserve.models._step_shapes import planned

    invariant = role == "target" and config.engine.batch_invariant
    if not _recording.wanted(model, device) or model.tensor_parallel > 1 or invariant:
        return 0
    return described.step_bytes(planned(role, config.engine, described.context_length), config.engine.block_tokens)


def _emulated(role: Role, model: ModelConfig, config: Config, seen: _Seen) -> Finding:
    """What is emulated; it needs no memory to speak of, whatever its device would."""
    from specserve.models import _device_profile, emulated, loading

    about = _device_profile.load(model.emulated.profile).device(role).about
    backend = emulated.build(model, seen.folders[role])
    blocks = loading.derive_blocks(model, backend, config.engine.block_tokens, config.engine.max_requests, 0)
    seen.kv[role] = _Kv(blocks, backend.context_length)
    return Finding(role, f"emulated: no model, but the time that {about} takes; {blocks} KV blocks")


@dataclass(frozen=True, slots=True)
class _Described:
    """What config.json tells of a backend: as much as block arithmetic asks of one."""

    context_length: int
    layout: LayerLayout
    layers: int
    ranks: int
    heads: int
    width: int
    vocab_size: int

    def bytes_per_block(self, block_tokens: int) -> int:
        """Bytes of KV of one block, all layers together."""
        return block_tokens * self.layers * self.layout.bytes_per_position // self.ranks

    def step_bytes(self, shapes: Sequence[StepShape], block_tokens: int) -> int:
        """Bytes of these recorded steps."""
        from specserve.models._step_graphs import graph_bytes

        return graph_bytes(
            shapes,
            [self.layout] * self.layers,
            block_tokens,
            vocab_size=self.vocab_size,
            heads=self.heads,
            width=self.width,
            itemsize=self.layout.dtype.itemsize,
        )


# With any of these, layers differ in what they keep per position, or keep something other than keys and values.
_IRREGULAR = ("kv_lora_rank", "num_kv_shared_layers", "global_head_dim", "layers_block_type", "attn_type_list")


def _described(folder: Path, model: ModelConfig) -> _Described | None:
    """The KV arithmetic of a model whose layers all keep keys and values alike; None where it takes the model itself.

    Raises ConfigError for a model that names no context length.
    """
    import torch

    from specserve.models import _rope, loading
    from specserve.models._pages import LayerLayout

    if loading.backend_of(folder, model) != loading.PAGED:
        return None
    found = loading.load_model_config(folder, model)
    context = _rope.served_context(found, model.context_length)
    layers, heads = getattr(found, "num_hidden_layers", None), getattr(found, "num_attention_heads", None)
    if not layers or not heads or any(getattr(found, name, None) for name in _IRREGULAR):
        return None
    kv_heads = getattr(found, "num_key_value_heads", None) or heads
    head_dim = getattr(found, "head_dim", None) or found.hidden_size // heads
    layout = LayerLayout(kv_heads, head_dim, head_dim, getattr(torch, model.dtype), None)
    width = max(found.hidden_size, getattr(found, "intermediate_size", None) or 0)
    return _Described(context, layout, layers, model.tensor_parallel, heads, width, found.vocab_size)


def _draft(config: Config, seen: _Seen, progress: Callable[[str], None]) -> Iterator[Finding]:
    if config.engine.depth > 0 and drafting.has_worker(config.draft):
        pipelines = config.cluster.pipelines_per_draft
        together = config.engine.of_several(pipelines)
        yield from _model("draft", config.draft_model, config.model_copy(update={"engine": together}), seen, progress)
        drafting.check_model(config.draft, is_head=_is_head(config.draft_model, seen.folders["draft"]))
        if seen.kv.keys() >= {"draft", "target"}:
            draft, context = seen.kv["draft"], seen.kv["target"].context_length
            share = draft.blocks // pipelines
            positions = min(draft.context_length, context)
            limits.check_room("draft", share, config.engine.block_tokens, positions, pipelines)
    if config.engine.depth > 0 and drafting.lives_beside(config.draft) and "target" in seen.folders:
        description = folders.load("drafting", config.draft.speculator).describe(config, seen.folders["target"])
        yield Finding("draft", description)


def _is_head(model: ModelConfig, folder: Path) -> bool:
    from specserve.models import loading

    return loading.backend_of(folder, model) == loading.HEAD


def _vocabulary(needs: list[ModelNeeds], progress: Callable[[str], None]) -> Iterator[Finding]:
    """Whether the tokenizers agree; nothing when one of the models could not be looked at."""
    from specserve.models import loading, vocabulary

    if len(needs) < 2:
        return
    progress("vocabulary: comparing tokenizers")
    target, draft = (need.folder for need in needs)
    widths = [loading.logits_width(folder) for folder in (target, draft)]
    shared = vocabulary.check(target, draft, *widths)
    yield Finding("vocabulary", f"{shared} tokens in common (widths {widths[0]} and {widths[1]})")


def _memory(config: Config, needs: list[ModelNeeds]) -> Iterator[Finding]:
    """What the workers of all pipelines want together on this machine's CPUs, and each worker on a GPU by itself."""
    import torch

    pipelines, each = config.cluster.pipelines, config.cluster.pipelines_per_draft
    times = {"target": pipelines, "draft": pipelines if each == 1 else config.cluster.draft_workers}
    shared = [(need, times[need.role]) for need in needs if need.device.type == "cpu"]
    if shared:
        yield _room(shared, _machine_memory(), "this machine has")
    for need in needs:
        if need.device.type == "cuda":
            total = torch.cuda.get_device_properties(need.device).total_memory
            yield _room([(need, 1)], total, f"{need.device} has")


def _room(needs: list[tuple[ModelNeeds, int]], have: int, who: str) -> Finding:
    """needs: workers, and how many of each kind there are."""
    wanted = sum(times * (need.weights + (need.kv or 0)) for need, times in needs)
    parts = [
        f"{f'{times} × ' if times > 1 else ''}{need.role} {told(need.weights)} weights" + _and_kv(need.kv)
        for need, times in needs
    ]
    text = f"{told(wanted)} wanted ({'; '.join(parts)}), {who} {told(have)}"
    if wanted > have:
        return Finding("memory", f"{text}; lower kv_memory_gib, or use a smaller dtype or model", problem=True)
    return Finding("memory", text)


def _and_kv(kv: int | None) -> str:
    return " and KV that only the loaded model can tell" if kv is None else f" and {told(kv)} KV"


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limits(config: Config) -> Iterator[Finding]:
    engine = config.engine
    drafts = engine.depth > 0 and config.draft.speculator != drafting.NO_SPECULATOR
    slots = f"{engine.slot_count} draft slots" if drafts else "no draft slots"
    yield Finding(
        "limits",
        f"{engine.max_requests} requests at once, {engine.queue_limit} waiting, {engine.max_batch_tokens} positions "
        f"per round, {slots}",
    )


def _placement(config: Config) -> Iterator[Finding]:
    from specserve.cluster.placement import shares_draft
    from specserve.cluster.preflight import placed_here

    placed = placed_here(config)
    devices = [f"{role} on {'a GPU' if group.on_gpu(role) else 'CPU'}" for group in placed for role in group.roles]
    yield Finding("placement", f"{config.cluster.placement} on this machine: " + ", ".join(devices))
    if shares_draft(config):
        cluster = config.cluster
        yield Finding(
            "placement",
            f"{cluster.draft_workers} draft worker(s), each for {cluster.pipelines_per_draft} of at most "
            f"{cluster.most_pipelines} pipelines, with an equal part of its KV and slots for each",
        )


def _port(config: Config) -> Iterator[Finding]:
    from specserve.cluster.https import check_certificate
    from specserve.cluster.local_ray import check_port

    host, port = config.server.host, config.server.port
    check_port(host, port)
    check_certificate(config.server)
    warning = "" if host in ("127.0.0.1", "localhost", "::1") else "; reachable from other machines, without a key"
    yield Finding("port", f"{config.server.scheme}://{host}:{port}{warning}")
