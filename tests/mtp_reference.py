"""What serial heads draft, worked out plainly: one sequence, everything read anew for every token, no cache.

Written from the description of multi-token prediction by DeepSeek-V3 (2024): head k joins the state of head k − 1 (the
target's for the first) at place i with the embedding of token i + k. Behind the last head it goes on with its own.
"""

from __future__ import annotations

from pathlib import Path

import torch
from heads_reference import Reference
from tiny_heads import HEADS, KV_HEADS
from tiny_mtp import Head
from transformers import AutoModelForCausalLM


class MtpReference(Reference):
    """Heads beside their target. pair: the next head gets the state before the norm, not the one behind it."""

    def __init__(self, target: Path, heads: list[Head], *, pair: bool) -> None:
        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.told = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5}
        self.theta = 10000.0
        self.third = False
        self.heads = heads
        self.pair = pair

    def _through(self, head: Head, tokens: list[int], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is read out and what is handed on, [n, width] each, for tokens and the states beside them."""
        self.weights = head
        embedded = self.target.get_input_embeddings().weight[tokens]
        both = torch.cat([self._norm(embedded, head["enorm"]), self._norm(states, head["hnorm"])], -1)
        joined = both @ head["eh_proj"].T
        found = self._layer("block.", self._norm(joined, head["block.input_layernorm.weight"]), joined)
        normed = self._norm(found, head["norm"])
        return normed, found if self.pair else normed

    @torch.no_grad()
    def drafts(self, tokens: list[int], states: torch.Tensor, depth: int, begin: int = 1) -> list[int]:
        """The chain behind these tokens, whose states and perhaps more are given."""
        assert begin == 1
        states = states[: len(tokens) - 1]
        drafted: list[int] = []
        for step in range(depth):
            number = min(step + 1, len(self.heads))
            normed, handed_on = self._through(self.heads[number - 1], [*tokens, *drafted][number:], states)
            drafted.append(int((self.target.lm_head.weight @ normed[-1]).argmax()))
            states = handed_on if number == step + 1 < len(self.heads) else torch.cat([states, handed_on[-1:]])
        return drafted


class AssistantReference(MtpReference):
    """A head at a constant position, as transformers runs it: over the keys and values that a fresh forward shares."""

    def __init__(self, target: Path, folder: Path) -> None:
        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.head = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.known = []

    @torch.no_grad()
    def read_target(self, tokens: list[int]) -> tuple[list[int], torch.Tensor]:
        """The target's own choice behind each token, and its states; its keys and values are kept for `drafts`."""
        found = self.target(
            torch.tensor([tokens]), output_hidden_states=True, return_shared_kv_states=True, use_cache=False
        )
        self.known.append((tokens, found.shared_kv_states))
        return found.logits[0].argmax(-1).tolist(), found.hidden_states[-1][0]

    @torch.no_grad()
    def drafts(self, tokens: list[int], states: torch.Tensor, depth: int, begin: int = 1) -> list[int]:
        """The chain behind these tokens: every step asks from the last one's place."""
        whole = next(kept for read, kept in self.known if read[: len(tokens)] == tokens)
        known = {kind: [each[:, :, : len(tokens) - 1] for each in pair] for kind, pair in whole.items()}
        state, drafted = states[len(tokens) - 2], [tokens[-1]]
        for _ in range(depth):
            embedded = self.target.get_input_embeddings()(torch.tensor(drafted[-1:]))
            found = self.head(
                inputs_embeds=torch.cat([embedded, state[None]], -1)[None],
                position_ids=torch.tensor([[len(tokens) - 1]]),
                attention_mask=None,
                shared_kv_states=known,
            )
            drafted.append(int(found.logits[0, -1].argmax()))
            state = found.last_hidden_state[0, -1]
        return drafted[1:]
