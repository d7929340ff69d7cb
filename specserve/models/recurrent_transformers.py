"""Recurrent and hybrid transformers models (Mamba-2, and those that mix such layers with attention) as targets.

Attention layers read and write pages as in `paged_transformers`. Recurrent layers keep state per request (see
`_recurrent_state`): transformers' torch code for them knows no sequence boundaries in flat tokens, so only rows of
the same length share a forward, as its batch; every other row has its own. A verification is one forward per
length of chain, and one before it for rows of which a part was kept, whatever the depth.

Nothing here knows a family. Whether a model's own code does what is needed is found out by trying, at load: a short
text in pieces, with a rewind, must give the logits of the whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specserve.config import ModelConfig
from specserve.errors import ConfigError
from specserve.models import RaggedBatch, _attention, _refusals, _rope, loading
from specserve.models._paged_model import AttentionModel
from specserve.models._pages import LayerLayout, LayoutProbe, PagedStep
from specserve.models._recurrent_state import RecurrentStates, StateKind
from specserve.models._row_groups import RaggedPlan
from specserve.models._stretches import Stretch, ragged, stretches_of

_STATE_NAMES = ("conv_states", "recurrent_states")
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # newest transformers first
_PROOF_TOKENS = 12

States = list[torch.Tensor]
"""One tensor [L, B, *state] per kind, for the B rows of a forward."""


def build(config: ModelConfig, folder: Path) -> RecurrentTransformers:
    """Load the folder that `loading.prepare` returned. Raises ConfigError for what cannot be served."""
    _refusals.refuse_unservable(loading.load_model_config(folder, config), _refusals.RECURRENT_LAYER_TYPES)
    loading.apply_threads(config.threads)
    model = loading.load_model(folder, config, "eager")  # the only way of attending that all of them know
    return RecurrentTransformers(model, config.context_length)


class RecurrentTransformers(AttentionModel):
    """A `Backend` with row states. The model must be in eval mode; its attention and its rope factors are replaced.

    context_length None serves the length that the model was trained for, where its configuration names one.
    """

    def __init__(self, model: Any, context_length: int | None) -> None:
        _refusals.refuse_unservable(model.config, _refusals.RECURRENT_LAYER_TYPES)
        super().__init__(model.device, model.dtype, _rope.served_context(model.config, context_length))
        self._model = model
        self._config = model.config
        self._cache_name = _cache_name(model)
        self._continues = True  # the model's code reads several tokens at once from a given state
        _rope.freeze(model, self._context_length)
        own = self._own_logits()
        self._vocab_size = own.shape[-1]
        model.set_attn_implementation(_attention.NAME)
        self._layouts, kinds = self._discover()
        self._states = RecurrentStates(kinds, self._device)
        self._prove(own)

    @property
    def states(self) -> RecurrentStates:
        """The recurrent state of each request."""
        return self._states

    def make_batch_invariant(self) -> None:
        """Raises ConfigError always: the models' own code for recurrent layers is what runs."""
        raise ConfigError("batch_invariant is not there for targets with recurrent layers")

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Write the batch's KV and states and return float32 logits [m, vocab_size] of the wanted tokens.

        Raises ProtocolError where a row starts at a position that `states` does not cover.
        """
        _ = self.pages  # refused before any state changes
        for group in _alike(self._states.resume(batch)):
            self._read_again(group)
        rows = stretches_of(batch)
        logits: dict[int, torch.Tensor] = {}
        for group in _alike(rows):
            found = self._read(group)
            logits |= {stretch.owner: found[index] for index, stretch in enumerate(group)}
        return torch.cat([logits[row.owner] for row in rows]) if rows else self._no_logits()

    def _no_logits(self) -> torch.Tensor:
        return torch.empty(0, self._vocab_size, device=self._device)

    def _read_again(self, group: Sequence[Stretch]) -> None:
        """Bring the states of these rows to the end of tokens that were kept: no logits are wanted of them."""
        _, states = self._advance(group, self._before(group))
        self._states.advanced(group, states)

    def _read(self, group: Sequence[Stretch]) -> torch.Tensor:
        """float32 [B, wanted, vocab_size] of rows of one length."""
        logits, states = self._advance(group, self._before(group))
        self._states.read(group, states)
        return logits

    def _before(self, group: Sequence[Stretch]) -> States:
        slots = self._states.slots(group)
        return [before[:, slots] for before in self._states.before]

    def _advance(self, group: Sequence[Stretch], states: States) -> tuple[torch.Tensor, States]:
        """Logits [B, wanted, vocab_size] and the states after rows of one length, from the states before them."""
        if self._continues or group[0].start == 0:
            return self._step(group, states)
        found = []
        for at in range(len(group[0].tokens)):
            logits, states = self._step([_token(stretch, at) for stretch in group], states)
            found.append(logits)
        logits = torch.cat(found, dim=1)
        return logits[:, logits.shape[1] - group[0].wanted :], states

    def _step(self, group: Sequence[Stretch], states: States) -> tuple[torch.Tensor, States]:
        batch, pages = ragged(group), self.pages
        shape = (len(group), -1)
        cache = self._cache(states)
        plan = RaggedPlan(batch, pages.block_tokens, self._dtype, self._device)
        logits = self._run(
            batch.tokens.reshape(shape),
            batch.positions.reshape(shape),
            cache,
            PagedStep(pages, plan),
            group[0].wanted,
        )
        return logits, self._read_cache(cache)

    def _run(
        self, tokens: Any, positions: Any, cache: Any, store: _attention.KeyValueStore, wanted: int
    ) -> torch.Tensor:
        """float32 [B, wanted, vocab_size] of tokens and positions [B, T]."""
        output = self._model(
            input_ids=torch.from_numpy(tokens).to(self._device),
            position_ids=torch.from_numpy(positions).to(self._device),
            use_cache=True,
            logits_to_keep=max(wanted, 1),  # 0 stands for all
            paged=store,
            **{self._cache_name: cache},
        )
        logits: torch.Tensor = output.logits.float()
        return logits[:, logits.shape[1] - wanted :]

    # ---- transformers' cache: recurrent layers get our states, attention layers keep nothing of their own

    def _cache(self, states: States | None) -> Any:
        """A cache that begins with these states; None is one that knows nothing yet."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._config)
        for layer in cache.layers:
            if hasattr(layer, "keys"):
                layer.update = _as_they_are
        for kind, values in zip(self._states.kinds, states, strict=True) if states is not None else ():
            for at, (layer, index) in enumerate(kind.places):
                _begin_with(cache.layers[layer], kind.name, index, values[at])
        return cache

    def _read_cache(self, cache: Any) -> States:
        return [
            torch.stack([getattr(cache.layers[layer], kind.name)[index] for layer, index in kind.places])
            for kind in self._states.kinds
        ]

    # ---- what is found out at load

    @torch.inference_mode()
    def _own_logits(self) -> torch.Tensor:
        """The model's own logits [1, tokens, vocab_size] of a short text, by its own way of attending."""
        tokens = torch.from_numpy(_proof_tokens(self._config.vocab_size)).to(self._device)
        logits: torch.Tensor = self._model(input_ids=tokens[None], use_cache=False).logits.float()
        return logits

    @torch.inference_mode()
    def _discover(self) -> tuple[dict[int, LayerLayout], list[StateKind]]:
        """What each attention layer keeps per position, and each recurrent layer per request."""
        probe = LayoutProbe()
        cache = self._cache(None)
        two = np.arange(2, dtype=np.int64)[None]
        self._run(two, two, cache, probe, 1)
        windows = {layer: layout.window for layer, layout in probe.layouts.items()}
        _refusals.refuse_unseen_windows(self._config, windows)
        return dict(sorted(probe.layouts.items())), _kinds(cache)

    def _prove(self, own: torch.Tensor) -> None:
        """Raise ConfigError unless pieces give the logits of the whole, tokens one at a time if need be."""
        self.allocate(1, _PROOF_TOKENS)
        self._states.reserve(1)
        self._continues = self._agrees(own)
        if not self._continues and not self._agrees(own):
            raise ConfigError(
                f"{type(self._model).__name__} does not continue from a kept state as it should; it cannot be served"
            )
        self._pages = None

    def _agrees(self, own: torch.Tensor) -> bool:
        tolerance = max(1e-3, 16 * torch.finfo(self._dtype).eps)
        return bool((self._in_pieces() - own[0]).abs().mean() <= tolerance * own.std())

    def _in_pieces(self) -> torch.Tensor:
        """The short text's logits: a prompt of 5, a verification of 4 of which 2 stay, the rest."""
        tokens = _proof_tokens(self._config.vocab_size)
        table = np.zeros(1, np.int32)
        pieces = [Stretch(start, tokens[start:end], table, end - start, 0) for start, end in ((0, 5), (5, 9), (7, 12))]
        found = [self.forward(ragged([piece])) for piece in pieces]
        return torch.cat([found[0], found[1][:2], found[2]])


def _cache_name(model: Any) -> str:
    known = inspect.signature(model.forward).parameters
    for name in _CACHE_NAMES:
        if name in known and "logits_to_keep" in known:
            return name
    raise ConfigError(f"{type(model).__name__} takes no cache or cannot compute logits for chosen positions")


def _proof_tokens(vocab_size: int) -> Any:
    return (np.arange(_PROOF_TOKENS, dtype=np.int64) * 7919 + 11) % vocab_size


def _as_they_are(keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for a cache layer's `update`: pages keep the keys and values, and attention finds them there."""
    return keys, values


def _begin_with(layer: Any, name: str, index: int, values: torch.Tensor) -> None:
    getattr(layer, name)[index] = values
    getattr(layer, f"is_{name}_initialized")[index] = True
    layer.has_previous_state[index] = True
    layer.dtype, layer.device = values.dtype, values.device
    if name == "conv_states":
        layer.conv_kernel_size[index] = values.shape[-1]


def _kinds(cache: Any) -> list[StateKind]:
    """States of one shape over all layers of a cache that has seen one row."""
    places: dict[tuple[str, tuple[int, ...], torch.dtype], list[tuple[int, int]]] = {}
    for number, layer in enumerate(cache.layers):
        for name in _STATE_NAMES:
            for index, values in getattr(layer, name, {}).items():
                if values is not None:
                    places.setdefault((name, tuple(values.shape[1:]), values.dtype), []).append((number, index))
    return [StateKind(name, tuple(found), shape, dtype) for (name, shape, dtype), found in places.items()]


def _alike(stretches: Sequence[Stretch]) -> list[list[Stretch]]:
    """Rows of one length that want as many logits; those from position 0 by themselves."""
    groups: dict[tuple[int, int, bool], list[Stretch]] = {}
    for stretch in stretches:
        groups.setdefault((len(stretch.tokens), stretch.wanted, stretch.start == 0), []).append(stretch)
    return list(groups.values())


def _token(stretch: Stretch, at: int) -> Stretch:
    return Stretch(stretch.start + at, stretch.tokens[at : at + 1], stretch.table, 1, stretch.owner)
