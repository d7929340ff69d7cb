"""The target writes its own corpus: user messages first, then the answers, in one batch that is always full.

That an instruction-tuned model writes prompts when it is given nothing but the head of a user turn is Magpie's
observation (Xu et al. 2024). Every row feeds one token per step, so rows at different places share one forward, a
row that ends is replaced at once, and the keys and values of the common head of all prompts stay where they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specserve.config import ModelConfig
from specserve.distill.corpus import Example
from specserve.distill.openings import opening
from specserve.errors import ConfigError
from specserve.models import _attention, loading

TEMPERATURES = (0.0, 0.0, 0.0, 0.0, 0.6, 0.8, 1.0)  # an answer's is one of these
MESSAGE_TEMPERATURE = 0.8
MESSAGE_TOKENS = (24, 48, 96, 160)  # a user message is cut at one of these
ANSWER_TOKENS = 176

_PIECE = 128  # positions
_BINS = 256


@dataclass(frozen=True, slots=True)
class Turn:
    """A chat template, cut where the user's message stands: token ids before it, after it, and what ends an answer."""

    head: list[int]
    tail: list[int]
    ends: frozenset[int]

    @staticmethod
    def of(folder: Path) -> Turn:
        """Read from a model folder."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        mark = "\u2603"
        if not tokenizer.chat_template:
            raise ConfigError(f"{folder} has no chat template, so it cannot write chats; give a file of text instead")
        chat = [{"role": "user", "content": mark}]
        before, after = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False).split(mark)
        head, tail = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))
        return Turn(head, tail, frozenset({tokenizer.eos_token_id}))


@dataclass(slots=True)
class _Row:
    """One sequence as it grows; `forced` are tokens that come before anything is drawn."""

    tokens: list[int]
    forced: list[int]
    message_end: int
    temperature: float
    answer: int = 0  # place of the first answer token, once the message has ended
    hidden: list[torch.Tensor] = field(default_factory=list)


class Writer:
    """Writes examples without end, the same ones for the same seed, target and number of rows."""

    def __init__(self, folder: Path, *, rows: int, seed: int, device: str = "auto") -> None:
        config = ModelConfig(source=str(folder), device=device, dtype="bfloat16")
        self._model = loading.load_model(folder, config, attention=_attention.NAME)
        self._turn = Turn.of(folder)
        self._tokenize = _tokenizer(folder)
        self._noise = random.Random(seed)
        self._torch_noise = torch.Generator().manual_seed(seed)
        self._store = _OnePerRow(rows, self._model.dtype, self._model.device)
        self._rows = [self._new_row(whole=True) for _ in range(rows)]

    @torch.inference_mode()
    def examples(self) -> Iterator[Example]:
        """Finished examples as they come; one step of all rows in between."""
        head_hidden: list[torch.Tensor] = []
        fed = 0
        while True:
            logits, hidden = self._step()
            if fed < len(self._turn.head):
                head_hidden.append(hidden[0])
                fed += 1
            drawn = self._draw(logits)
            for number, row in enumerate(self._rows):
                row.hidden.append(hidden[number])
                if self._advance(row, drawn[number]):
                    yield _example(row, len(self._turn.head))
                    self._rows[number] = self._new_row(whole=False)
                    self._rows[number].hidden += head_hidden[:-1]

    def _new_row(self, *, whole: bool) -> _Row:
        """A row whose head is fed anew, or but for its last token taken as already there."""
        head = self._turn.head
        start = self._tokenize(opening(self._noise))
        end = len(head) + len(start) + self._noise.choice(MESSAGE_TOKENS)
        tokens, forced = ([head[0]], head[1:] + start) if whole else (list(head), list(start))
        return _Row(tokens, forced, end, self._noise.choice(TEMPERATURES))

    def _step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed each row's last token: logits float32 [rows, V] and hidden [rows, width]."""
        positions = torch.tensor([len(row.tokens) - 1 for row in self._rows])
        tokens = torch.tensor([row.tokens[-1] for row in self._rows])
        device = self._model.device
        tokens, positions = tokens.to(device), positions.to(device)
        self._store.at(positions)
        hidden = self._model.model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, paged=self._store
        ).last_hidden_state[0]
        return self._model.lm_head(hidden).float().cpu(), hidden.cpu()

    def _draw(self, logits: torch.Tensor) -> list[int]:
        greedy = logits.argmax(-1)
        temperatures = torch.tensor([row.temperature if row.answer else MESSAGE_TEMPERATURE for row in self._rows])
        warm = temperatures.nonzero().squeeze(1)
        dist = torch.softmax(logits[warm] / temperatures[warm, None], -1)
        greedy[warm] = _by_bins(dist, torch.rand(len(warm), generator=self._torch_noise))
        drawn: list[int] = greedy.tolist()
        return drawn

    def _advance(self, row: _Row, drawn: int) -> bool:
        """Append the next token; whether the row has ended."""
        if row.forced:
            row.tokens.append(row.forced.pop(0))
            return False
        if not row.answer and (drawn in self._turn.ends or len(row.tokens) >= row.message_end):
            row.answer = len(row.tokens) + len(self._turn.tail)
            row.tokens.append(self._turn.tail[0])
            row.forced = self._turn.tail[1:]
            return False
        row.tokens.append(drawn)
        return bool(row.answer) and (drawn in self._turn.ends or len(row.tokens) >= row.answer + ANSWER_TOKENS)


class _OnePerRow:
    """A `KeyValueStore` for steps of one token in each of n rows.

    Keys and values lie in pieces [n · kv_heads, positions, dim] of neighbouring positions: torch copies what it
    multiplies in a batch unless that is contiguous, and a step looks at no more pieces than it must.
    """

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._pieces = 0
        self._piece = self._place = torch.zeros(rows, dtype=torch.int64, device=device)
        self._mask = torch.empty(0)

    def at(self, positions: torch.Tensor) -> None:
        """The next step writes at these positions, one in each row."""
        self._pieces = int(positions.max()) // _PIECE + 1
        self._piece, self._place = positions // _PIECE, positions % _PIECE
        hidden = torch.arange(self._pieces * _PIECE, device=positions.device) > positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=positions.device)
        self._mask = mask.masked_fill_(hidden, float("-inf"))[:, None]

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
        """See `KeyValueStore.attend`; explicit products, as torch's fused ones are three times slower in bfloat16.

        Raises ConfigError for what is not done here.
        """
        if softcap is not None or (window is not None and window < self._pieces * _PIECE):
            raise ConfigError("a target with capped scores or short windows cannot write its own corpus; give a file")
        pieces = self._written(layer, key, value)
        rows, heads, dim = query.shape
        grouped = query.view(rows * key.shape[1], -1, dim)
        scores = torch.cat([torch.bmm(grouped, keys.transpose(1, 2)) for keys, _ in pieces], -1)
        masked = scores.view(rows, heads, -1) * (scaling or dim**-0.5) + self._mask
        weights = torch.split(torch.softmax(masked, -1).view(scores.shape), _PIECE, -1)
        attended = sum(torch.bmm(weight, values) for weight, (_, values) in zip(weights, pieces, strict=True))
        return torch.as_tensor(attended).reshape(rows, heads, -1)

    def _written(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The layer's pieces after the new keys and values [n, kv_heads, dim] were put into them."""
        pieces = self._kept.setdefault(layer, [])
        while len(pieces) < self._pieces:
            pieces.append((_empty(key), _empty(value)))
        for number in torch.unique(self._piece).tolist():
            here = (self._piece == number).nonzero().squeeze(1)
            for kept, new in zip(pieces[number], (key, value), strict=True):
                kept.view(len(new), -1, *kept.shape[1:])[here, :, self._place[here]] = new[here]
        return pieces[: self._pieces]


def _empty(new: torch.Tensor) -> torch.Tensor:
    return new.new_zeros(new.shape[0] * new.shape[1], _PIECE, new.shape[2])


def _by_bins(dist: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """One token per row of dist [n, V] by inverse transform of uniforms [n]: first the bin, then the place in it."""
    padded = torch.nn.functional.pad(dist, (0, -dist.shape[1] % _BINS)).view(len(dist), -1, _BINS)
    masses = padded.sum(-1).cumsum(-1)
    point = noise * masses[:, -1]
    chosen = torch.searchsorted(masses, point[:, None]).clamp_(max=masses.shape[1] - 1)
    below = torch.where(chosen > 0, masses.gather(1, (chosen - 1).clamp(min=0)), torch.zeros(1))
    inside = padded[torch.arange(len(dist)), chosen[:, 0]].cumsum(-1)
    place = torch.searchsorted(inside, (point[:, None] - below).clamp(min=0)).clamp_(max=_BINS - 1)
    return (chosen * _BINS + place).squeeze(1).clamp_(max=dist.shape[1] - 1)


def _example(row: _Row, start: int) -> Example:
    """The last token was never fed, so it is left out of the hidden states and of the example alike."""
    hidden = torch.stack(row.hidden)
    return Example(torch.tensor(row.tokens[: len(hidden)]), hidden, start, row.answer, row.temperature)


def _tokenizer(folder: Path) -> Callable[[str], list[int]]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    return ids
