"""Draft heads as students: EAGLE (Li et al. 2024) and EAGLE-3 (Li et al. 2025), one Llama layer of the target's sizes.

What is trained is the network that serves, with the target's embedding and head. It begins as a matrix from what the
head reads to the target's next state, and a layer that adds nothing yet. (The target's own last layer in its place was
worse: its inner activations are so large that the first steps destroy more than they teach.) EAGLE reads the corpus's
states; EAGLE-3 those that enter several layers, which the target computes anew for every batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from specserve.config import ModelConfig
from specserve.distill import closed_form
from specserve.distill.corpus import Example
from specserve.distill.students import Origin, Student, body_of, take
from specserve.distill.unrolling import Unrolled
from specserve.errors import ConfigError
from specserve.models import _head_folder, eagle, loading, trained_draft
from specserve.models._head_folder import HeadDescription

_ROWS_AT_ONCE = 4  # of a batch, in the target's forward
_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
_OTHERS = ("max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_parameters")


def layers_of(target: Any) -> tuple[int, ...]:
    """The layers that an EAGLE-3 head reads by default: 2, half of them, and the last but two."""
    return _head_folder.default_layers(len(body_of(target).layers))


class HeadStudent(Student):
    """A head of either generation: EAGLE without `read`, else EAGLE-3, which reads what enters these layers.

    Raises ConfigError for a target without a Llama's sizes or embedding, and for layers that there are not.
    """

    def __init__(self, target: Any, read: Sequence[int] = ()) -> None:
        super().__init__()
        body = body_of(target)
        if type(body.embed_tokens) is not nn.Embedding:
            raise ConfigError(f"{type(target).__name__} does more than look up its embedding, which heads do not know")
        self.told = _config(target.config, tuple(read), len(body.layers))
        self._read = tuple(read)
        network = _begun(self.told, body, self._read).to(target.dtype)
        network.embed_tokens, network.head = body.embed_tokens, nn.Identity()
        self.fc, self.layers, self.norm = network.fc, network.layers, network.norm
        self._frozen: tuple[eagle.Network, Any] = (network, body)  # no submodules: neither trained nor written
        self.to(target.device).requires_grad_(True)

    def unrolled(self, tokens: torch.Tensor, target_hidden: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
        """See `Student.unrolled`; the first token is never read, so the k-th tensor lacks k places."""
        network, store, n = self._frozen[0], Unrolled(len(tokens)), tokens.shape[1]
        hidden = network.fuse(self._shown(tokens, target_hidden)[:, :-1])
        for step in range(steps):
            places = torch.arange(step, n - 1, device=tokens.device).expand(len(tokens), -1)
            states = network(tokens[:, step + 1 :], hidden, places, store)
            yield network.norm(states)
            hidden = states[:, :-1]

    @torch.no_grad()
    def fit(self, examples: Iterable[Example]) -> None:
        """Set `fc` to the matrix from what it reads to the target's next state that fits these examples best."""
        self.fc.weight.copy_(closed_form.fitted(self._pair(example) for example in examples))

    def begin_at(self, folder: Path) -> torch.Tensor:
        """See `Student.begin_at`: a head as such are published, whose d2t says which ids it speaks of."""
        config = ModelConfig(source=str(folder))
        if not folder.is_dir() or not _head_folder.is_head(folder, config):
            raise ConfigError(f"training cannot begin at {folder}: it holds no EAGLE head")
        weights = _head_folder.read_weights(folder, config)
        weights.pop("t2d", None)
        offsets = weights.pop("d2t", None)
        if offsets is None:
            raise ConfigError(f"training cannot begin at {folder}: no d2t says which ids the head speaks of")
        embedding = self._frozen[0].embed_tokens.weight
        wanted = loading.read_model_config(folder).get(_head_folder.FINGERPRINT)
        if wanted not in (None, trained_draft.fingerprint(embedding)):
            raise ConfigError(f"training cannot begin at {folder}: the head was trained for another target")
        take(self, weights, folder)
        return torch.arange(len(offsets)) + offsets.long()

    def _pair(self, example: Example) -> tuple[torch.Tensor, torch.Tensor]:
        network, first = self._frozen[0], max(example.start - 1, 1)
        weight = network.fc.weight
        tokens, hidden = example.tokens[None].to(weight.device), example.hidden[None].to(weight)
        before, after = self._shown(tokens, hidden)[0, :-1], hidden[0, 1:]
        if self._read:
            unscaled = after / network.norm.get_parameter("weight")
            return before[first - 1 :], unscaled[first - 1 :]
        return torch.cat([network.embed_tokens(tokens[0, 1:]), before], -1)[first - 1 :], after[first - 1 :]

    @torch.no_grad()
    def _shown(self, tokens: torch.Tensor, target_hidden: torch.Tensor) -> torch.Tensor:
        """What the target shows at each place: [B, n, width], or the joined states [B, n, width · a] of `a` layers."""
        if not self._read:
            return target_hidden.to(self.fc.weight.dtype)
        parts = []
        for some in torch.split(tokens, _ROWS_AT_ONCE):
            states = self._frozen[1](input_ids=some, use_cache=False, output_hidden_states=True).hidden_states
            parts.append(torch.cat([states[layer] for layer in self._read], -1))
        return torch.cat(parts)

    def write(self, folder: Path, weights: Mapping[str, torch.Tensor], ids: torch.Tensor, origin: Origin) -> None:
        """See `Student.write`: a head as such are published, in float16, with d2t for its ids."""
        folder.mkdir(parents=True, exist_ok=True)
        vocab_size = self.told["vocab_size"]
        tensors = {self._published(name): weight.half().contiguous() for name, weight in weights.items()}
        tensors["d2t"] = ids.long() - torch.arange(len(ids))
        tensors["t2d"] = torch.isin(torch.arange(vocab_size), ids)
        save_file(tensors, folder / _head_folder.WEIGHTS)
        (folder / _head_folder.WEIGHTS).chmod(0o644)  # it is written for its owner only
        told = self.told | {
            "draft_vocab_size": len(ids),
            "dtype": "float16",
            "notes": f"specserve distill of {origin.target}, seed {origin.seed}",
            _head_folder.FINGERPRINT: trained_draft.fingerprint(self._frozen[0].embed_tokens.weight),
        }
        (folder / "config.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")

    def _published(self, name: str) -> str:
        return name.replace("layers.0.", "midlayer.", 1) if self._read else name


def _config(target: Any, read: tuple[int, ...], layers: int) -> dict[str, Any]:
    """config.json of a head: one Llama layer of the target's sizes."""
    told = {name: getattr(target, name, None) for name in (*_SIZES, *_OTHERS)}
    told = {name: value for name, value in told.items() if value is not None}
    if lacking := {"hidden_size", "intermediate_size", "num_attention_heads"} - set(told):
        raise ConfigError(
            f"the target's configuration names no {', '.join(sorted(lacking))}; no head can be made for it"
        )
    if not all(0 <= layer < layers for layer in read):
        raise ConfigError(f"layers {list(read)} are not all among the target's {layers}, which count from 0")
    told |= {"model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu", "tie_word_embeddings": False}
    told["architectures"] = ["LlamaForCausalLMEagle3" if read else "LlamaForCausalLMEagle"]
    return told | ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(read)}} if read else {})


def _begun(told: dict[str, Any], body: Any, read: tuple[int, ...]) -> eagle.Network:
    """A random network whose layer adds nothing yet: what is found in closed form is not disturbed."""
    described = HeadDescription(3 if read else 1, read, told["hidden_size"], 1, (), norm_first=False, llama=told)
    network = eagle.Network(eagle.llama_config(described), described, 1)
    for name in _OUTPUTS:
        nn.init.zeros_(network.layers[0].get_parameter(name))
    if read:
        network.norm.get_parameter("weight").data.copy_(body.norm.weight)
    return network
