"""Chat templates that take tools, one for each way of spelling calls, on the tiny tokenizer's special tokens."""

from __future__ import annotations

_TURN = "{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
_HEAD = "{% if tools %}{{ '<|start|>system\n' + tools | tojson + '<|end|>\n' }}{% endif %}"
_TAIL = "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"

TAGGED = (
    _HEAD
    + "{% for message in messages %}{% if message.tool_calls %}{{ '<|start|>assistant' }}"
    + "{% if message.content %}{{ '\n' + message.content }}{% endif %}"
    + "{% for call in message.tool_calls %}"
    + '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    + "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|end|>\n' }}"
    + "{% else %}"
    + _TURN
    + "{% endif %}{% endfor %}"
    + _TAIL
)
"""Each call between tags, after text or without."""

LISTED = (
    _HEAD
    + "{% for message in messages %}{% if message.tool_calls %}{{ '<|start|>assistant\nCALLS [' }}"
    + '{% for call in message.tool_calls %}{{ \'{"name": "\' + call.function.name + \'", "arguments": \' }}'
    + "{{ call.function.arguments | tojson }}{{ '}' }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}"
    + "{{ ']<|end|>\n' }}{% else %}"
    + _TURN
    + "{% endif %}{% endfor %}"
    + _TAIL
)
"""All calls in one list behind a word."""

BARE = (
    _HEAD
    + "{% for message in messages %}{% if message.tool_calls %}"
    + "{% if message.tool_calls | length != 1 %}{{ raise_exception('one call only') }}{% endif %}"
    + "{% set call = message.tool_calls[0].function %}"
    + '{{ \'<|start|>assistant\n{"name": "\' + call.name + \'", "parameters": \' }}'
    + "{{ call.arguments | tojson }}{{ '}<|end|>\n' }}{% else %}"
    + _TURN
    + "{% endif %}{% endfor %}"
    + _TAIL
)
"""One call, which is the whole answer."""

SPELT_OTHERWISE = TAGGED.replace('{\\"name\\": \\"', "name=").replace('{"name": "', "name=")
"""Calls that are no JSON objects."""

SPECIAL = TAGGED.replace("<tool_call>", "<|end_of_text|>")
"""Calls marked by a special token, which is no text."""
