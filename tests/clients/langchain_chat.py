"""Run in an environment with `langchain-openai`: url and key in, one line of JSON with what the client saw out."""

from __future__ import annotations

import json
import sys

from langchain_openai import ChatOpenAI

URL, KEY = sys.argv[1:3]


def lamp(on: bool) -> str:
    """Switch the lamp."""
    return str(on)


chat = ChatOpenAI(base_url=f"{URL}/v1", api_key=KEY, model="tiny", temperature=0, max_tokens=200, max_retries=0)
plain = chat.invoke("hi")
chunks = list(chat.stream("hi", stream_usage=True))
call = chat.bind_tools([lamp], tool_choice="required", parallel_tool_calls=False).invoke("hi").tool_calls[0]
print(
    json.dumps(
        {
            "text": plain.content,
            "streamed": "".join(chunk.content for chunk in chunks),
            "usage": plain.usage_metadata["output_tokens"],
            "streamed_usage": sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks),
            "call": [call["name"], call["args"]],
        }
    )
)
