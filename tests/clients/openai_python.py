"""Run in an environment with `openai`: url and key in, one line of JSON with what the client saw out."""

from __future__ import annotations

import json
import sys

import openai

URL, KEY = sys.argv[1:3]
CLIENT = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
HI = [{"role": "user", "content": "hi"}]
ON = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
LAMP = {"type": "function", "function": {"name": "lamp", "parameters": ON}}


def raised(call) -> list:
    try:
        call()
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.code, error.param]
    return []


def chats() -> dict:
    plain = CLIENT.chat.completions.create(model="tiny", messages=HI, max_tokens=8, temperature=0)
    stream = CLIENT.chat.completions.create(
        model="tiny", messages=HI, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    predicted = CLIENT.chat.completions.create(
        model="tiny", messages=HI, max_tokens=8, temperature=0, prediction={"type": "content", "content": "The fox"}
    )
    details = predicted.usage.completion_tokens_details
    return {
        "text": plain.choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "predicted": predicted.choices[0].message.content,
        "tokens": [plain.usage.completion_tokens, chunks[-1].usage.completion_tokens],
        "prediction_tokens": [details.accepted_prediction_tokens, details.rejected_prediction_tokens],
        "metrics": sorted(plain.model_extra["metrics"]["speculative_decoding"]),
    }


def tools() -> list:
    # Random weights would call for ever.
    ask = {"model": "tiny", "messages": HI, "tools": [LAMP], "tool_choice": "required", "parallel_tool_calls": False}
    call = CLIENT.chat.completions.create(**ask).choices[0].message.tool_calls[0]
    with CLIENT.chat.completions.stream(**ask) as stream:
        final = stream.get_final_completion().choices[0].message.tool_calls[0]
    return [call.function.name, json.loads(call.function.arguments), json.loads(final.function.arguments)]


def scored() -> dict:
    found = CLIENT.completions.create(
        model="tiny", prompt="The fox", echo=True, logprobs=2, max_tokens=1, temperature=0
    )
    return {"tokens": found.choices[0].logprobs.tokens, "first": found.choices[0].logprobs.token_logprobs[0]}


def structured() -> dict:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": ON}}
    found = CLIENT.chat.completions.create(model="tiny", messages=HI, response_format=form)
    return json.loads(found.choices[0].message.content)


def errors() -> dict:
    other = openai.OpenAI(base_url=f"{URL}/v1", api_key="not-the-key", max_retries=0)
    ask = CLIENT.chat.completions.create
    return {
        "key": raised(other.models.list),
        "model": raised(lambda: ask(model="other", messages=HI)),
        "value": raised(lambda: ask(model="tiny", messages=HI, top_p=0)),
        "field": raised(lambda: CLIENT.completions.create(model="tiny", prompt="a", suffix="b")),
        "context": raised(lambda: CLIENT.completions.create(model="tiny", prompt=[5] * 600)),
        "path": raised(lambda: CLIENT.embeddings.create(model="tiny", input="a")),
    }


print(
    json.dumps(
        {
            "models": [model.id for model in CLIENT.models.list()],
            "model": CLIENT.models.retrieve("tiny").id,
            "chats": chats(),
            "tools": tools(),
            "batch": [c.index for c in CLIENT.completions.create(model="tiny", prompt=["a", "b"], n=2).choices],
            "scored": scored(),
            "structured": structured(),
            "errors": errors(),
        }
    )
)
