"""What a draft head drafts, worked out plainly: one sequence, everything read anew for every token, no cache.

`AheadReference` does so for what is drafted ahead of verdicts, from what the draft worker was told.

Written from the papers' descriptions (EAGLE, Li et al. 2024; EAGLE-3, Li et al. 2025) on the checkpoint's own names.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def _rotated(rows: torch.Tensor, theta: float) -> torch.Tensor:
    """Rows [heads, n, dim] at places 0 … n − 1."""
    dim = rows.shape[-1]
    angles = torch.arange(rows.shape[1])[:, None] / theta ** (torch.arange(0, dim, 2) / dim)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    turned = torch.cat([-rows[..., dim // 2 :], rows[..., : dim // 2]], -1)
    return rows * cos + turned * sin


class Reference:
    """A head beside its target. `third` tells EAGLE-3 from EAGLE."""

    def __init__(self, target: Path, folder: Path, *, third: bool) -> None:
        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.told = json.loads((folder / "config.json").read_text())
        self.theta = self.told.get("rope_theta") or self.told["rope_parameters"]["rope_theta"]
        found = load_file(folder / "model.safetensors")
        self.weights = {name: each.float() if each.is_floating_point() else each for name, each in found.items()}
        self.third = third

    def _norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.told["rms_norm_eps"])

    def _own(self, name: str, instead: torch.Tensor) -> torch.Tensor:
        return self.weights.get(name, instead)

    @torch.no_grad()
    def read_target(self, tokens: list[int]) -> tuple[list[int], torch.Tensor]:
        """The target's own choice behind each token, and what it shows there: [n, width], or several layers' states."""
        found = self.target(torch.tensor([tokens]), output_hidden_states=True)
        choices = found.logits[0].argmax(-1).tolist()
        if not self.third:
            return choices, found.hidden_states[-1][0]
        layers = self.told["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        return choices, torch.cat([found.hidden_states[layer][0] for layer in layers], -1)

    def _layer(self, prefix: str, read: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        """A Llama layer whose attention reads `read`, added to `base`; both [n, …]."""
        heads, kv_heads = self.told["num_attention_heads"], self.told["num_key_value_heads"]
        at = f"{prefix}self_attn."
        query, key, value = ((read @ self.weights[f"{at}{each}_proj.weight"].T) for each in "qkv")
        split = [rows.view(len(rows), count, -1).transpose(0, 1) for rows, count in
                 ((query, heads), (key, kv_heads), (value, kv_heads))]  # fmt: skip
        query, key = (_rotated(each, self.theta) for each in split[:2])
        key, value = (each.repeat_interleave(heads // kv_heads, 0) for each in (key, split[2]))
        scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
        scores += torch.full(scores.shape[1:], -torch.inf).triu(1)
        attended = (scores.softmax(-1) @ value).transpose(0, 1).reshape(len(read), -1)
        states = base + attended @ self.weights[f"{at}o_proj.weight"].T
        normed = self._norm(states, self.weights[f"{prefix}post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(normed @ self.weights[f"{prefix}mlp.gate_proj.weight"].T)
        inner = gate * (normed @ self.weights[f"{prefix}mlp.up_proj.weight"].T)
        return states + inner @ self.weights[f"{prefix}mlp.down_proj.weight"].T

    def read(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """The head's states [n, width] for tokens and the states before them."""
        own = self.target.get_input_embeddings().weight
        embedded = self._own("embed_tokens.weight", own)[tokens]
        if self.third:
            normed = self._norm(hidden, self.weights["midlayer.hidden_norm.weight"])
            token = self._norm(embedded, self.weights["midlayer.input_layernorm.weight"])
            return self._layer("midlayer.", torch.cat([token, normed], -1), hidden)
        states = torch.cat([embedded, hidden], -1) @ self.weights["fc.weight"].T + self.weights.get("fc.bias", 0.0)
        layer = 0
        while f"layers.{layer}.self_attn.q_proj.weight" in self.weights:
            norm = self.weights.get(f"layers.{layer}.input_layernorm.weight")
            states = self._layer(f"layers.{layer}.", states if norm is None else self._norm(states, norm), states)
            layer += 1
        return states

    def _head(self) -> torch.Tensor:
        if "lm_head.weight" in self.weights or "d2t" not in self.weights:
            return self._own("lm_head.weight", self.target.lm_head.weight)
        offsets = self.weights["d2t"]
        return self.target.lm_head.weight[torch.arange(len(offsets)) + offsets]

    def normed(self, state: torch.Tensor) -> torch.Tensor:
        """What the output layer reads of a state."""
        return self._norm(state, self.weights["norm.weight"]) if self.third else state

    def ranking(self, state: torch.Tensor) -> list[int]:
        """The ids that may be said, likeliest first."""
        ids = (self._head() @ self.normed(state)).argsort(descending=True)
        return (ids + self.weights["d2t"][ids] if "d2t" in self.weights else ids).tolist()

    def _says(self, state: torch.Tensor) -> int:
        return self.ranking(state)[0]

    def shown(self, states: torch.Tensor) -> torch.Tensor:
        """What the head reads of the states that the target shows."""
        return states @ self.weights["fc.weight"].T if self.third else states

    @torch.no_grad()
    def chain(self, tokens: list[int], shown: torch.Tensor, base: int, depth: int) -> list[torch.Tensor]:
        """The head's states at place `base` and behind it; all but the first are read with its own before them."""
        hidden = self.shown(shown)[:base]
        found: list[torch.Tensor] = []
        for place in range(base, base + depth):
            found.append(self.read(tokens[1 : place + 1], hidden)[-1])
            hidden = torch.cat([hidden, found[-1][None]])
        return found

    @torch.no_grad()
    def drafts(self, tokens: list[int], states: torch.Tensor, depth: int, begin: int = 1) -> list[int]:
        """The chain behind these tokens, whose states and perhaps more are given. Reading begins at token `begin`."""
        hidden = self.shown(states[begin - 1 : len(tokens) - 1])
        read = list(tokens[begin:])
        drafted: list[int] = []
        for _ in range(depth):
            new = self.read(read, hidden)[-1]
            drafted.append(self._says(new))
            read.append(drafted[-1])
            hidden = torch.cat([hidden, new[None]])
        return drafted


class AheadReference:
    """What a head drafts ahead of verdicts. answers: by row all tokens and the states that the target shows at them.

    A text that was read is a list of (token, state it was read with), from the second token on.
    """

    def __init__(self, head: Reference, answers: dict[int, tuple[list[int], torch.Tensor]]) -> None:
        self.head = head
        self.committed = {
            row: list(zip(tokens[1:], head.shown(states[:-1]), strict=True))
            for row, (tokens, states) in answers.items()
        }
        self.trunks: dict[int, list] = {}  # what was read last of each row
        self.branches: dict[int, list] = {}  # by slot, what was read in the branch that it belongs to
        self.states: dict[int, torch.Tensor] = {}  # by slot, what its token was picked from
        self.plans: dict[int, int] = {}  # by slot, the last plan that drafted there

    def _behind(self, read: list) -> torch.Tensor:
        tokens, states = zip(*read, strict=True)
        return self.head.read(list(tokens), torch.stack(states))[-1]

    @torch.no_grad()
    def follow(self, row: int, start: int, base: int, chain: list[int], slots: list[int], behind: tuple[int, int]):
        """Feed a trunk; returns what was read of it, and the states that its outcomes' next tokens are picked from."""
        next_slot, next_plan = behind
        read = self.branches[slots[0]] if chain else self.trunks.get(row, self.committed[row])
        known = next_slot >= 0 and self.plans.get(next_slot) == next_plan
        read = read[: base + len(chain) - 1 if known else start - 1]
        if not known:
            read += self.committed[row][start - 1 : base - 1]
            fed = len(read) + 1 - base  # of the chain
            read += [(token, self.states[slot]) for token, slot in zip(chain[fed:], slots[fed:], strict=True)]
        assert [token for token, _ in read] == [token for token, _ in self.committed[row][: base - 1]] + chain
        self.trunks[row] = read
        return read, [*(self.states[slot] for slot in slots), self.states[next_slot] if known else self._behind(read)]

    @torch.no_grad()
    def grow(self, plan: int, read: list, guess: int, state: torch.Tensor, slots: list[int]) -> list[int]:
        """The tokens drafted behind a guess, which is read with this state, in these slots."""
        read = [*read, (guess, state)]
        drafted = []
        for slot in slots:
            self.states[slot] = self._behind(read)
            self.branches[slot], self.plans[slot] = read, plan
            drafted.append(self.head.ranking(self.states[slot])[0])
            read.append((drafted[-1], self.states[slot]))
        return drafted
