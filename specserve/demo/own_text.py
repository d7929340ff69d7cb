"""Text that a model writes itself: answers to a few chat prompts, sampled in one batch, seeded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from specserve.config import ModelConfig
from specserve.models import RaggedBatch, paged_transformers

PROMPTS = (
    "Tell me a short story about a fox.",
    "Explain how rain forms.",
    "Write a poem about the sea.",
    "How do I bake bread?",
    "What is a computer?",
    "Give me advice for a job interview.",
    "Who was Albert Einstein?",
    "Write a Python function that sorts a list.",
    "Describe a day in the life of a farmer.",
    "What are the benefits of exercise?",
    "Write a letter to an old friend.",
    "Why is the sky blue?",
    "Make a list of healthy breakfasts.",
    "What is the capital of France and why is it famous?",
    "How can I learn to play the guitar?",
    "Summarize the history of Rome.",
)
ANSWERS_EACH = 2
ANSWER_TOKENS = 96
TEMPERATURE = 0.8
SEED = 1

_BLOCK_TOKENS = 16
_CONTEXT = 256


def written_by(folder: Path, progress: Callable[[str], None]) -> list[list[int]]:
    """Token ids of prompt and answer, one list per answer. The same on every call on one machine."""
    config = ModelConfig(source=str(folder), device="cpu", context_length=_CONTEXT)
    backend = paged_transformers.build(config, folder)
    rows = _prompts(folder) * ANSWERS_EACH
    blocks = _CONTEXT // _BLOCK_TOKENS
    tables = np.arange(len(rows) * blocks, dtype=np.int32).reshape(len(rows), blocks)
    backend.allocate(tables.size, _BLOCK_TOKENS)
    noise = torch.Generator().manual_seed(SEED)
    logits = backend.forward(_batch(rows, [0] * len(rows), tables))
    for step in range(ANSWER_TOKENS):
        chosen = torch.multinomial(torch.softmax(logits / TEMPERATURE, -1), 1, generator=noise)[:, 0].tolist()
        rows = [[*row, token] for row, token in zip(rows, chosen, strict=True)]
        if step % 16 == 0:
            progress(f"building the demo draft model: {step} of {ANSWER_TOKENS} steps written")
        logits = backend.forward(_batch([row[-1:] for row in rows], [len(row) - 1 for row in rows], tables))
    return rows


def _prompts(folder: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    return [
        list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
        for chat in chats
    ]


def _batch(rows: list[list[int]], starts: list[int], tables: np.ndarray) -> RaggedBatch:
    lengths = [len(row) for row in rows]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return RaggedBatch(
        tokens=np.concatenate(rows).astype(np.int64),
        positions=np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]),
        offsets=offsets,
        tables=tables,
        wanted=offsets[1:] - 1,
    )
