"""The Serve application builder, for `serve run specserve.app:build` and for `serve deploy` files."""

from __future__ import annotations

from typing import Any

from specserve import config as configs


def build(args: dict[str, Any]) -> Any:
    """A `serve.Application` from a configuration tree. Raises ConfigError that names each wrong key."""
    config = configs.parse(args, where="args")
    from specserve.cluster.deploy import application

    return application(config)
