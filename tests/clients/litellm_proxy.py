"""Run in an environment with `litellm`: url and key in, one line of JSON with what the client saw out."""

from __future__ import annotations

import json
import sys

import litellm

URL, KEY = sys.argv[1:3]
ASK = {"model": "openai/tiny", "api_base": f"{URL}/v1", "api_key": KEY, "num_retries": 0}
HI = [{"role": "user", "content": "hi"}]


def raised(**fields) -> str:
    try:
        litellm.completion(**ASK | {"messages": HI} | fields)
    except Exception as error:
        return type(error).__name__
    return ""


plain = litellm.completion(messages=HI, max_tokens=8, temperature=0, **ASK)
chunks = litellm.completion(messages=HI, max_tokens=8, temperature=0, stream=True, **ASK)
print(
    json.dumps(
        {
            "text": plain.choices[0].message.content,
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
            "tokens": plain.usage.completion_tokens,
            "long": raised(messages=[{"role": "user", "content": "word " * 2000}]),
            "key": raised(api_key="not-the-key"),
        }
    )
)
