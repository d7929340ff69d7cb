"""A corpus from a file: what the target's hidden states are on text that somebody else wrote.

A .jsonl file has one object a line, with `text`, or with `messages` as chat clients send them, whose last one is the
answer. Any other file is text, in documents that empty lines part from each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from specserve.config import ModelConfig
from specserve.distill.corpus import Example
from specserve.errors import ConfigError
from specserve.models import loading

WINDOW = 512  # tokens; longer texts are cut into several examples

_READ_AS = 1.0  # the temperature that counts for text which the target did not draw


class Reader:
    """Examples of the documents in a file, in order. Raises ConfigError for a file that holds something else."""

    def __init__(self, target: ModelConfig, file: Path) -> None:
        from transformers import AutoTokenizer

        self._documents = _documents(file)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(target.source, local_files_only=True)
        self._model = loading.load_model(Path(target.source), target)

    @torch.inference_mode()
    def examples(self, skipped: int = 0) -> Iterator[Example]:
        """One example for each window of each document, but for the first ones."""
        for ids, answer in islice(self._windows(), skipped, None):
            tokens = torch.tensor(ids)
            hidden = self._model.model(input_ids=tokens[None].to(self._model.device), use_cache=False)[0][0]
            yield Example(tokens, hidden.cpu(), 1, answer, _READ_AS)

    def _windows(self) -> Iterator[tuple[list[int], int]]:
        """Token ids of each window, two at least, and where the answer begins in it."""
        for document in self._documents:
            ids, answer = self._tokens(document)
            for begin in range(0, len(ids) - 1, WINDOW):
                window = ids[begin : begin + WINDOW]
                yield window, min(max(answer - begin, 1), len(window))

    def _tokens(self, document: str | list[dict[str, str]]) -> tuple[list[int], int]:
        """Token ids of a document, and where its answer begins."""
        if isinstance(document, str):
            return list(self._tokenizer(document, add_special_tokens=False)["input_ids"]), 1
        render = self._tokenizer.apply_chat_template
        asked = render(document[:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
        return list(render(document, return_dict=True)["input_ids"]), len(asked)


def _documents(file: Path) -> list[str | list[dict[str, str]]]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    if file.suffix == ".jsonl":
        return [_parsed(file, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    return [part.strip() for part in text.split("\n\n") if part.strip()]


def _parsed(file: Path, number: int, line: str) -> str | list[dict[str, str]]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{file}, line {number}: not JSON: {error}") from None
    if isinstance(found, dict) and isinstance(found.get("text"), str):
        return str(found["text"])
    if isinstance(found, dict) and _is_chat(found.get("messages")):
        return list(found["messages"])
    raise ConfigError(f"{file}, line {number}: expected an object with `text`, or with two or more `messages`")


def _is_chat(messages: object) -> bool:
    return (
        isinstance(messages, list)
        and len(messages) >= 2
        and all(isinstance(one, dict) and isinstance(one.get("content"), str) and "role" in one for one in messages)
    )
