"""The forward of Llama and its nearest kin on a CPU, over flat rows and with as few operators as it takes.

At batch 1 a step of a small model spends as long in Python and in operators on a few hundred numbers as a core needs
to read the weights, and while it does the other cores wait. So these models, whose layers are known to the last
operator, run here: one product for queries, keys and values, rotated together; one for gate and up; fused norms; no
masks. Weights, attention and rotary factors are the model's own, and all other models run as transformers has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import rms_norm

from specserve.models import _linear
from specserve.models._attention import KeyValueStore
from specserve.models._pages import LayerLayout

Ints = npt.NDArray[np.int64]

KIN = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
_HOME = "transformers.models."


class FlatDecoder:
    """One way through a model's layers; see the module."""

    def __init__(self, model: Any, layers: list[_Layer]) -> None:
        self._embedding: nn.Module = model.model.embed_tokens
        self._rotary: nn.Module = model.model.rotary_emb
        self._layers = layers
        self._norm = _Norm(model.model.norm)
        self._head: nn.Module = model.get_output_embeddings()

    @staticmethod
    def of(model: Any, layouts: Mapping[int, LayerLayout]) -> FlatDecoder | None:
        """The flat form of a model whose linear layers are packed, None for any other kind.

        layouts: what each layer keeps, and how far it sees.
        """
        kind = type(model)
        if kind.__name__ not in KIN or not kind.__module__.startswith(_HOME):
            return None
        if not all(_is_packed(layer) for layer in model.model.layers):
            return None
        return FlatDecoder(model, [_Layer(layer, layouts[index]) for index, layer in enumerate(model.model.layers)])

    def run(self, tokens: Ints, positions: Ints, wanted: Ints, store: KeyValueStore) -> torch.Tensor:
        """Keep the tokens' keys and values in `store`; float32 logits [m, vocab_size] of the wanted ones.

        tokens, positions [T]; wanted [m], flat indices.
        """
        hidden = self._embedding(torch.from_numpy(tokens))
        cosines, sines = self._rotary(hidden[None], torch.from_numpy(positions)[None])
        rotation = Rotation(cosines[0], sines[0])
        for layer in self._layers:
            hidden = layer.run(hidden, rotation, store)
        logits: torch.Tensor = self._head(self._norm(hidden[torch.from_numpy(wanted)]))
        return logits.float()


class Rotation:
    """A forward's rotary factors, laid out for all heads of all layers. cosines, sines [T, dim]."""

    def __init__(self, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        self._half = cosines.shape[-1] // 2
        self._cosines = cosines[:, None]
        # The halves change places, and the one that comes to the front its sign.
        self._sines = torch.cat((-sines[:, : self._half], sines[:, self._half :]), dim=-1)[:, None]

    def of(self, heads: torch.Tensor) -> torch.Tensor:
        """heads [T, any number, dim], each turned by its token's angle (Su et al. 2021)."""
        swapped = torch.cat((heads[..., self._half :], heads[..., : self._half]), dim=-1)
        return torch.addcmul(heads * self._cosines, swapped, self._sines)


class _Norm:
    def __init__(self, norm: Any) -> None:
        self.weight: torch.Tensor = norm.weight
        self.epsilon: float = norm.variance_epsilon

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rms_norm(rows, self.weight.shape, self.weight, self.epsilon)


class _Layer:
    def __init__(self, layer: Any, layout: LayerLayout) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._index: int = attention.layer_idx
        self._window = layout.window
        self._scaling: float = attention.scaling
        self._dim: int = attention.head_dim
        self._kv_heads = layout.kv_heads  # of this process; the configuration tells those of all ranks
        self._heads: int = layout.kv_heads * attention.num_key_value_groups
        self._head_norms = _HeadNorms(attention, self._heads, self._kv_heads) if hasattr(attention, "q_norm") else None
        self._before, self._between = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._queries_keys_values = _product(attention.q_proj)
        self._output: nn.Module = attention.o_proj
        self._gate_up, self._down, self._activation = _product(mlp.gate_proj), mlp.down_proj, mlp.act_fn

    def run(self, hidden: torch.Tensor, rotation: Rotation, store: KeyValueStore) -> torch.Tensor:
        """hidden [T, width] → the same shape."""
        hidden = hidden + self._output(self._attended(self._before(hidden), rotation, store))
        gate, up = self._gate_up(self._between(hidden)).chunk(2, dim=-1)
        result: torch.Tensor = hidden + self._down(self._activation(gate) * up)
        return result

    def _attended(self, rows: torch.Tensor, rotation: Rotation, store: KeyValueStore) -> torch.Tensor:
        heads = self._queries_keys_values(rows).view(len(rows), -1, self._dim)
        turned = heads[:, : self._heads + self._kv_heads]
        if self._head_norms is not None:
            turned = self._head_norms(turned)
        turned = rotation.of(turned)
        attended = store.attend(
            self._index,
            turned[:, : self._heads],
            turned[:, self._heads :],
            heads[:, self._heads + self._kv_heads :],
            scaling=self._scaling,
            window=self._window,
            softcap=None,
        )
        return attended.reshape(len(rows), -1)


class _HeadNorms:
    """Queries and keys normed head by head, as in Qwen 3, in one go."""

    def __init__(self, attention: Any, heads: int, kv_heads: int) -> None:
        query, key = _Norm(attention.q_norm), _Norm(attention.k_norm)
        self._weight = torch.cat((query.weight.expand(heads, -1), key.weight.expand(kv_heads, -1)))
        self._epsilon = query.epsilon

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        return rms_norm(heads, heads.shape[-1:], eps=self._epsilon) * self._weight


def _is_packed(layer: Any) -> bool:
    firsts = (layer.self_attn.q_proj, layer.mlp.gate_proj)
    return all(_linear.joint_product(first) is not None for first in firsts)


def _product(first: nn.Module) -> _linear.PackedLinear:
    product = _linear.joint_product(first)
    assert product is not None, "checked by _is_packed"
    return product
