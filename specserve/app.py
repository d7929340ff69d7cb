"""The Serve application builder, for `serve run specserve.app:build` and for `serve deploy` files."""

from __future__ import annotations

import logging
import os
from typing import Any

from specserve import config as configs

log = logging.getLogger(__name__)


def build(args: dict[str, Any]) -> Any:
    """A `serve.Application` from a configuration tree, with the keys of the environment (see `config.keyed`).

    Where to listen is said in Serve's own `http_options`; `server.host` and `server.port` have no part in it. Raises
    ConfigError that names each wrong key, and for a rule or speculator that does not exist.
    """
    config = configs.keyed(configs.parse(args, where="args"), os.environ)
    from specserve.cluster.deploy import application
    from specserve.cluster.launch import check_config

    check_config(config, models_here=False)
    if not config.server.api_keys:
        log.warning("no API key: whoever reaches the HTTP port is served; set SPECSERVE_API_KEY where Ray starts")
    return application(config)
