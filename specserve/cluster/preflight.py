"""What can be told of a configuration at once, in the words of the process that would refuse it a minute later.

Names of files, config.json and headers of weights are read, and nothing is built, converted or started.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from specserve import drafting, folders, tracing
from specserve.cluster.https import check_certificate
from specserve.cluster.local_ray import logical_cpus
from specserve.cluster.placement import Placement, has_draft_worker, plan, plan_shared, shares_draft
from specserve.config import DEMO_HEAD, Config, ModelConfig
from specserve.errors import UNREADABLE, ConfigError, SpecserveError, described
from specserve.models import _servable, loading
from specserve.models.loading import Role
from specserve.verification import judges_of

log = logging.getLogger(__name__)

_SHOWN = 200
"""Characters of a name, at most."""


def check_config(config: Config, *, models_here: bool) -> None:
    """Raise ConfigError for what can be told at once, before anything is started. Builds and converts nothing.

    models_here: a Ray of our own will run the workers on this machine, so models, devices and certificate must be here.
    """
    tracing.check(config.observe.tracing)
    judges_of(config.engine)
    shares_draft(config)
    has_draft_worker(config)
    if models_here:
        check_certificate(config.server)
        _check_models(config)
        placed_here(config)


def placed_here(config: Config) -> tuple[Placement, ...]:
    """Where the processes of a pipeline go on this machine alone. Raises ConfigError where it cannot hold them."""
    cpus = logical_cpus(config.cluster.ingress_replicas, workers=config.worker_processes)
    nodes = [{"CPU": float(cpus), "GPU": float(torch.cuda.device_count())}]
    if shares_draft(config):
        return plan_shared(config, nodes)
    return (plan(config, with_draft=has_draft_worker(config), nodes=nodes),)


def _check_models(config: Config) -> None:
    """What takes no time for all models, before what takes some."""
    models: dict[Role, ModelConfig] = {"target": config.target}
    if has_draft_worker(config):
        models["draft"] = config.draft_model
    for model in models.values():
        with _reading(model):
            loading.check_source(model)
            loading.device_of(model)
    with _reading(config.target):
        _check_beside(config)
    for role, model in models.items():
        with _reading(model):
            _check_model(config, role, model)


def _check_model(config: Config, role: Role, model: ModelConfig) -> None:
    is_head = model.source == DEMO_HEAD
    # Conversions may take long: that is the workers' task.
    if not loading.is_converted(model):
        folder = loading.prepare(model, log.info, role=role)
        is_head = _servable.backend_for(role, model, folder) == loading.HEAD
    if role == "draft":
        drafting.check_model(config.draft, is_head=is_head)


@contextmanager
def _reading(model: ModelConfig) -> Iterator[None]:
    """What files that cannot be read, or hold what nobody expects, make of their reader is an error of the setting."""
    try:
        yield
    except SpecserveError:
        raise
    except UNREADABLE as error:
        shown = model.source if len(model.source) <= _SHOWN else f"{model.source[:_SHOWN]}…"
        raise ConfigError(f"model {shown!r} cannot be read: {described(error)}") from error


def _check_beside(config: Config) -> None:
    """Whether what drafts beside the verifier finds there what it needs."""
    if config.engine.depth == 0 or not drafting.lives_beside(config.draft):
        return
    speculator = folders.load("drafting", config.draft.speculator)
    check_source = getattr(speculator, "check_source", None)
    if check_source is not None:
        check_source(config)
    if not loading.is_converted(config.target):
        speculator.describe(config, loading.prepare(config.target, log.info))
