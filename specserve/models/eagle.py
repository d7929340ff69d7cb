"""Draft heads that go on from their target's hidden states: EAGLE (Li et al. 2024) and EAGLE-3 (Li et al. 2025).

Where an ordinary model reads a token, a head reads it together with the state that the target had one position
before. Behind drafted tokens there is no such state yet; the head's own takes its place. EAGLE joins both to one
vector, reads it with a Llama layer and hands the result to the target's head. EAGLE-3 lets the attention of its layer
read both side by side, takes the states that enter several of the target's layers, joined, and has a norm and a head
of its own, often for a part of the vocabulary.

Pages and attention are those of `paged_transformers`. Positions are counted as everywhere, but rotated as the
checkpoints were trained: the pair of token p and state p − 1 stands at p − 1. On a GPU the usual steps are recorded and
replayed (`_head_graphs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from specserve.config import ModelConfig
from specserve.errors import ConfigError
from specserve.models import RaggedBatch, _attention, _head_folder, _linear, _rope, _rounded_layers, loading
from specserve.models._head_folder import HeadDescription
from specserve.models._head_graphs import HeadGraphs, of_head
from specserve.models._native_decoder import Anatomy, NativeDecoder
from specserve.models._pages import LayerLayout, PagedStep
from specserve.models._recorded_model import RecordedModel
from specserve.models._recorder import Recorder
from specserve.models._reduced_head import ReducedHead
from specserve.models._row_groups import RaggedPlan
from specserve.models._step_graphs import StepGraphs, graph_bytes
from specserve.models._step_shapes import StepShape


def build(config: ModelConfig, folder: Path) -> EagleHead:
    """Load the folder that `loading.prepare` returned. Raises ConfigError for what cannot be served."""
    description = _head_folder.read_description(folder)
    weights = load_file(folder / _head_folder.WEIGHTS)
    dtype, device = getattr(torch, config.dtype), loading.device_of(config)
    try:
        network = Network(llama_config(description), description, len(weights["embed_tokens.weight"]))
        network.take(weights)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"the weights in {folder} do not fit its config.json: {error}") from None
    network = network.eval().requires_grad_(False).to(dtype)
    if config.quantization in ("int8", "fp8"):
        _rounded_layers.round_weights(network, config.quantization, device)
    return EagleHead(network.to(device), description, config.context_length)


def llama_config(description: HeadDescription) -> Any:
    """A head's transformers configuration."""
    told = {name: value for name, value in description.llama.items() if name not in ("architectures", "model_type")}
    config = LlamaConfig(**told | {"num_hidden_layers": description.layers, "tie_word_embeddings": False})
    config._attn_implementation = _attention.NAME
    return config


class _SideBySide(nn.Module):
    """EAGLE-3's layer: attention reads the normed token and the normed state side by side."""

    def __init__(self, config: Any, norm_first: bool) -> None:
        super().__init__()
        width = config.hidden_size
        self.input_layernorm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * width, rows, bias=False))
        self.mlp = LlamaMLP(config)
        self.norm_first = norm_first

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, **shared: Any) -> torch.Tensor:
        normed = self.hidden_norm(hidden)
        base = normed if self.norm_first else hidden
        attended, _ = self.self_attn(
            hidden_states=torch.cat([self.input_layernorm(embedded), normed], -1), attention_mask=None, **shared
        )
        states = base + attended
        result: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return result


class Network(nn.Module):
    """The layers of a head, of either generation, for ids below vocab_size; random until weights are taken.

    Raises ValueError for a head of an unknown kind.
    """

    def __init__(self, config: Any, described: HeadDescription, vocab_size: int) -> None:
        super().__init__()
        width = config.hidden_size
        self._side_by_side = described.generation == 3
        self.embed_tokens = nn.Embedding(vocab_size, width)
        self.fc = nn.Linear(described.read_width if self._side_by_side else 2 * width, width, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        if self._side_by_side:
            if described.layers != 1:
                raise ValueError(f"an EAGLE-3 head of {described.layers} layers is not known")
            self.layers = nn.ModuleList([_SideBySide(config, described.norm_first)])
            self.norm: nn.Module = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        else:
            self.layers = nn.ModuleList([LlamaDecoderLayer(config, layer) for layer in range(described.layers)])
            self.layers[0].input_layernorm = nn.Identity()
            self.norm = nn.Identity()
        self._biased = described.biased
        self.head: nn.Module = nn.Identity()

    def take(self, weights: dict[str, torch.Tensor]) -> None:
        """Load all weights under their names in the folder. Raises RuntimeError for weights that do not fit."""
        weights = dict(weights)
        ids, head = weights.pop("ids", None), weights.pop("lm_head.weight")
        for name in self._biased:
            owner = self.get_submodule(name.removesuffix(".bias"))
            owner.bias = nn.Parameter(torch.zeros_like(weights[name]))
        self.load_state_dict(weights)
        vocab_size = self.embed_tokens.num_embeddings
        self.head = _whole_head(head) if ids is None else ReducedHead(head, ids.long(), vocab_size)

    def fuse(self, read: torch.Tensor) -> torch.Tensor:
        """See `DraftHead`."""
        fused: torch.Tensor = self.fc(read) if self._side_by_side else read
        return fused

    def anatomy(self, layouts: Mapping[int, LayerLayout]) -> Anatomy:
        """Its parts, for the way that is one call."""
        parts = (self.embed_tokens.weight, self.rotary_emb, list(self.layers), layouts, self.norm, self.head)
        if not self._side_by_side:
            return Anatomy(*parts, entry=self.fc)
        layer: Any = self.layers[0]
        return Anatomy(*parts, beside=layer.hidden_norm, normed_first=layer.norm_first)

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor, places: torch.Tensor, store: Any) -> torch.Tensor:
        """States [1, T, width] from tokens and places int64 [1, T] and hidden [1, T, width]."""
        embedded = self.embed_tokens(tokens)
        shared = {"position_embeddings": self.rotary_emb(embedded, position_ids=places), "paged": store}
        if self._side_by_side:
            states: torch.Tensor = self.layers[0](embedded, hidden, **shared)
            return states
        states = self.fc(torch.cat([embedded, hidden], -1))
        for layer in self.layers:
            states = layer(states, **shared)
        return states


def _whole_head(weight: torch.Tensor) -> nn.Linear:
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    head.weight = nn.Parameter(weight)
    return head


class EagleHead(RecordedModel):
    """A `DraftHead` with KV pages of its own, and the parts of a `Backend` that loading it needs."""

    def __init__(self, network: Network, description: HeadDescription, context_length: int | None) -> None:
        config, weight = network.rotary_emb.config, network.embed_tokens.weight
        super().__init__(weight.device, weight.dtype, _rope.served_context(config, context_length))
        self._network = network
        self._description = description
        self._vocab_size, self._width = weight.shape
        _rope.freeze(network, self._context_length)
        _linear.speed_up(network)
        kv_heads = config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layout = LayerLayout(kv_heads, dim, dim, self._dtype, None)
        self._layouts = dict.fromkeys(range(description.layers), layout)
        self._native = NativeDecoder.of(network.anatomy(self._layouts))
        self._graphs: HeadGraphs | None = None

    @property
    def width(self) -> int:
        """See `DraftHead`."""
        return self._width

    @property
    def read_width(self) -> int:
        """See `DraftHead`."""
        return self._description.read_width

    def fuse(self, read: torch.Tensor) -> torch.Tensor:
        """See `DraftHead`."""
        return self._network.fuse(read.to(self._device, self._dtype))

    def allocate(self, blocks: int, block_tokens: int) -> None:
        """See `Backend`."""
        super().allocate(blocks, block_tokens)
        if self._native is not None:
            self._native.bind(self.pages)

    def plan_steps(self, shapes: Sequence[StepShape]) -> None:
        """See `RecordsSteps`."""
        super().plan_steps(of_head(shapes))

    def step_bytes(self, block_tokens: int) -> int:
        """See `RecordsSteps`."""
        if not self._planned:
            return 0
        config = self._network.rotary_emb.config
        return graph_bytes(
            self._planned,
            self._layouts.values(),
            block_tokens,
            vocab_size=self._vocab_size,
            heads=config.num_attention_heads,
            width=max(2 * self._width, config.intermediate_size),
            itemsize=self._dtype.itemsize,
        )

    def record_with(self, recorder: Recorder) -> Iterator[StepShape]:
        """`record_steps` by a way of one's own."""
        graphs = HeadGraphs(
            self._compute,
            self.pages,
            self._planned,
            recorder,
            width=self._width,
            vocab_size=self._vocab_size,
            null_block=self._null_block(),
            dtype=self._dtype,
            device=self._device,
        )
        yield from graphs.steps.record()
        self._graphs = graphs

    @property
    def graphs(self) -> StepGraphs | None:
        """The recorded steps, once there are any."""
        return None if self._graphs is None else self._graphs.steps

    @torch.inference_mode()
    def forward_from(
        self, batch: RaggedBatch, hidden: torch.Tensor, origins: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftHead`."""
        hidden = hidden.to(self._device, self._dtype)
        replayed = None if self._graphs is None else self._graphs.run(batch, hidden, origins)
        if replayed is not None:
            return replayed
        if self._native is not None:
            return self._native.run_from(batch, hidden, origins)
        pages = self.pages
        plan = RaggedPlan(batch, pages.block_tokens, self._dtype, self._device, origins)
        tokens, standing, wanted = (
            torch.from_numpy(each).to(self._device) for each in (batch.tokens, batch.standing(), batch.wanted)
        )
        return self._compute(tokens, standing, hidden, wanted, PagedStep(pages, plan))

    def _compute(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        wanted: torch.Tensor,
        store: _attention.KeyValueStore,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `HeadCompute`: the network's own way, all on its device."""
        states = self._network(tokens[None], hidden[None], positions[None] - 1, store)[0].index_select(0, wanted)
        logits: torch.Tensor = self._network.head(self._network.norm(states)).float()
        return logits, states
