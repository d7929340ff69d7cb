"""What Ray Serve's proxies are told of HTTP: where to listen, and with which certificate."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from specserve.config import ServerConfig
from specserve.errors import ConfigError


def http_options(server: ServerConfig) -> dict[str, Any]:
    """Ray Serve's `http_options`. Paths are absolute, as the proxies have another working folder."""
    options: dict[str, Any] = {"host": server.host, "port": server.port}
    for name in ("ssl_certfile", "ssl_keyfile"):
        path = getattr(server, name)
        if path is not None:
            options[name] = str(_absolute(path))
    return options


def check_certificate(server: ServerConfig) -> None:
    """Raise ConfigError unless certificate and key can be read, belong together, and need no password."""
    if server.ssl_certfile is None or server.ssl_keyfile is None:
        return
    for name in ("ssl_certfile", "ssl_keyfile"):
        _check_readable(name, _absolute(getattr(server, name)))
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(_absolute(server.ssl_certfile), _absolute(server.ssl_keyfile), password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"server.ssl_certfile {server.ssl_certfile} and server.ssl_keyfile {server.ssl_keyfile} cannot be used: "
            f"{error}; give a PEM certificate chain and the private key that belongs to it, without a password"
        ) from None


def _check_readable(name: str, path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"cannot read server.{name} {path}: {error.strerror or error}") from None


def _no_password() -> str:
    """OpenSSL would ask the terminal otherwise."""
    raise ValueError("the key needs a password")


def _absolute(path: str) -> Path:
    return Path(path).expanduser().resolve()
