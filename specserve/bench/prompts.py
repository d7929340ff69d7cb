"""Prompts that ship with the project: chat, code, summarising and editing, short and long."""

from __future__ import annotations

_STORY = (
    "The lighthouse keeper of Skerry Point had not spoken to anyone for eleven days when the boat came. It was a small "
    "boat with a patched sail, and in it sat a girl of about twelve who held the tiller as if she had been born to it. "
    "She tied up without asking, climbed the forty iron steps, and told him that his light had been seen to flicker "
    "from the mainland. He said that it had done no such thing. She said that her grandmother had seen it, and that "
    "her grandmother did not make mistakes about lights, having kept this very one for thirty years before him. The "
    "keeper looked at her for a while. Then he put the kettle on, fetched the log book, and together they went through "
    "the entries of the last fortnight, hour by hour, until they found it: on the fourth night, between two and three, "
    "the flame had been low for the time it takes to change a wick. He had written it down himself and forgotten. The "
    "girl drank her tea, signed the log as a witness, and sailed home before the tide turned. "
)

_CODE = """def read_table(path):
    rows = []
    with open(path) as handle:
        header = handle.readline().strip().split(",")
        for line in handle:
            values = line.strip().split(",")
            rows.append(dict(zip(header, values)))
    return rows
"""

CHATS: tuple[str, ...] = (
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a river in winter.",
    "List five things to check before a long bicycle tour.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Summarise this story in three sentences:\n\n" + _STORY,
    "Repeat the following text exactly, word for word:\n\n" + _STORY[:420],
    "Add a docstring to this function and print the whole function again:\n\n" + _CODE,
    "Give me a recipe for pancakes with exact quantities.",
    "What is the difference between a list and a tuple in Python?",
    "Translate into French: The weather is nice today and we are going to the beach.",
    "A train leaves at 9:40 and arrives at 12:15. How long is the journey? Show the steps.",
    "Who was Marie Curie and what did she discover?",
    "Name three planets and one fact about each of them.",
    "Write a polite e-mail that asks a colleague for last month's figures.",
    "Continue the list: January, February, March,",
)
