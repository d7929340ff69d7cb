"""How user messages may begin, so that a target that writes its own prompts does not write about one thing only.

A message is an opening, a subject where the opening leaves a place for one, and then whatever the target goes on with.
"""

from __future__ import annotations

import random

_FREE = ("", "", "", "", "I ", "Can you ", "How ", "What ", "Why ", "Please ", "Which ", "Is it ", "In ", "The ", "My ")

_ABOUT = (
    "Explain {}",
    "Explain in simple terms {}",
    "What is the difference between {} and",
    "Write a short story about {}",
    "Write a poem about {}",
    "Give me five tips on {}",
    "List the most important facts about {}",
    "Write an e-mail to a friend about {}",
    "I want to learn about {}. Where",
    "What are the advantages of {}",
    "Describe {} to",
    "Write a paragraph on {}",
    "Who was the first person to {}",
    "Tell me about {}",
    "Write step-by-step instructions for {}",
    "Give me a recipe for {}",
    "Translate this sentence about {} into",
    "Name three {}",
    "What should I know about {} before",
    "How do I start with {}",
    "Write a dialogue between two people about {}",
    "Make a plan for {}",
    "Compare {} with",
    "Why is {}",
    "What happened to {}",
)
_SUBJECTS = (
    "the ocean", "volcanoes", "baking bread", "the Roman Empire", "solar panels", "a small dog", "electric cars",
    "gardening", "the moon", "black holes", "healthy food", "running", "chess", "a lost key", "the human heart",
    "Shakespeare", "photosynthesis", "money", "a job interview", "travelling to Japan", "winter", "music theory",
    "machine learning", "the French Revolution", "a broken bicycle", "soup", "mountains", "friendship", "bees",
    "the stock market", "sleep", "learning a language", "rivers", "a school for robots", "dinosaurs", "coffee",
    "painting", "climate", "the printing press", "a birthday party", "vaccines", "old books", "trains", "football",
    "a detective", "time management", "mathematics", "the brain", "a city at night", "chocolate cake", "elephants",
    "gravity", "meditation", "computers", "Africa", "India", "a famous scientist", "planets", "cooking rice",
)  # fmt: skip

_CODE = (
    "Write a Python function that ",
    "Write a Python function that takes a list of numbers and ",
    "Write a Python function to check if a string ",
    "Write a Python class for ",
    "Write a program in Python that reads a file and ",
    "Write a JavaScript function that ",
    "Write an SQL query that ",
    "How do I sort a ",
    "What does this Python code do?\n\ndef ",
    "Fix the bug in this function:\n\ndef ",
    "Add comments to this code and print it again:\n\ndef ",
    "Rewrite this function so that it is shorter:\n\ndef ",
    "Write a unit test for this function:\n\ndef ",
    "What is the difference between a class and ",
    "Explain how a for loop in Python ",
    "Write a regular expression that ",
)

_TEXTS = (
    "Summarise the following text in two sentences:\n\n",
    "Summarize this article:\n\n",
    "Summarize the following story in one paragraph:\n\nOnce upon a time, ",
    "Give me the main points of this text:\n\n",
    "Correct the grammar of this text and print it again:\n\n",
    "Rewrite this paragraph in a more formal style:\n\n",
    "Repeat this text word for word:\n\n",
    "Make this e-mail more polite:\n\n",
    "Write a title for this text:\n\n",
    "Answer the question with the help of the text.\n\nText: ",
    "Translate to French: ",
    "Translate to Spanish: ",
    "Make a list of the people in this story:\n\n",
    "Solve this problem step by step: ",
    "Calculate ",
    "Continue this story: ",
    "Is this review positive or negative? ",
)


def opening(noise: random.Random) -> str:
    """The beginning of one user message; empty where the target is to begin by itself."""
    group = noise.choices((_FREE, _ABOUT, _CODE, _TEXTS), weights=(3, 4, 2, 2))[0]
    chosen = noise.choice(group)
    return chosen.format(noise.choice(_SUBJECTS)) if group is _ABOUT else chosen
