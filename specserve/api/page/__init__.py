"""The page at `/`: what the pipeline is doing, and a playground. Static files, nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from starlette.responses import Response

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

FILES = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js"}
"""What is served where. These hold nothing secret, so they need no key: the page asks for one."""


def answer(path: str) -> Response:
    """The file for one of the paths of `FILES`."""
    name = FILES[path]
    text = files(__name__).joinpath(name).read_text(encoding="utf-8")
    return Response(text, media_type=_TYPES[name.rpartition(".")[2]], headers=_HEADERS)
