"""A small model as student: a few of the target's layers, and a matrix from their states to the target's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specserve.distill import closed_form
from specserve.distill.corpus import Example
from specserve.distill.students import Origin, Student, body_of, take
from specserve.errors import ConfigError
from specserve.models import trained_draft


class SmallStudent(Student):
    """A model of the target's class with a few of its layers, and a matrix from its states to the target's.

    Training starts from the target's own layers, and from the matrix that `fit` finds in closed form. Layers keep their
    numbers' order; training adapts them to their new neighbours. Raises ConfigError for layers that there are not.
    """

    def __init__(self, target: Any, layers: Sequence[int]) -> None:
        super().__init__()
        whole = body_of(target)
        known = len(whole.layers)
        if not layers or not all(0 <= layer < known for layer in layers):
            raise ConfigError(f"layers {list(layers)} are not all among the target's {known}, which count from 0")
        config = trained_draft.shortened(target.config, layers)
        body = type(whole)(config).to(target.dtype)
        for place, layer in zip(body.layers, layers, strict=True):
            place.load_state_dict(whole.layers[layer].state_dict())
        body.norm.load_state_dict(whole.norm.state_dict())
        self.layers, self.norm = body.layers, body.norm
        self.readout = nn.Linear(config.hidden_size, config.hidden_size, bias=False, dtype=target.dtype)
        nn.init.eye_(self.readout.weight)
        body.embed_tokens = whole.embed_tokens
        self._body = (body,)  # in a tuple it is no submodule: the embedding is neither trained nor written
        self._numbers = tuple(layers)
        self.to(target.device).requires_grad_(True)

    def unrolled(self, tokens: torch.Tensor, target_hidden: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
        """See `Student.unrolled`: once, as the target's states are not looked at."""
        del target_hidden, steps
        yield self.readout(self._states(tokens))

    @torch.no_grad()
    def fit(self, examples: Iterable[Example]) -> None:
        """Set the readout to the matrix from the states to the target's that fits these examples best.

        To read a prediction off an early layer with a learned affine map is the tuned lens (Belrose et al. 2023).
        """
        self.readout.weight.copy_(closed_form.fitted(self._pair(example) for example in examples))

    def begin_at(self, folder: Path) -> torch.Tensor:
        """See `Student.begin_at`: a folder as in `trained_draft`, of the same of the target's layers."""
        described = trained_draft.read_description(folder)
        weights = trained_draft.read_weights(folder)
        trained_draft.check_embedding(folder, described, self._body[0].embed_tokens.weight)
        if described.layers != self._numbers:
            raise ConfigError(
                f"training cannot begin at {folder}: it began with the target's layers {list(described.layers)}, "
                f"and --layers says {list(self._numbers)}"
            )
        ids = weights.pop("ids").long()
        take(self, weights, folder)
        return ids

    def _pair(self, example: Example) -> tuple[torch.Tensor, torch.Tensor]:
        states = self._states(example.tokens[None].to(self.readout.weight.device))[0]
        return states[example.start - 1 :], example.hidden[example.start - 1 :].to(states)

    def _states(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._body[0](input_ids=tokens, use_cache=False).last_hidden_state
        return found

    def write(self, folder: Path, weights: Mapping[str, torch.Tensor], ids: torch.Tensor, origin: Origin) -> None:
        """See `Student.write`: a folder as in `trained_draft`, in bfloat16."""
        description = trained_draft.Description(
            target=origin.target,
            layers=self._numbers,
            fingerprint=trained_draft.fingerprint(self._body[0].embed_tokens.weight),
            notes=f"specserve distill, seed {origin.seed}",
        )
        narrow = {name: weight.bfloat16() for name, weight in weights.items()}
        trained_draft.write(folder, description, narrow | {"ids": ids.int()})
