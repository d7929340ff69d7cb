"""`specserve check`: what will run where, and what cannot, before anything is started."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from specserve import drafting, folders
from specserve.config import Config, ModelConfig
from specserve.errors import SpecserveError


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. A problem is something that keeps the deployment from starting."""

    topic: str
    text: str
    problem: bool = False

    def __str__(self) -> str:
        return f"{'✗' if self.problem else '✓'} {self.topic:<12} {self.text}"


def report(config: Config) -> list[Finding]:
    """Look at this machine and at the configuration. Builds or converts the demo models if they are not cached."""
    return [
        *_environment(),
        *_guarded("speculator", lambda: _speculator(config)),
        *_guarded("rule", lambda: _rule(config)),
        *_guarded("target", lambda: _model("target", config.target, config)),
        *_guarded("draft", lambda: _draft(config)),
        *_guarded("limits", lambda: _limits(config)),
        *_guarded("placement", lambda: _placement(config)),
        *_guarded("port", lambda: _port(config)),
    ]


def _guarded(topic: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from look()
    except SpecserveError as error:
        yield Finding(topic, error.message, problem=True)


def _environment() -> Iterator[Finding]:
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = f"{os.cpu_count()} CPU cores, {memory:.0f} GiB memory, " + (", ".join(gpus) if gpus else "no GPU")
    yield Finding("machine", found)
    names = []
    for name in ("torch", "transformers", "ray"):
        try:
            names.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            yield Finding("packages", f"{name} is not installed; run `pip install -c constraints.txt .`", problem=True)
    yield Finding("packages", f"Python {platform.python_version()}, " + ", ".join(names))


def _speculator(config: Config) -> Iterator[Finding]:
    if config.engine.depth == 0:
        yield Finding("speculator", "engine.depth is 0: plain decoding")
    elif drafting.has_worker(config.draft):
        yield Finding("speculator", f"{config.draft.speculator} in a draft worker, depth {config.engine.depth}")
    else:
        yield Finding("speculator", f"{config.draft.speculator} beside the coordinator, depth {config.engine.depth}")


def _rule(config: Config) -> Iterator[Finding]:
    folders.load("verification", config.engine.rule)
    yield Finding("rule", config.engine.rule)


def _model(role: str, model: ModelConfig, config: Config) -> Iterator[Finding]:
    from specserve.models import loading

    folder = loading.prepare(model, lambda _: None, role="draft" if role == "draft" else "target")
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 2**20
    device = loading.device_of(model)
    threads = model.threads or (os.cpu_count() or 1)
    where = f"{device}" + (f" with {threads} threads" if device.type == "cpu" else "")
    yield Finding(role, f"{model.source}: {size:.0f} MiB of weights as {model.dtype} on {where}")


def _draft(config: Config) -> Iterator[Finding]:
    if config.engine.depth == 0 or not drafting.has_worker(config.draft):
        return
    from specserve.models import loading, vocabulary

    yield from _model("draft", config.draft.model, config)
    target = loading.prepare(config.target, lambda _: None, role="target")
    draft = loading.prepare(config.draft.model, lambda _: None, role="draft")
    widths = [int(loading.read_model_config(folder)["vocab_size"]) for folder in (target, draft)]
    shared = vocabulary.check(target, draft, *widths)
    yield Finding("vocabulary", f"{shared} tokens in common (widths {widths[0]} and {widths[1]})")


def _limits(config: Config) -> Iterator[Finding]:
    engine = config.engine
    yield Finding(
        "limits",
        f"{engine.max_requests} requests at once, {engine.queue_limit} waiting, {engine.max_batch_tokens} positions "
        f"per round, {engine.slot_count} draft slots",
    )


def _placement(config: Config) -> Iterator[Finding]:
    import torch

    from specserve.cluster.local_ray import logical_cpus
    from specserve.cluster.placement import plan

    with_draft = config.engine.depth > 0 and drafting.has_worker(config.draft)
    node = {"CPU": float(logical_cpus()), "GPU": float(torch.cuda.device_count())}
    placed = plan(config, with_draft=with_draft, nodes=[node])
    devices = [f"{role} on {'a GPU' if placed.on_gpu(role) else 'CPU'}" for role in placed.roles]
    yield Finding("placement", f"{placed.strategy} on this machine: " + ", ".join(devices))


def _port(config: Config) -> Iterator[Finding]:
    from specserve.cluster.local_ray import check_port

    host, port = config.server.host, config.server.port
    check_port(host, port)
    warning = "" if host in ("127.0.0.1", "localhost", "::1") else "; reachable from other machines, without a key"
    yield Finding("port", f"http://{host}:{port}{warning}")
