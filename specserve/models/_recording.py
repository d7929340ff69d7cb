"""Whether a worker records its steps, which ones, and doing so at its start, with a bar for who watches."""

from __future__ import annotations

import logging
from time import perf_counter

import torch
from rich.console import Console
from rich.progress import track

from specserve.config import EngineConfig, ModelConfig
from specserve.errors import ConfigError
from specserve.models import Backend, RecordsSteps
from specserve.models._ranks import RankGroup
from specserve.models._step_shapes import Role, planned

log = logging.getLogger("specserve")


def plan(
    backend: Backend, config: ModelConfig, role: Role, engine: EngineConfig, ranks: RankGroup | None
) -> RecordsSteps | None:
    """Tell a backend which steps to record, where it is to record any; None where it is not.

    Raises ConfigError where `graphs: on` asks for what cannot be.
    """
    if not wanted(config, backend.device):
        return None
    hindrance = _hindrance(backend, role, engine, ranks)
    if hindrance is None and isinstance(backend, RecordsSteps):
        backend.plan_steps(planned(role, engine, backend.context_length))
        return backend
    if config.graphs == "on":
        raise ConfigError(f"graphs: on records the {role}'s steps, but {hindrance}; set it to auto or off")
    log.info("the %s's steps are launched one by one: %s", role, hindrance)
    return None


def wanted(config: ModelConfig, device: torch.device) -> bool:
    """Whether steps are to be recorded on this device, where the model lets it."""
    return config.graphs == "on" or (config.graphs == "auto" and device.type == "cuda")


def _hindrance(backend: Backend, role: Role, engine: EngineConfig, ranks: RankGroup | None) -> str | None:
    if ranks is not None:
        return "several processes hold the model (tensor_parallel), whose exchange is not recorded"
    if not isinstance(backend, RecordsSteps):
        return f"those of {type(backend).__name__} cannot be recorded"
    if role == "target" and engine.batch_invariant:
        return "engine.batch_invariant needs results that do not depend on a batch's size, which padding changes"
    return None


def record(backend: RecordsSteps, role: Role, config: ModelConfig) -> None:
    """Record what was planned. Where that fails steps run eagerly, or with `graphs: on` it raises ConfigError."""
    began, steps = perf_counter(), backend.planned_steps
    console = Console(stderr=True)
    try:
        for _ in track(backend.record_steps(), f"recording the {role}'s steps", steps, console=console, transient=True):
            pass
    except RuntimeError as error:
        if config.graphs == "on":
            raise ConfigError(f"the {role}'s steps cannot be recorded: {error}; set graphs to auto or off") from None
        log.warning("the %s's steps cannot be recorded and are launched one by one: %s", role, error)
        return
    log.info("recorded %d steps of the %s in %.1f s", steps, role, perf_counter() - began)
