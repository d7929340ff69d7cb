"""Calling one replica of a deployment by its name. Serve itself only picks any."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import Context
from typing import Any

_running: dict[tuple[str, str], tuple[str, ...]] = {}
"""Names of replicas by application and deployment, as Serve's controller last told this process.

Serve makes the routers, one for each handle, and shows them to nobody; they hear of every change at once.
"""


def told(application: str, deployment: str, names: Iterable[str]) -> None:
    """What a router of this process was told."""
    _running[application, deployment] = tuple(sorted(names))


class Calls:
    """The methods of some replica, called apart from whatever request is being served.

    Serve gives all calls that serving one request makes the same id, and its router (2.60) finds calls that wait for a
    replica by that id: of several at once it forgets all but the first, and each one forgotten occupies a routing task
    until its caller gives up. There are two of these for each replica; then no call of this deployment goes out.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __getattr__(self, method: str) -> _Method:
        return _Method(getattr(self._handle, method))


class _Method:
    """One method of a replica."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *args: Any) -> Any:
        """Call it; Serve's response."""
        return Context().run(self._method.remote, *args)


class Fleet:
    """The replicas of one deployment whose requests are routed `ByName`, behind a Serve handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def names(self) -> tuple[str, ...]:
        """Those that run now; none before this process has called any of them."""
        return _running.get((self._handle.app_name, self._handle.deployment_name), ())

    def any(self) -> Calls:
        """Calls to some replica; they wait until there is one."""
        return Calls(self._handle)

    def at(self, name: str) -> Calls:
        """Calls to this replica; they raise Unavailable when it is gone."""
        return Calls(self._handle.options(session_id=name))
