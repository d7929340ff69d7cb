"""Who may ask, and how much at once: API keys and admission, as plain ASGI layers in front of the routes.

Keys are compared by their hashes, in constant time and all of them, so an answer's time says nothing about a key.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import Counter
from collections.abc import Callable, Sequence

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specserve.api import page
from specserve.api.turns import Turns
from specserve.config import ServerConfig
from specserve.errors import HeadersTooLarge, KeyOverloaded, NotAuthenticated, NotPermitted, Overloaded

_OPEN = frozenset({"/health", "/ready", *page.FILES})
_ADMIN = frozenset({"/metrics", "/load"})

_GENERATING = frozenset({"/v1/completions", "/v1/chat/completions"})
_FULL_FOR_S = 0.1

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

    The engine has a queue of its own; this one keeps what comes before it (bodies, tokens, grammars) bounded too. When
    the engine had no room for a key, who comes next with it is sent away unread: until an answer ends here, but for a
    tenth of a second at most, as places may become free through others.
    """

    def __init__(
        self, app: ASGIApp, config: ServerConfig, places: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """places are the engine's own, those of its queue included."""
        self._app = app
        self._most = config.max_inflight
        self._most_per_key = config.max_inflight_per_key
        self._clock = clock
        self._turns = Turns(places, clock)
        self._running = 0
        self._running_of: Counter[int | None] = Counter()
        self._full: dict[int | None, tuple[float, Overloaded]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app if there is a place, and hold the place until its answer has ended."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        key = scope.get(_KEY)
        try:
            self._check(key, generates=scope["path"] in _GENERATING)
            await self._admitted(key, scope, receive, send)
        except KeyOverloaded:
            raise
        except Overloaded as error:
            raise error.until(self._turns.next_s(self._running)) from None

    async def _admitted(self, key: int | None, scope: Scope, receive: Receive, send: Send) -> None:
        self._running += 1
        self._running_of[key] += 1
        began_s = self._clock()
        try:
            await self._app(scope, receive, send)
        except Overloaded as error:
            self._full[key] = self._clock(), error
            raise
        else:
            self._full.clear()
            if scope["path"] in _GENERATING:
                self._turns.ended(self._clock() - began_s)
        finally:
            self._running -= 1
            self._running_of[key] -= 1

    def _check(self, key: int | None, *, generates: bool) -> None:
        if self._running >= self._most:
            raise Overloaded(f"{self._most} requests are being worked on here, which is the most; try again later")
        if self._most_per_key is not None and self._running_of[key] >= self._most_per_key:
            raise KeyOverloaded(f"this API key may have {self._most_per_key} requests at once; try again later")
        if generates and key in self._full:
            since_s, error = self._full[key]
            if self._clock() - since_s < _FULL_FOR_S:
                raise Overloaded(error.message)
            del self._full[key]


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
