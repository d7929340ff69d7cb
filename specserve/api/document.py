"""The OpenAPI document of the routes, made from the bodies that they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from specserve.api.schemas import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_BODIES: Final[Mapping[str, type[Body]]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_STREAMING: Final = frozenset({"/v1/completions", "/v1/chat/completions"})
_TEXT: Final = frozenset({"/metrics", "/"})

_ERROR: Final[Mapping[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document(routes: list[tuple[str, str, str]], version: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document. `routes` are path, method and a line of description."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, Any] = {}
    for path, method, about in routes:
        plain = path.replace(":path}", "}")
        paths.setdefault(plain, {})[method.lower()] = _operation(path, about, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "specserve", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(path: str, about: str, schemas: dict[str, Any]) -> dict[str, Any]:
    failed = {"description": "an error", "content": {"application/json": {"schema": _ref("Error")}}}
    operation: dict[str, Any] = {"summary": about, "responses": {"200": _answer(path), "default": failed}}
    if "{" in path:
        name = path.partition("{")[2].partition(":")[0].rstrip("}")
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    body = _BODIES.get(path)
    if body is not None:
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[body.__name__] = schema
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _ref(body.__name__)}},
        }
    return operation


def _answer(path: str) -> dict[str, Any]:
    if path in _TEXT:
        return {"description": "text", "content": {"text/plain": {"schema": {"type": "string"}}}}
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path in _STREAMING:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"description": "the answer", "content": content}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
