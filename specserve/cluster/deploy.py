"""The Serve application: pipelines, the ledger, and ingresses in front of them."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from specserve import __version__
from specserve.cluster.by_name import ByName
from specserve.cluster.draft_keeper import DraftKeeper
from specserve.cluster.ingress import Ingress
from specserve.cluster.ledger_keeper import LedgerKeeper
from specserve.cluster.pipeline import ServedPipeline
from specserve.cluster.placement import INGRESS_CPUS, shares_draft
from specserve.cluster.scaling import by_load
from specserve.config import ClusterConfig, Config

APP_NAME = "specserve"
PIPELINE = "Pipeline"
INGRESS = "Ingress"
LEDGER = "Ledger"
DRAFT_KEEPER = "DraftKeeper"

_CALLS = 1_000_000
"""One call of a pipeline stays open for each request (`holds`); none may make another one wait."""

_INGRESS_ANSWERS_S = 10.0
"""An ingress that does not answer Serve for so long, three times, is stuck. Serve's own bounds come to two minutes."""

_LAST_WORDS_S = 10.0
_LOOK_BACK_S = 10.0


def application(config: Config) -> Any:
    """A `serve.Application` for this configuration.

    The app itself refuses what is over its limits, in OpenAI's words, so Serve lets more through than they allow.
    What drains has as long as a request may take: no update cuts a stream. Raises ConfigError where pipelines are to
    share draft workers, and cannot.
    """
    drain_s = config.server.request_timeout_s + _LAST_WORDS_S
    drafts = [_bound(_drafts(config), _of_drafts(config))] if shares_draft(config) else []
    pipelines = _bound(_pipelines(config, drain_s), _of_pipelines(config), *drafts)
    ledger = serve.deployment(LedgerKeeper, name=LEDGER, ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1000)
    ingress = serve.deployment(
        Ingress,
        name=INGRESS,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
        max_ongoing_requests=2 * config.server.max_inflight + 1000,
        health_check_period_s=2,
        health_check_timeout_s=_INGRESS_ANSWERS_S,
        graceful_shutdown_timeout_s=drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        **_ingress_count(config),
    )
    return _bound(ingress, _without_counts(config), pipelines, _bound(ledger, _of_ledger(config), pipelines))


def _bound(deployment: Any, tree: dict[str, Any], *others: Any) -> Any:
    """The deployment with its settings. Only other settings are another version, whose replicas replace the old ones.

    Left to itself, Serve takes every `serve.run` for a new version of everything; it has no public way to be told.
    """
    text = json.dumps([__version__, tree], default=lambda secret: secret.get_secret_value())
    deployment._version = hashlib.sha256(text.encode()).hexdigest()
    return deployment.bind(tree, *others)


_COUNTS = {
    *("pipelines", "max_pipelines", "pipeline_load", "spare_pipelines", "ingress_replicas", "max_ingress_replicas"),
    *("scale_up_after_s", "scale_down_after_s"),
}
_ROUTING = {"routing", "routing_slack"}


def _without_counts(config: Config) -> dict[str, Any]:
    """The settings without those that only Serve needs: where nothing else changes, an update restarts nothing."""
    return config.model_dump(exclude={"cluster": _COUNTS})


def _of_pipelines(config: Config) -> dict[str, Any]:
    """The settings without those of the HTTP side, a change of which restarts no pipeline."""
    return config.model_dump(exclude={"cluster": _COUNTS | _ROUTING, "server": True})


def _of_drafts(config: Config) -> dict[str, Any]:
    """The settings without those that no draft worker looks at."""
    exclude: dict[str, Any] = dict.fromkeys(("server", "observe", "model_name"), True)
    return config.model_dump(exclude=exclude | {"cluster": _COUNTS | _ROUTING})


def _of_ledger(config: Config) -> dict[str, Any]:
    """The settings of the ledger alone: its counters outlive updates of everything else."""
    return config.model_dump(include={"observe", "log_format"})


def _pipelines(config: Config, drain_s: float) -> Any:
    cluster = config.cluster
    return serve.deployment(
        ServedPipeline,
        name=PIPELINE,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_CALLS,
        max_constructor_retry_count=1,
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        max_surge_percent=min(100, math.ceil(100 * cluster.spare_pipelines / cluster.pipelines)),
        request_router_config=RequestRouterConfig(request_router_class=ByName),
        **_pipeline_count(config),
    )


def _drafts(config: Config) -> Any:
    """Draft workers that pipelines share. They do not scale: there is a share for each of the most pipelines."""
    return serve.deployment(
        DraftKeeper,
        name=DRAFT_KEEPER,
        num_replicas=config.cluster.draft_workers,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_CALLS,
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=_LAST_WORDS_S,
        graceful_shutdown_wait_loop_s=0.1,
        request_router_config=RequestRouterConfig(request_router_class=ByName),
    )


def _pipeline_count(config: Config) -> dict[str, Any]:
    cluster = config.cluster
    if cluster.max_pipelines is None:
        return {"num_replicas": cluster.pipelines}
    load = cluster.pipeline_load or config.engine.max_requests
    policy = AutoscalingPolicy(policy_function=by_load)
    return {"autoscaling_config": _scaling(cluster, cluster.pipelines, cluster.max_pipelines, load, policy=policy)}


def _ingress_count(config: Config) -> dict[str, Any]:
    cluster = config.cluster
    if cluster.max_ingress_replicas is None:
        return {"num_replicas": cluster.ingress_replicas}
    load = config.server.max_inflight / 2  # room for what comes while another one starts
    return {"autoscaling_config": _scaling(cluster, cluster.ingress_replicas, cluster.max_ingress_replicas, load)}


def _scaling(cluster: ClusterConfig, least: int, most: int, load: float, **more: Any) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=least,
        max_replicas=most,
        target_ongoing_requests=load,
        look_back_period_s=_LOOK_BACK_S,
        upscale_delay_s=cluster.scale_up_after_s,
        downscale_delay_s=cluster.scale_down_after_s,
        **more,
    )
