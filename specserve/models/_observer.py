"""Hidden states of a transformers model, caught on their way: its modules run unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specserve.errors import ConfigError


class Observer:
    """Keeps, of each forward over one flat row, the states that enter some layers, or else the last ones.

    The last states are those behind the final norm, which the head reads. Raises ConfigError for a model without the
    layers that are asked for.
    """

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        body = model.base_model
        blocks = getattr(body, "layers", ())
        if not all(0 <= layer < len(blocks) for layer in layers):
            raise ConfigError(f"the target has no layers {list(layers)}, whose states the draft reads")
        self._caught: dict[int, torch.Tensor] = {}
        self._order = list(dict.fromkeys(layers))
        self._layers = list(layers)
        for layer in self._order:
            blocks[layer].register_forward_pre_hook(self._entering(layer), with_kwargs=True)
        if not layers:
            self._layers = [_LAST]
            body.register_forward_hook(self._leaving)

    def _entering(self, layer: int) -> Any:
        def catch(_: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            states = inputs[0] if inputs else named["hidden_states"]
            self._caught[layer] = states[0]

        return catch

    def _leaving(self, _: Any, __: Any, output: Any) -> None:
        self._caught[_LAST] = output[0][0]

    def states(self) -> torch.Tensor:
        """[T, width · layers] of the last forward."""
        return torch.cat([self._caught[layer] for layer in self._layers], dim=-1)


_LAST = -1
