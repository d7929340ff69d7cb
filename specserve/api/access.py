"""Who may ask, and how much at once: API keys and admission, as plain ASGI layers in front of the routes.

Keys are compared by their hashes, in constant time and all of them, so an answer's time says nothing about a key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Sequence

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specserve.api import page
from specserve.config import ServerConfig
from specserve.errors import HeadersTooLarge, KeyOverloaded, NotAuthenticated, NotPermitted, Overloaded

_OPEN = frozenset({"/health", "/ready", *page.FILES})
_ADMIN = frozenset({"/metrics", "/load"})

_KEY = "specserve.key"
"""Where in the scope the number of the client's key stands."""


class Keys:
    """Refuses whoever has no key, once there are keys. Raises NotAuthenticated, NotPermitted."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._clients = _hashes(config.api_keys)
        self._admin = _hashes([] if config.admin_key is None else [config.admin_key])
        self._open = _OPEN | ({"/metrics"} if config.open_metrics else frozenset())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app for those who may."""
        if scope["type"] == "http" and (self._clients or self._admin) and scope["method"] != "OPTIONS":
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        path = scope["path"]
        if path in self._open:
            return
        digest = _bearer(scope)
        client, admin = _found(digest, self._clients), _found(digest, self._admin)
        scope[_KEY] = client
        if path in _ADMIN and self._admin:
            if client is not None and admin is None:
                raise NotPermitted("this path needs the admin key")
            client = admin
        elif admin is not None or not self._clients:
            return
        if client is None:
            raise NotAuthenticated(
                "no API key that this server knows; "
                "send it as `Authorization: Bearer KEY` (`specserve chat --api-key KEY`)"
            )


class Admission:
    """Bounds the POST requests that are worked on at once, in all and per key. Raises Overloaded, KeyOverloaded.

    The engine has a queue of its own; this one keeps what comes before it (bodies, tokens, grammars) bounded too.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._most = config.max_inflight
        self._most_per_key = config.max_inflight_per_key
        self._running = 0
        self._running_of: Counter[int | None] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app if there is a place, and hold the place until its answer has ended."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        key = scope.get(_KEY)
        self._check(key)
        self._running += 1
        self._running_of[key] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1
            self._running_of[key] -= 1

    def _check(self, key: int | None) -> None:
        if self._running >= self._most:
            raise Overloaded(f"{self._most} requests are being worked on here, which is the most; try again later")
        if self._most_per_key is not None and self._running_of[key] >= self._most_per_key:
            raise KeyOverloaded(f"this API key may have {self._most_per_key} requests at once; try again later")


class HeaderLimit:
    """Refuses headers over `max_bytes` in all. Raises HeadersTooLarge."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app behind the limit."""
        if scope["type"] == "http":
            size = sum(len(name) + len(value) for name, value in scope["headers"])
            if size > self._max_bytes:
                raise HeadersTooLarge(f"the headers have {size} bytes, at most {self._max_bytes} are allowed")
        await self._app(scope, receive, send)


def client_of(scope: Scope) -> int:
    """The number of the client's key, from 1; 0 without one."""
    key: int | None = scope.get(_KEY)
    return 0 if key is None else key + 1


def _hashes(keys: Sequence[SecretStr]) -> list[bytes]:
    return [_hash(key.get_secret_value().encode()) for key in keys]


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _bearer(scope: Scope) -> bytes:
    """The hash of the key that was sent, if only of an empty one."""
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    return _hash(key.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else b"")


def _found(digest: bytes, known: Sequence[bytes]) -> int | None:
    """The number of the key with this hash; looks at every one."""
    found = [hmac.compare_digest(digest, each) for each in known]
    return found.index(True) if any(found) else None
