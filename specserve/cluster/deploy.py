"""The Serve application: a pipeline and an ingress in front of it."""

from __future__ import annotations

from typing import Any

from ray import serve

from specserve.cluster.ingress import Ingress
from specserve.cluster.pipeline import Pipeline
from specserve.cluster.placement import INGRESS_CPUS
from specserve.config import Config

APP_NAME = "specserve"
PIPELINE = "Pipeline"
INGRESS = "Ingress"


def application(config: Config) -> Any:
    """A `serve.Application` for this configuration: one pipeline, and as many ingresses as asked for.

    The app itself refuses what is over its limits, in OpenAI's words, so Serve lets more through than they allow.
    """
    tree = config.model_dump()
    pipeline = serve.deployment(
        Pipeline,
        name=PIPELINE,
        ray_actor_options={"num_cpus": 0},
        # One call stays open for each request (`Pipeline.hold`); none may make another one wait.
        max_ongoing_requests=1_000_000,
        max_constructor_retry_count=1,
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=10,
        graceful_shutdown_wait_loop_s=0.1,
    ).bind(tree)
    return serve.deployment(
        Ingress,
        name=INGRESS,
        num_replicas=config.cluster.ingress_replicas,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
        max_ongoing_requests=2 * config.server.max_inflight + 1000,
        graceful_shutdown_timeout_s=10,
        graceful_shutdown_wait_loop_s=0.1,
    ).bind(tree, pipeline)
