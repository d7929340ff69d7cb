"""What is trained, while the target's embedding and head stay frozen and shared: one class per kind of student."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from specserve.distill.corpus import Example
from specserve.errors import ConfigError
from specserve.models import trained_draft

_RIDGE = 3e-3  # of the mean diagonal of the Gram matrix


class Student(nn.Module, ABC):
    """A draft in training. Its parameters are what is trained and written; the embedding is not among them."""

    @abstractmethod
    def hidden(self, tokens: torch.Tensor, target_hidden: torch.Tensor) -> torch.Tensor:
        """States [B, n, width] for the target's head: place t speaks of the token after tokens[:, t].

        tokens int64 [B, n], padded at the end; target_hidden [B, n, width] is the target's at the same places, of which
        place t may read those before t.
        """


class SmallStudent(Student):
    """A model of the target's class with a few of its layers, and a matrix from its states to the target's.

    Training starts from the target's own layers, and from the matrix that `fit_readout` finds in closed form. Layers
    keep their numbers' order; training adapts them to their new neighbours.
    """

    def __init__(self, target: Any, layers: Sequence[int]) -> None:
        super().__init__()
        if not all(hasattr(getattr(target, "model", None), part) for part in ("layers", "norm", "embed_tokens")):
            raise ConfigError(
                f"{type(target).__name__} is not built of an embedding, layers and a norm; not trained yet"
            )
        known = len(target.model.layers)
        if not layers or not all(0 <= layer < known for layer in layers):
            raise ConfigError(f"layers {list(layers)} are not all among the target's {known}, which count from 0")
        config = trained_draft.shortened(target.config, layers)
        body = type(target.model)(config).to(target.dtype)
        for place, layer in zip(body.layers, layers, strict=True):
            place.load_state_dict(target.model.layers[layer].state_dict())
        body.norm.load_state_dict(target.model.norm.state_dict())
        self.layers, self.norm = body.layers, body.norm
        self.readout = nn.Linear(config.hidden_size, config.hidden_size, bias=False, dtype=target.dtype)
        nn.init.eye_(self.readout.weight)
        body.embed_tokens = target.model.embed_tokens
        self._body = (body,)  # in a tuple it is no submodule: the embedding is neither trained nor written
        self.to(target.device).requires_grad_(True)

    def hidden(self, tokens: torch.Tensor, target_hidden: torch.Tensor) -> torch.Tensor:
        """See `Student.hidden`; the target's states are not looked at."""
        del target_hidden
        found: torch.Tensor = self.readout(self._states(tokens))
        return found

    @torch.no_grad()
    def fit_readout(self, examples: Iterable[Example]) -> None:
        """Set the readout to the M that minimises ‖states · Mᵀ − the target's‖² + ridge ‖M‖² over these examples.

        To read a prediction off an early layer with a learned affine map is the tuned lens (Belrose et al. 2023).
        """
        gram = torch.zeros_like(self.readout.weight, dtype=torch.float64)
        cross = torch.zeros_like(gram)
        for example in examples:
            tokens = example.tokens[None].to(gram.device)
            states = self._states(tokens)[0, example.start - 1 :].double()
            gram += states.T @ states
            cross += states.T @ example.hidden[example.start - 1 :].to(states)
        gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
        self.readout.weight.copy_(torch.linalg.solve(gram, cross).T)

    def _states(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._body[0](input_ids=tokens, use_cache=False).last_hidden_state
        return found
