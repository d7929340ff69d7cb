"""A head at a constant position, which reads the target's keys and values and keeps none (Gemma 4's assistants, 2026).

In every step it asks from the place of the newest committed token, over what the target has cached before it: the
layers have queries only, and read the target's last layer of their own kind (full or sliding attention). What changes
from step to step is the token and the state beside it: the target's last one at first, then the head's own, projected
back to the target's width. So a step gives a pair: one state for the logits, another to hand on.

A checkpoint is a folder of its own, model type `gemma4_assistant`; H is its width, T the target's, V the vocabulary:
pre_projection [H, 2 T] of (embedding by the target, state), post_projection [T, H], model.layers.i.… of a Gemma 4 layer
without k_proj, v_proj and their norms, model.norm [H], model.embed_tokens [V, H], which is the output layer too; with
use_ordered_embeddings masked_embedding.centroids [C, H] and token_ordering int [V], which choose the ids that are said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specserve.config import ModelConfig
from specserve.errors import ConfigError
from specserve.models import _attention, _linear, _rope, loading
from specserve.models._pages import Gathered, Pages, Scoring
from specserve.models._row_groups import RaggedPlan
from specserve.models._serial_heads import StatePages, Tail, width_of
from specserve.models._stretches import Stretch, ragged
from specserve.models.paged_transformers import PagedTransformers

_KINDS = ("gemma4_assistant",)


def is_assistant(folder: Path) -> bool:
    """Whether a model folder holds such a head. Raises ConfigError for what is no model folder."""
    return loading.read_model_config(folder).get("model_type") in _KINDS


def load(target: PagedTransformers, config: ModelConfig, folder: Path) -> ConstantHeads:
    """The head in a folder, beside its target of this configuration. Raises ConfigError where it does not fit."""
    layers = _layers_read(target)
    own = config.model_copy(update={"source": str(folder), "quantization": "none"})  # that is the target's
    model = loading.load_model(folder, own, _attention.NAME)
    width, wanted = width_of(target), int(model.config.backbone_hidden_size)
    if wanted != width:
        raise ConfigError(f"the head in {folder} is made for a target of width {wanted}, and this one is {width} wide")
    lacking = sorted(set(model.config.get_text_config().layer_types) - layers.keys())
    if lacking:
        raise ConfigError(f"the head in {folder} reads layers of kind {', '.join(lacking)}, which the target lacks")
    if model.vocab_size != target.vocab_size:
        raise ConfigError(f"the head in {folder} says {model.vocab_size} ids, and its target {target.vocab_size}")
    return ConstantHeads(target, model, layers)


def _layers_read(target: PagedTransformers) -> dict[str, int]:
    """By kind of attention, the target's layer whose keys and values are read: its last one that makes any."""
    config = target.model.config.get_text_config()
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is None:
        raise ConfigError(
            f"{config.model_type!r} does not say which layers share keys and values, so a head at a constant position "
            f"cannot read them; use a head that was made for this target"
        )
    return {
        kind: layer for layer, (kind, mode) in enumerate(zip(config.layer_types, modes, strict=True)) if mode != "reuse"
    }


class _Reading:
    """What the layers get as `paged`: the target's pages, to be read only."""

    def __init__(self, pages: Pages, plan: RaggedPlan, layers: Sequence[int]) -> None:
        self._pages = pages
        self._plan = plan
        self._layers = layers

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See `KeyValueStore.attend`; the layers have no keys and values of their own."""
        del key, value
        read = self._layers[layer]
        keys, values = self._pages.keys[read], self._pages.values[read]
        # The plan asks from one position earlier, and a head's window does not count the place that it asks from.
        reach = None if window is None else window + 1
        return Gathered().attend(query, keys, values, self._plan, reach, Scoring(scaling, softcap))


class ConstantHeads:
    """`SerialHeads`: one head, used in every step."""

    def __init__(self, target: PagedTransformers, model: Any, layers: Mapping[str, int]) -> None:
        told = model.config.get_text_config()
        _rope.freeze(model, target.context_length)
        _linear.speed_up(model.model)
        self._model = model
        self._target = target
        self._kinds = list(dict.fromkeys(told.layer_types))
        self._layers = [layers[kind] for kind in told.layer_types]
        self._embed = target.model.get_input_embeddings()
        self._device, self._dtype = target.model.device, target.model.dtype
        self._width = width_of(target)
        self._states: StatePages | None = None

    @property
    def fed(self) -> int:
        """It keeps nothing of tokens."""
        return 0

    def bytes_per_position(self) -> int:
        """The target's state."""
        size: int = self._width * self._dtype.itemsize
        return size

    def allocate(self, target: PagedTransformers, blocks: int, block_tokens: int) -> None:
        """See `SerialHeads`. Raises ConfigError for keys of another size than the head's queries."""
        for layer, read in enumerate(self._layers):
            queries, keys = self._model.model.layers[layer].self_attn.head_dim, target.pages.keys[read]
            if keys.shape[2] != queries:
                raise ConfigError(
                    f"layer {layer} of the head asks with {queries} numbers, and the keys of the target's layer {read} "
                    f"have {keys.shape[2]}; was it made for another target?"
                )
        like = torch.empty(0, dtype=self._dtype, device=self._device)
        self._states = StatePages(blocks, block_tokens, self._width, like)

    def _allocated(self) -> StatePages:
        if self._states is None:
            raise ConfigError("a head was asked for a step before its pages were allocated")
        return self._states

    def copy_blocks(self, sources: Sequence[int], copies: Sequence[int]) -> None:
        """See `SerialHeads`."""
        self._allocated().copy_blocks(sources, copies)

    def keep(self, plan: RaggedPlan, states: torch.Tensor) -> None:
        """See `SerialHeads`."""
        self._allocated().put(plan.new_slots, states)

    @torch.inference_mode()
    def read(self, step: int, tails: Sequence[Tail], before: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See `SerialHeads`."""
        del step
        # The newest token stands one position behind the last one that the target has cached.
        batch = ragged([_asking(tail) for tail in tails if tail.wanted])
        plan = RaggedPlan(batch, self._target.pages.block_tokens, self._dtype, self._device)
        states = self._allocated().get(plan.new_slots) if before is None else before.to(self._dtype)
        embedded = self._embed(torch.from_numpy(batch.tokens).to(self._device))
        places = torch.from_numpy(batch.positions + 1).to(self._device)
        asked = self._model.pre_projection(torch.cat([embedded, states], -1))
        nothing = asked.new_empty(1, 1, 0, 1)
        found = self._model.model(
            inputs_embeds=asked[None],
            position_ids=places[None],
            attention_mask=dict.fromkeys(self._kinds),
            shared_kv_states=dict.fromkeys(self._kinds, (nothing, nothing)),
            use_cache=False,
            logits_to_keep=places,  # anything but a number: all rows are wanted
            paged=_Reading(self._target.pages, plan, self._layers),
        ).last_hidden_state
        return self._logits(found)[0].float(), self._model.post_projection(found)[0]

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """Of states [1, m, H]."""
        output = self._model.lm_head
        ordered = self._model.masked_embedding
        logits: torch.Tensor = output(states) if ordered is None else ordered(states, output.weight)
        return logits


def _asking(tail: Tail) -> Stretch:
    """The newest token of a tail, where the last committed token before it is cached."""
    token = [*tail.feed[-1:].tolist(), *tail.drafted][-1:]
    return Stretch(tail.start + len(tail.feed) - 2, token, tail.table, 1)
