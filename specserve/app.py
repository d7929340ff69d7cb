"""The Serve application builder, for `serve run specserve.app:build` and for `serve deploy` files."""

from __future__ import annotations

import logging
import os
from typing import Any

from specserve import config as configs
from specserve.errors import ConfigError

log = logging.getLogger(__name__)


def build(args: dict[str, Any]) -> Any:
    """A `serve.Application` from a configuration tree, with the keys of the environment (see `config.keyed`).

    Where to listen is said in Serve's own `http_options`; `server.host` and `server.port` have no part in it. Raises
    ConfigError that names each wrong key, for a rule or speculator that does not exist, and for a certificate, which
    would be missed silently.
    """
    config = configs.keyed(configs.parse(args, where="args"), os.environ)
    from specserve.cluster.deploy import application
    from specserve.cluster.preflight import check_config

    check_config(config, models_here=False)
    if config.server.ssl_certfile is not None:
        raise ConfigError(
            "args: server.ssl_certfile and server.ssl_keyfile have no effect here, where Ray Serve runs already; name "
            "the same files as ssl_certfile and ssl_keyfile of http_options in the Serve file"
        )
    if not config.server.api_keys:
        log.warning("no API key: whoever reaches the HTTP port is served; set SPECSERVE_API_KEY where Ray starts")
    return application(config)
