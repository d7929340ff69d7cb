"""The forward of Llama and its nearest kin on a CPU as one call of C (`native/decoder.c`), from ids to logits.

At batch 1 small operators and the way through Python between them take as long as half of reading the weights; in one
call, and with threads that meet without sleeping, they take next to nothing. Keys and values are read in the pages
where they are. What each token gets is added up in an order of its own, so its bits are the same in any company.

Structures mirror those of C, field by field.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers.activations import SiLUActivation

from specserve.errors import ConfigError
from specserve.models import RaggedBatch, _linear, _panels
from specserve.models._pages import LayerLayout, Pages
from specserve.models._panels import Product
from specserve.models._reduced_head import ReducedHead
from specserve.native import addresses

Array = npt.NDArray[Any]
_Pointer, _Number, _Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_Fields = Sequence[tuple[str, Any]]


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _CLayer(ctypes.Structure):
    _fields_: ClassVar[_Fields] = (
        *_fields(Product, "query key value output gate up down"),
        *_fields(_Pointer, "before between query_norm key_norm keys values"),
        ("window", _Number),
    )


class _CDecoder(ctypes.Structure):
    _fields_: ClassVar[_Fields] = (
        *_fields(_Number, "layers width heads kv_heads dim inner vocabulary block_tokens normed_first ids blocks"),
        *_fields(_Float, "epsilon scaling rope_scaling unused"),
        *_fields(_Pointer, "embedding frequencies norm beside head_ids each"),
        *_fields(Product, "entry head"),
    )


class _CStep(ctypes.Structure):
    _fields_: ClassVar[_Fields] = (
        *_fields(_Number, "count rows wanted lasting widest shown threads"),
        *_fields(_Pointer, "tokens positions standing straight offsets origins chosen going path_ends tables paths"),
        *_fields(_Pointer, "shown_layers given logits entering last told"),
    )


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The parts of a decoder, as modules.

    Of a head that goes on from given states: entry makes one state of an embedding and a given one; or else the only
    layer reads both `beside` each other, normed by that, and its sums go on from the given ones, normed first or not.
    """

    embedding: torch.Tensor
    rotary: Any
    layers: Sequence[Any]
    layouts: Mapping[int, LayerLayout]
    norm: nn.Module
    head: nn.Module
    entry: nn.Module | None = None
    beside: nn.Module | None = None
    normed_first: bool = False


class NativeDecoder:
    """A model's layers as C reads them, and the steps through them. `bind` comes before the first step."""

    def __init__(self, anatomy: Anatomy, library: ctypes.CDLL) -> None:
        self._library = library
        library.specserve_step_room.restype = _Number
        library.specserve_step_room.argtypes = (_Pointer, _Pointer)
        library.specserve_step.argtypes = (_Pointer, _Pointer, _Pointer)
        self._anatomy = anatomy  # C reads its tensors
        self._kept: list[torch.Tensor] = []
        each = [self._layer(layer, anatomy.layouts[index]) for index, layer in enumerate(anatomy.layers)]
        self._layers = (_CLayer * len(each))(*each)
        self._decoder = self._whole(anatomy)
        self._room = torch.empty(0, dtype=torch.uint8)
        self._shown_layers: Array | None = None
        self._shown: torch.Tensor | None = None

    @staticmethod
    def of(anatomy: Anatomy) -> NativeDecoder | None:
        """None where there is no compiler, or a part is not what C computes."""
        library = _panels.kernels()
        products = [] if anatomy.entry is None else [anatomy.entry]
        products.append(anatomy.head.part if isinstance(anatomy.head, ReducedHead) else anatomy.head)
        if library is None or not all(map(_is_native, products)) or not all(map(_is_known, anatomy.layers)):
            return None
        plain = all(layout.key_dim == layout.value_dim for layout in anatomy.layouts.values())
        whole_heads = 2 * len(anatomy.rotary.inv_freq) == anatomy.layouts[0].key_dim
        return NativeDecoder(anatomy, library) if plain and whole_heads else None

    def bind(self, pages: Pages) -> None:
        """The pages that steps write and read from now on."""
        self._decoder.block_tokens = pages.block_tokens
        self._decoder.blocks = len(pages.keys[0]) // pages.block_tokens
        for index, layer in enumerate(self._layers):
            layer.keys, layer.values = pages.keys[index].data_ptr(), pages.values[index].data_ptr()

    def observe(self, layers: Sequence[int]) -> None:
        """See `ShowsHidden`."""
        if not all(0 <= layer < len(self._layers) for layer in layers):
            raise ConfigError(f"the target has no layers {list(layers)}, whose states the draft reads")
        self._shown_layers = np.array(layers, dtype=np.int64)

    def observed(self) -> torch.Tensor:
        """See `ShowsHidden`."""
        if self._shown is None:
            raise ConfigError("the backend was asked for hidden states that nobody observes")
        return self._shown

    def run(self, batch: RaggedBatch) -> torch.Tensor:
        """Write the batch's keys and values; float32 logits [m, vocab_size] of the wanted tokens."""
        logits, going, outlets = self._logits(batch), batch.wanted, {}
        if self._shown_layers is not None:
            width = self._decoder.width * max(1, len(self._shown_layers))
            self._shown = torch.empty(len(batch.tokens), width)
            outlets["entering" if len(self._shown_layers) else "last"] = self._shown.data_ptr()
            if not len(self._shown_layers):
                going = _wanted_or_seen(batch)
        self._step(batch, batch.standing(), np.zeros(len(batch.tables), np.int64), going, logits, outlets)
        return logits

    def run_from(self, batch: RaggedBatch, hidden: torch.Tensor, origins: Array) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for a head that goes on from hidden states; see `DraftHead.forward_from`."""
        if hidden.shape != (len(batch.tokens), self._decoder.width):
            raise IndexError(f"{len(batch.tokens)} tokens go on from states {list(hidden.shape)}")
        hidden = hidden.contiguous()
        given = addresses.of_tensor("hidden states", hidden, torch.float32, len(batch.tokens) * self._decoder.width)
        logits, states = self._logits(batch), torch.empty(len(batch.wanted), self._decoder.width)
        outlets = {"given": given, "told": states.data_ptr()}
        self._step(batch, batch.standing() - 1, origins, batch.wanted, logits, outlets)
        return logits, states

    def _logits(self, batch: RaggedBatch) -> torch.Tensor:
        return torch.empty(len(batch.wanted), self._decoder.vocabulary)

    def _step(
        self,
        batch: RaggedBatch,
        standing: Array,
        origins: Array,
        going: Array,
        logits: torch.Tensor,
        outlets: dict[str, int],
    ) -> None:
        """going: flat indices of the tokens of which anything is wanted behind all layers."""
        count, rows = len(batch.tokens), len(batch.tables)
        arrays = {
            "tokens": (batch.tokens, count),
            "positions": (batch.positions, count),
            "standing": (standing, count),
            "offsets": (batch.offsets, rows + 1),
            "origins": (origins, rows),
            "chosen": (batch.wanted, len(batch.wanted)),
            "going": (going, len(going)),
            "tables": (batch.tables, rows * batch.tables.shape[1]),
        }
        packed = {name: (np.ascontiguousarray(array), length) for name, (array, length) in arrays.items()}
        pointers = {name: _address(name, array, length) for name, (array, length) in packed.items()}
        sights = _sights(batch)
        pointers |= {
            name: _address(name, array, len(array) if name == "paths" else count) for name, array in sights.items()
        }
        if self._shown_layers is not None:
            pointers["shown_layers"] = _address("shown layers", self._shown_layers, len(self._shown_layers))
        step = _CStep(
            count=count,
            rows=rows,
            wanted=len(batch.wanted),
            lasting=len(going),
            widest=batch.tables.shape[1],
            shown=0 if self._shown_layers is None else len(self._shown_layers),
            threads=torch.get_num_threads(),
            logits=logits.data_ptr(),
            **pointers,
            **outlets,
        )
        decoder, now = ctypes.addressof(self._decoder), ctypes.addressof(step)
        needed = self._library.specserve_step_room(decoder, now)
        if needed < 0:
            self._refuse(batch, origins)
        if needed > len(self._room):
            self._room = torch.empty(needed, dtype=torch.uint8)
        self._library.specserve_step(decoder, now, self._room.data_ptr())

    def _refuse(self, batch: RaggedBatch, origins: Array) -> NoReturn:
        """Say what C refused, which would read and write where these point. Raises IndexError, as torch does."""
        count, rows = len(batch.tokens), len(batch.tables)
        if batch.offsets[0] != 0 or batch.offsets[-1] != count or (np.diff(batch.offsets) < 1).any():
            raise IndexError(f"{rows} rows from {batch.offsets.tolist()} do not share {count} tokens out")
        firsts, lasts = batch.positions[batch.offsets[:-1]], batch.positions[batch.offsets[1:] - 1]
        used = lasts // self._decoder.block_tokens + 1
        _refuse_outside("token ids", batch.tokens, len(self._anatomy.embedding))
        _refuse_outside("wanted tokens", batch.wanted, count)
        if batch.seen is not None:
            _refuse_outside("tokens whose states are read", batch.seen, count)
        if (np.diff(batch.wanted) < 1).any():
            raise IndexError(f"wanted tokens must rise, found {batch.wanted.tolist()}")
        _refuse_outside("positions", batch.positions, batch.tables.shape[1] * self._decoder.block_tokens)
        _refuse_outside("blocks", batch.tables[np.arange(batch.tables.shape[1]) < used[:, None]], self._decoder.blocks)
        raise IndexError(
            f"positions of a row do not follow each other, or begin before 0: {firsts.tolist()} to {lasts.tolist()} "
            f"for {np.diff(batch.offsets).tolist()} tokens, read from {origins.tolist()}"
        )

    def _whole(self, anatomy: Anatomy) -> _CDecoder:
        layer, layout = self._layers[0], anatomy.layouts[0]
        reduced = anatomy.head if isinstance(anatomy.head, ReducedHead) else None
        head = _part(anatomy.head if reduced is None else reduced.part)
        return _CDecoder(
            layers=len(self._layers),
            width=layer.output.outputs,
            heads=layer.query.outputs // layout.key_dim,
            kv_heads=layout.kv_heads,
            dim=layout.key_dim,
            inner=layer.gate.outputs,
            vocabulary=head.outputs if reduced is None else reduced.vocab_size,
            epsilon=anatomy.layers[0].post_attention_layernorm.variance_epsilon,
            scaling=anatomy.layers[0].self_attn.scaling,
            rope_scaling=anatomy.rotary.attention_scaling,
            embedding=self._pointer(anatomy.embedding),
            frequencies=self._pointer(anatomy.rotary.inv_freq.float()),
            norm=self._weight(anatomy.norm),
            beside=self._weight(anatomy.beside),
            normed_first=anatomy.normed_first,
            ids=len(anatomy.embedding),
            head_ids=None if reduced is None else self._pointer(reduced.ids),
            each=ctypes.addressof(self._layers),
            entry=Product() if anatomy.entry is None else _part(anatomy.entry),
            head=head,
        )

    def _layer(self, layer: Any, layout: LayerLayout) -> _CLayer:
        attention, mlp = layer.self_attn, layer.mlp
        query, key, value = _parts(_linear.joint_product(attention.q_proj))
        gate, up = _parts(_linear.joint_product(mlp.gate_proj))
        return _CLayer(
            query=query,
            key=key,
            value=value,
            output=_part(attention.o_proj),
            gate=gate,
            up=up,
            down=_part(mlp.down_proj),
            before=self._weight(layer.input_layernorm),
            between=self._weight(layer.post_attention_layernorm),
            query_norm=self._weight(getattr(attention, "q_norm", None)),
            key_norm=self._weight(getattr(attention, "k_norm", None)),
            window=layout.window or 0,
        )

    def _weight(self, norm: Any) -> int | None:
        """Where a norm's weight is; None where there is no norm, or one that does nothing."""
        return None if norm is None or isinstance(norm, nn.Identity) else self._pointer(norm.weight)

    def _pointer(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1].data_ptr()


def _address(name: str, array: Array, length: int) -> int:
    dtype = np.int32 if name in ("tables", "paths") else np.int64
    return addresses.of_array(name, array, dtype, length)


def _refuse_outside(what: str, numbers: Array, end: int) -> None:
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= end):
        raise IndexError(f"{what} must be within 0 and {end - 1}, found {numbers.min()} to {numbers.max()}")


def _wanted_or_seen(batch: RaggedBatch) -> Array:
    """Flat indices of the tokens of which logits or hidden states are wanted, ascending."""
    if batch.seen is None or len(batch.seen) == len(batch.tokens):
        return np.arange(len(batch.tokens))
    return np.union1d(batch.wanted, batch.seen)


def _sights(batch: RaggedBatch) -> dict[str, Array]:
    """What tokens see beside their tables: see `step` in native/decoder.c."""
    straight = batch.positions + 1
    if not batch.trees:
        return {"straight": straight}
    paths: list[Array] = [np.empty(0, np.int32)] * len(batch.tokens)
    for row, tree in batch.trees.items():
        on_path = tree.paths()
        for token in range(batch.offsets[row], batch.offsets[row + 1]):
            node = batch.positions[token] - tree.root
            if node >= 0:
                straight[token] = tree.root
                paths[token] = (tree.root + np.flatnonzero(on_path[node])).astype(np.int32)
    return {"straight": straight, "paths": np.concatenate(paths), "path_ends": np.cumsum([len(path) for path in paths])}


def _parts(layer: Any) -> Sequence[Product]:
    """The layers of a product that `_is_native`."""
    parts: Sequence[Product] = layer.panels.parts
    return parts


def _part(layer: nn.Module) -> Product:
    (product,) = _parts(layer)
    return product


def _is_native(layer: Any) -> bool:
    return isinstance(layer, _linear.PackedLinear) and layer.panels is not None


def _is_known(layer: Any) -> bool:
    joint = [_linear.joint_product(first) for first in (layer.self_attn.q_proj, layer.mlp.gate_proj)]
    products = [*joint, layer.self_attn.o_proj, layer.mlp.down_proj]
    return all(map(_is_native, products)) and isinstance(layer.mlp.act_fn, SiLUActivation | nn.SiLU)
