"""The real demo pair asked for JSON over HTTP, with speculation on."""

from __future__ import annotations

import json

import httpx
import jsonschema
import pytest
from http_server import serving

from specserve.local import LocalEngine

pytestmark = pytest.mark.demo

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "languages": {
            "type": "array",
            "items": {"enum": ["English", "French", "German"]},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}
ASKED = "Describe a person named Marie, who is 31 and speaks French, as JSON with name, age and languages."


@pytest.fixture(scope="module")
def url():
    config = {"target": {"kv_memory_gib": 0.5, "context_length": 1024}, "engine": {"depth": 4, "max_requests": 4}}
    with LocalEngine(config) as engine, serving(engine) as url:
        yield url


def ask(url, **fields):
    body = {"messages": [{"role": "user", "content": ASKED}], "max_tokens": 120} | fields
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_the_demo_model_answers_in_a_schema(url):
    """Valid JSON at temperature 0 and 1; greedy, the same with and without speculation; drafts are offered."""
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    texts = []
    for temperature, speculation in ((0, {"enabled": True, "depth": 4}), (0, {"enabled": False}), (1, {"depth": 4})):
        body = ask(url, response_format=wanted, temperature=temperature, speculation=speculation, seed=7)
        (choice,) = body["choices"]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
        texts.append(choice["message"]["content"])
    assert texts[0] == texts[1]
    assert json.loads(texts[0])["name"].startswith("Marie")


def test_the_demo_model_chooses_one_of_the_choices(url):
    """A choice is one of the texts, and the answer ends with it."""
    body = ask(url, structured_outputs={"choice": ["red", "green", "blue"]}, temperature=0)
    assert body["choices"][0]["message"]["content"] in {"red", "green", "blue"}
    assert body["choices"][0]["finish_reason"] == "stop"
