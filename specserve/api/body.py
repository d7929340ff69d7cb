"""From the bytes of a request to plain data that cannot surprise anybody further in."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from specserve.api.errors import ClientGone
from specserve.errors import DeadlineExceeded, RequestError, WrongContentType

_MAX_DEPTH = 64
_LARGE = 64 * 1024

T = TypeVar("T")


async def read_body(request: Request, timeout_s: float) -> bytes:
    """The bytes of a request's body, which says that it is JSON.

    Raises WrongContentType, BodyTooLarge (from the limit around the app), and DeadlineExceeded for a body that does not
    arrive in `timeout_s` seconds.
    """
    _check_content_type(request.headers.get("content-type", ""))
    try:
        async with asyncio.timeout(timeout_s):
            return await request.body()
    except TimeoutError:
        raise DeadlineExceeded(f"the body did not arrive within {timeout_s:g} seconds") from None
    except ClientDisconnect:
        raise ClientGone("body") from None


async def taken(body: bytes, take: Callable[[bytes], T]) -> T:
    """What `take` makes of a body. A large one is taken in a thread, so that open streams go on meanwhile."""
    return await asyncio.to_thread(take, body) if len(body) > _LARGE else take(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """The object of finite numbers and valid text that a JSON text holds. Raises RequestError for everything else."""
    try:
        data = json.loads(body.decode("utf-8"), parse_float=_finite, parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise RequestError("the body is not valid UTF-8") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object")
    _check_tree(data)
    return data


def _check_content_type(value: str) -> None:
    media = value.partition(";")[0].strip().lower()
    if media != "application/json":
        raise WrongContentType("the body must be JSON; send it with Content-Type: application/json")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _check_tree(root: object) -> None:
    """Refuse deep nesting, NUL characters and lone surrogates anywhere, level by level so that depth cannot hurt."""
    level: list[object] = [root]
    for _ in range(_MAX_DEPTH):
        texts, level = _next_level(level)
        for text in texts:
            _check_text(text)
        if not level:
            return
    raise RequestError(f"the body is nested deeper than {_MAX_DEPTH} levels")


def _next_level(level: Iterable[object]) -> tuple[list[str], list[object]]:
    texts: list[str] = []
    below: list[object] = []
    for value in level:
        children: Iterable[object] = ()
        if isinstance(value, dict):
            texts.extend(value)
            children = value.values()
        elif isinstance(value, list):
            children = value
        for child in children:
            if isinstance(child, str):
                texts.append(child)
            elif isinstance(child, (dict, list)):
                below.append(child)
    return texts, below


def _check_text(text: str) -> None:
    if "\x00" in text:
        raise RequestError("the body holds a NUL character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError("the body holds half of a surrogate pair, which is not a character") from None
