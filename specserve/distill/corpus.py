"""What students learn from: token sequences and the target's hidden states at every position, in shards on disk.

With the hidden states the target's whole dist is one product away, so it is neither stored nor cut to a top-k.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence. tokens int64 [n]; hidden [n, width]: the target's normed last hidden state at each token.

    What a student is taught begins with the token at `start`; `answer` is the place of the first answer token.
    temperature is the one that the answer was drawn at.
    """

    tokens: torch.Tensor
    hidden: torch.Tensor
    start: int
    answer: int
    temperature: float


def write_shard(folder: Path, number: int, examples: Sequence[Example]) -> None:
    """Write one shard; a reader sees all of it or nothing."""
    final = folder / f"shard-{number:05d}.safetensors"
    partial = final.with_suffix(".partial")
    save_file(
        {
            "tokens": torch.cat([example.tokens for example in examples]).int(),
            "hidden": torch.cat([example.hidden for example in examples]),
            "lengths": torch.tensor([len(example.tokens) for example in examples]),
            "starts": torch.tensor([example.start for example in examples]),
            "answers": torch.tensor([example.answer for example in examples]),
            "temperatures": torch.tensor([example.temperature for example in examples]),
        },
        partial,
    )
    os.replace(partial, final)


def shards(folder: Path) -> list[Path]:
    """The finished shards, in order."""
    return sorted(folder.glob("shard-*.safetensors"))


def taught_tokens(path: Path) -> int:
    """How many tokens of a shard are taught."""
    with safe_open(path, "pt") as opened:
        return int(opened.get_tensor("lengths").sum() - opened.get_tensor("starts").sum())


def example_count(path: Path) -> int:
    """How many examples a shard holds."""
    with safe_open(path, "pt") as opened:
        return len(opened.get_tensor("lengths"))


def examples_of(paths: Iterable[Path]) -> Iterator[Example]:
    """The examples of these shards, one shard in memory at a time."""
    for path in paths:
        yield from read_shard(path)


def number_of(path: Path) -> int:
    """The number that a shard was written under."""
    return int(path.stem.rpartition("-")[2])


def read_shard(path: Path) -> list[Example]:
    """The examples of one shard, in order."""
    found = load_file(path)
    lengths = found["lengths"].tolist()
    columns = zip(
        found["tokens"].long().split(lengths),
        found["hidden"].split(lengths),
        found["starts"].tolist(),
        found["answers"].tolist(),
        found["temperatures"].tolist(),
        strict=True,
    )
    return [Example(*column) for column in columns]
