"""Clients read one id from an answer that came through Serve's proxy, whose own layer is the real one here."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from ray.serve._private.http_util import _apply_middlewares
from starlette.responses import PlainTextResponse

from specserve.api.limits import Envelope, rename
from specserve.cluster.proxy_headers import middlewares
from specserve.cluster.request_ids import NamedByProxy
from specserve.metrics import HttpMetrics


async def application(scope, receive, send):
    """An application that names its request after what stands in the query, as a body may."""
    if scope["query_string"]:
        rename(scope, scope["query_string"].decode())
    await PlainTextResponse("x")(scope, receive, send)


def ids(query: str = "", *, wrapped: bool = True, **headers: str | bytes) -> list[str]:
    """The ids that an answer of the application behind the proxy's layer carries."""
    inner = Envelope(application, HttpMetrics([]))
    transport = httpx.ASGITransport(app=_apply_middlewares(NamedByProxy(inner) if wrapped else inner, middlewares()))

    async def one() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(f"/{query}", headers=headers)

    return asyncio.run(one()).headers.get_list("x-request-id")


@pytest.mark.parametrize("given", ["abc-1.2_3", None])
def test_an_answer_has_one_request_id(given: str | None) -> None:
    """The client's own, or the one that the proxy made; the application's layers alone would say it twice."""
    headers = {} if given is None else {"x-request-id": given}
    (told,) = ids(**headers)
    assert told == given or given is None
    assert len(ids(wrapped=False, **headers)) == 2


def test_an_id_that_only_the_application_knows_comes_first() -> None:
    """The proxy does not read bodies, and echoes what the application takes for no id: its own follows."""
    assert ids("?my-7")[0] == "my-7"
    replaced = ids(**{"x-request-id": "no id"})
    assert replaced[0] != "no id"
    assert len(replaced) == 2


def test_an_id_that_is_no_text_is_replaced() -> None:
    """Behind this layer the proxy decodes it as UTF-8, and would fail."""
    (told,) = ids(**{"x-request-id": b"\xff\xfe"})
    assert told.isascii()
