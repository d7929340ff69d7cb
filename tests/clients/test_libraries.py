"""Client libraries as people install them, each in an environment of its own."""

from __future__ import annotations

import pytest
from client_servers import API_KEY
from environments import HERE, node_with, python_with, result


def test_openai_for_python(server) -> None:
    """Models, both endpoints, streams, tools, structured output, scores, predictions, and errors by their classes."""
    python = python_with("openai", ["openai==3.57.0"])
    seen = result([python, HERE / "openai_python.py", server.url, API_KEY], timeout_s=120)
    chats = seen["chats"]
    assert (seen["models"], seen["model"], seen["batch"]) == (["tiny"], "tiny", [0, 1, 2, 3])
    assert chats["text"] == chats["streamed"] == chats["predicted"]
    assert chats["tokens"][0] == chats["tokens"][1] > 0
    assert chats["prediction_tokens"][0] >= 0
    assert chats["prediction_tokens"][1] > 0
    assert "acceptance_histogram" in chats["metrics"]
    assert seen["tools"][0] == "lamp"
    assert all(isinstance(arguments["on"], bool) for arguments in seen["tools"][1:])
    assert seen["scored"]["first"] is None
    assert "".join(seen["scored"]["tokens"]).startswith("The fox")
    assert isinstance(seen["structured"]["on"], bool)
    assert seen["errors"] == {
        "key": ["AuthenticationError", 401, "invalid_api_key", None],
        "model": ["NotFoundError", 404, "model_not_found", "model"],
        "value": ["BadRequestError", 400, "invalid_value", "top_p"],
        "field": ["BadRequestError", 400, "unsupported_parameter", "suffix"],
        "context": ["BadRequestError", 400, "context_length_exceeded", "prompt"],
        "path": ["NotFoundError", 404, "route_not_found", None],
    }


@pytest.mark.full
def test_openai_for_node(server) -> None:
    """The other official client: another parser of server-sent events, the same errors."""
    folder = node_with("openai-node", ["openai@7.59"])
    script = folder / "openai_node.mjs"
    script.write_text((HERE / "openai_node.mjs").read_text())  # imports are looked for beside the script
    seen = result(["node", script, server.url, API_KEY], timeout_s=120)
    assert seen["text"] == seen["streamed"]
    assert seen["tokens"] > 0
    assert seen["models"] == ["tiny"]
    assert seen["errors"] == {
        "model": ["NotFoundError", 404, "model_not_found"],
        "value": ["BadRequestError", 400, "invalid_value"],
        "key": ["AuthenticationError", 401, "invalid_api_key"],
    }


@pytest.mark.full
def test_langchain(server) -> None:
    """Text, streams, usage and bound tools."""
    python = python_with("langchain", ["langchain-openai==1.7.4"])
    seen = result([python, HERE / "langchain_chat.py", server.url, API_KEY], timeout_s=180)
    assert seen["text"] == seen["streamed"]
    assert seen["usage"] == seen["streamed_usage"] > 0
    assert seen["call"][0] == "lamp"
    assert isinstance(seen["call"][1]["on"], bool)


@pytest.mark.full
def test_litellm(server) -> None:
    """A proxy's library: text and streams, and errors that it tells apart by status and wording."""
    python = python_with("litellm", ["litellm==1.110.2"])
    variables = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    seen = result([python, HERE / "litellm_proxy.py", server.url, API_KEY], timeout_s=180, **variables)
    assert seen["text"] == seen["streamed"]
    assert seen["tokens"] > 0
    assert seen["long"] == "ContextWindowExceededError"
    assert seen["key"] == "AuthenticationError"
