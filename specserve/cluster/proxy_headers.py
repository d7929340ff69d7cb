"""What Serve's proxy is given before it reads a request. Its process imports this by name; see `local_ray`."""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

_REQUEST_ID = b"x-request-id"


class ReadableRequestIds:
    """Drops an `X-Request-Id` that is no text: the proxy fails on it, where it would make one for a request without."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the proxy."""
        if scope["type"] == "http":
            headers = scope["headers"]
            scope["headers"] = [each for each in headers if each[0] != _REQUEST_ID or each[1].isascii()]
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """Called by Serve when a proxy starts."""
    return [Middleware(ReadableRequestIds)]
