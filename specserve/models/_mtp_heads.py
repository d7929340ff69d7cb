"""Serial heads at advancing positions (MTP; DeepSeek-V3, 2024; Megatron-LM): each joins a token with a state and reads
both with a layer of the target's kind that has keys and values of its own.

Head i reads token p together with what stands one position before: the target's last state for head 0, the state of
head i − 1 for the others. So its first place is position i + 1, and what it keeps depends on tokens up to its own only.
Step s of a chain is head s; behind the last head it is the last one again, which goes on from its own states.

As trained, head i has seen every token that the others have, one later each; so it is fed them all, also what this
round's earlier heads drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from specserve.errors import ConfigError
from specserve.models import _attention, _linear, _mtp_layout
from specserve.models._mtp_layout import MtpDescription
from specserve.models._pages import LayerLayout, LayoutProbe, PagedStep, Pages
from specserve.models._row_groups import RaggedPlan
from specserve.models._serial_heads import StatePages, Tail, width_of
from specserve.models._stretches import Stretch, ragged
from specserve.models.paged_transformers import PagedTransformers


def load(target: PagedTransformers, folder: Path) -> AdvancingHeads:
    """The heads in a folder, mostly the target's own. Raises ConfigError where there are none, or they do not fit."""
    config = target.model.config.get_text_config()
    description, names = _mtp_layout.find(folder, config.num_hidden_layers)
    _mtp_layout.check_width(names, config.hidden_size)
    network = _Network(target.model, config, description)
    try:
        network.load_state_dict(_mtp_layout.read(names, config))
    except (RuntimeError, ValueError) as error:
        told = " ".join(str(error).split())[:500]
        raise ConfigError(f"the multi-token-prediction heads in {folder} do not fit its layers: {told}") from None
    return AdvancingHeads(target, network, description)


def _layers_config(config: Any, heads: int) -> Any:
    """The target's configuration, for `heads` more of its layers, numbered from 0."""
    config = deepcopy(config)
    config.num_hidden_layers = heads
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = ["full_attention"] * heads
    if getattr(config, "mlp_layer_types", None) is not None:
        config.mlp_layer_types = [config.mlp_layer_types[-1]] * heads
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    config._attn_implementation = _attention.NAME
    return config


class _Head(nn.Module):
    """One head: from embeddings and states [1, T, width] to the layer's states, before the norm."""

    def __init__(self, layer: nn.Module, norms: Sequence[nn.Module], width: int) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.norm = norms
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = layer

    def forward(self, embedded: torch.Tensor, states: torch.Tensor, **shared: Any) -> torch.Tensor:
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(states)], -1))
        found = self.block(joined, attention_mask=None, **shared)
        result: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return result


class _Network(nn.Module):
    """All heads of a target, made of its own kinds of layer and norm. Holds none of the target's modules."""

    def __init__(self, model: Any, config: Any, description: MtpDescription) -> None:
        super().__init__()
        body, width = model.base_model, config.hidden_size
        layer_kind, norm_kind = type(body.layers[-1]), type(body.norm)
        own = _layers_config(config, description.heads)
        self.heads = nn.ModuleList(
            _Head(layer_kind(own, i), [norm_kind(width, eps=config.rms_norm_eps) for _ in range(3)], width)
            for i in range(description.heads)
        )


class AdvancingHeads:
    """`SerialHeads` beside a target on the same device, in its dtype."""

    def __init__(self, target: PagedTransformers, network: _Network, description: MtpDescription) -> None:
        model = target.model
        network = network.eval().requires_grad_(False).to(model.device, model.dtype)
        _linear.speed_up(network)
        self._heads = [each for each in network.heads if isinstance(each, _Head)]
        self._embed, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        self._rotary = model.base_model.rotary_emb
        self._pair = description.pair
        self._count = description.heads
        self._device, self._dtype = model.device, model.dtype
        self._width = width_of(target)
        self._layouts = self._discover()
        self._pages: Pages | None = None
        self._states: list[StatePages] = []

    @property
    def fed(self) -> int:
        """Every head is fed every token."""
        return self._count

    def bytes_per_position(self) -> int:
        """Keys and values of each head, the target's state, and those of all heads but the last."""
        kept = sum(layout.bytes_per_position for layout in self._layouts.values())
        states: int = self._count * self._width * self._dtype.itemsize
        return kept + states

    def allocate(self, target: PagedTransformers, blocks: int, block_tokens: int) -> None:
        """See `SerialHeads`. Raises ConfigError when the device has no room."""
        like = torch.empty(0, dtype=self._dtype, device=self._device)
        try:
            self._pages = Pages(self._layouts, blocks, block_tokens, self._device)
            self._states = [StatePages(blocks, block_tokens, self._width, like) for _ in range(self._count)]
        except RuntimeError as error:
            size = blocks * block_tokens * self.bytes_per_position() / 2**30
            raise ConfigError(f"no room for {size:.2f} GiB of what the heads keep on {self._device}: {error}") from None

    def _allocated(self) -> Pages:
        if self._pages is None:
            raise ConfigError("heads were asked for a step before their pages were allocated")
        return self._pages

    def copy_blocks(self, sources: Sequence[int], copies: Sequence[int]) -> None:
        """See `SerialHeads`."""
        self._allocated().copy_blocks(sources, copies)
        for kept in self._states:
            kept.copy_blocks(sources, copies)

    def keep(self, plan: RaggedPlan, states: torch.Tensor) -> None:
        """See `SerialHeads`."""
        self._states[0].put(plan.new_slots, states)

    @torch.inference_mode()
    def read(self, step: int, tails: Sequence[Tail], before: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See `SerialHeads`."""
        head = min(step, self._count - 1)
        if step < self._count:
            stretches, before = [each for tail in tails if (each := _fed(tail, head + 1))], None
        else:
            stretches = [_newest(tail) for tail in tails if tail.wanted]
        if not stretches:
            return torch.empty(0, 0), torch.empty(0, self._width)
        batch = ragged(stretches)
        pages, origins = self._allocated(), np.full(len(stretches), head + 1, dtype=np.int64)
        plan = RaggedPlan(batch, pages.block_tokens, self._dtype, self._device, origins)
        places = torch.from_numpy(batch.positions).to(self._device)[None]
        before = self._states[head].get(plan.before()) if before is None else before.to(self._dtype)
        tokens = torch.from_numpy(batch.tokens).to(self._device)[None]
        states = self._run(head, tokens, before[None], places, PagedStep(pages, plan))
        normed = self._heads[head].norm(states)
        handed_on = states if self._pair else normed
        if step + 1 < self._count:
            self._states[step + 1].put(plan.new_slots, handed_on)
        wanted = torch.from_numpy(batch.wanted).to(self._device)
        return self._head(normed[wanted]).float(), handed_on[wanted]

    def _run(
        self,
        head: int,
        tokens: torch.Tensor,
        before: torch.Tensor,
        places: torch.Tensor,
        store: _attention.KeyValueStore,
    ) -> torch.Tensor:
        """States [T, width] of one head, before its norm."""
        embedded = self._embed(tokens)
        turned = self._rotary(embedded, position_ids=places)
        found: torch.Tensor = self._heads[head](
            embedded, before, position_embeddings=turned, position_ids=places, paged=store
        )
        return found[0]

    @torch.inference_mode()
    def _discover(self) -> dict[int, LayerLayout]:
        """Learn from one tiny forward what each head keeps."""
        probe = LayoutProbe()
        two = torch.arange(2, device=self._device)[None]
        before = torch.zeros(1, 2, self._width, dtype=self._dtype, device=self._device)
        for head in range(self._count):
            self._run(head, two, before, two, probe)
        return dict(sorted(probe.layouts.items()))


def _fed(tail: Tail, first: int) -> Stretch | None:
    """All of a tail from position `first` on; None where it ends before. A whole chain's last token has no place."""
    begin = max(tail.start, first)
    tokens = [*tail.feed.tolist(), *(tail.drafted if tail.wanted else ())][begin - tail.start :]
    return Stretch(begin, tokens, tail.table, int(tail.wanted)) if tokens else None


def _newest(tail: Tail) -> Stretch:
    """The last drafted token of a tail."""
    position = tail.start + len(tail.feed) + len(tail.drafted) - 1
    return Stretch(position, tail.drafted[-1:], tail.table, 1)
