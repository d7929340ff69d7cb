"""Calling one replica of a deployment by its name. Serve itself only picks any."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_running: dict[tuple[str, str], tuple[str, ...]] = {}
"""Names of replicas by application and deployment, as Serve's controller last told this process.

Serve makes the routers, one for each handle, and shows them to nobody; they hear of every change at once.
"""


def told(application: str, deployment: str, names: Iterable[str]) -> None:
    """What a router of this process was told."""
    _running[application, deployment] = tuple(sorted(names))


class Fleet:
    """The replicas of one deployment whose requests are routed `ByName`, behind a Serve handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def names(self) -> tuple[str, ...]:
        """Those that run now; none before this process has called any of them."""
        return _running.get((self._handle.app_name, self._handle.deployment_name), ())

    def any(self) -> Any:
        """A handle to some replica; its calls wait until there is one."""
        return self._handle

    def at(self, name: str) -> Any:
        """A handle to this replica; its calls raise Unavailable when it is gone."""
        return self._handle.options(session_id=name)
