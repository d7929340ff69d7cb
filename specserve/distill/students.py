"""What is trained, while the target's embedding and head stay frozen and shared: one file per kind of student."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specserve.distill.corpus import Example
from specserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a draft comes from: the target's source as in the configuration, and the seed of the run."""

    target: str
    seed: int


class Student(nn.Module, ABC):
    """A draft in training. Its parameters are what is trained and written; the embedding is not among them."""

    @abstractmethod
    def fit(self, examples: Iterable[Example]) -> None:
        """Begin with what can be found in closed form."""

    @abstractmethod
    def begin_at(self, folder: Path) -> torch.Tensor:
        """Begin with the weights of a draft that was trained before; the ids int64 [m] that it says, ascending.

        Raises ConfigError for a folder that holds no such draft of this kind, or one that does not fit.
        """

    @abstractmethod
    def unrolled(self, tokens: torch.Tensor, target_hidden: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
        """States for the target's head, a tensor for each drafted token of a chain; at most `steps`.

        Each is [B, n − lead, width] of the last n − lead places: place t speaks of the token after tokens[:, t]. A
        student to which a chain's later tokens are as the first yields once. tokens int64 [B, n], padded at the end;
        target_hidden [B, n, width] is the target's at the same places, and may be read before place t − k for the
        k-th tensor's place t, counted from 0.
        """

    @abstractmethod
    def write(self, folder: Path, weights: Mapping[str, torch.Tensor], ids: torch.Tensor, origin: Origin) -> None:
        """Write the folder that serve takes: these weights, by the names of the state dict, and ids int64 [m]."""


def take(student: Student, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Load these weights of a folder. Raises ConfigError unless they are the student's by names and shapes."""
    own = {name: list(weight.shape) for name, weight in student.state_dict().items()}
    given = {name: list(weight.shape) for name, weight in weights.items()}
    for name in sorted(own.keys() | given.keys()):
        if own.get(name) != given.get(name):
            raise ConfigError(
                f"training cannot begin at {folder}: its {name} is {given.get(name, 'not there')}, and what is to be "
                f"trained has {own.get(name, 'none')}; give the --kind, --layers and --target that it was trained with"
            )
    student.load_state_dict(dict(weights))


def body_of(target: Any) -> Any:
    """The target without its head. Raises ConfigError unless it is built of an embedding, layers and a norm."""
    body = getattr(target, "model", None)
    if not all(hasattr(body, part) for part in ("layers", "norm", "embed_tokens")):
        raise ConfigError(f"{type(target).__name__} is not built of an embedding, layers and a norm; not trained yet")
    return body
