"""One `X-Request-Id` in each answer, though two write it: Serve's proxy, and the application behind it."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = "x-request-id"


class NamedByProxy:
    """Around the application behind Serve's proxy, which gives each request an id and adds it to the answer.

    An answer with that same id leaves without it, so that clients read one id and not two joined by a comma. An id of
    another kind, such as the one that a body names, stays and comes first.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(_HEADER)

        async def once(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                if headers.get(_HEADER) == given:
                    del headers[_HEADER]
            await send(message)

        await self._app(scope, receive, once)
