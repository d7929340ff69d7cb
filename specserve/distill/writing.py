"""The target writes its own corpus: user messages first, then the answers, in one batch that is always full.

That an instruction-tuned model writes prompts when it is given nothing but the head of a user turn is Magpie's
observation (Xu et al. 2024). Every row feeds one token per step, so rows at different places share one forward, a
row that ends is replaced at once, and the keys and values of the common head of all prompts stay where they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specserve.config import ModelConfig
from specserve.distill import steps
from specserve.distill.corpus import Example
from specserve.distill.openings import opening
from specserve.errors import ConfigError

TEMPERATURES = (0.0, 0.0, 0.0, 0.0, 0.6, 0.8, 1.0)  # an answer's is one of these
MESSAGE_TEMPERATURE = 0.8
OPENING_TOKENS = 48  # at most
MESSAGE_TOKENS = (6, 12, 24, 64)  # behind its opening, a user message ends with the sentence that reaches one of these
SENTENCE_TOKENS = 32  # such a sentence is cut here
ANSWER_TOKENS = 128
REPEATED_TOKENS = 16  # an answer ends where it says so many again

_BINS = 256


@dataclass(frozen=True, slots=True)
class Turn:
    """A chat template, cut where the user's message stands: token ids before it, after it, and what ends an answer.

    closing are the ids that end a sentence.
    """

    head: list[int]
    tail: list[int]
    ends: frozenset[int]
    closing: frozenset[int]

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
        texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
        closing = frozenset(token for token, text in enumerate(texts) if text.rstrip().endswith((".", "?", "!")))
        return Turn(head, tail, frozenset({tokenizer.eos_token_id}), closing)


@dataclass(slots=True)
class _Row:
    """One sequence as it grows; `forced` are tokens that come before anything is drawn."""

    tokens: list[int]
    forced: list[int]
    message_end: int
    temperature: float
    answer: int = 0  # place of the first answer token, once the message has ended


class Writer:
    """Writes examples without end, the same ones for the same seed, target, number of rows, and dtype configured."""

    def __init__(self, target: ModelConfig, *, rows: int, seed: int) -> None:
        folder = Path(target.source)
        self._turn = Turn.of(folder)
        longest = len(self._turn.head) + OPENING_TOKENS + max(MESSAGE_TOKENS) + SENTENCE_TOKENS
        self._longest = longest + len(self._turn.tail) + ANSWER_TOKENS
        self._steps = steps.of(target, rows, self._longest)
        self._tokenize = _tokenizer(folder)
        self._noise = random.Random(seed)
        self._torch_noise = torch.Generator().manual_seed(seed)
        self._rows = [self._new_row(whole=True) for _ in range(rows)]

    @torch.inference_mode()
    def examples(self) -> Iterator[Example]:
        """Finished examples as they come; one step of all rows in between."""
        every, kept = torch.arange(len(self._rows)), torch.empty(0)
        while True:
            positions = torch.tensor([len(row.tokens) - 1 for row in self._rows])
            tokens = torch.tensor([row.tokens[-1] for row in self._rows])
            logits, hidden = self._steps.run(tokens, positions)
            if not len(kept):
                kept = hidden.new_empty(len(every), self._longest, hidden.shape[1])
            kept[every, positions] = hidden  # those of the head stay for the texts that come after
            for number, drawn in enumerate(self._draw(logits)):
                row = self._rows[number]
                if self._advance(row, drawn):
                    yield _example(row, len(self._turn.head), kept[number])
                    self._rows[number] = self._new_row(whole=False)

    def _new_row(self, *, whole: bool) -> _Row:
        """A row whose head is fed anew, or but for its last token taken as already there."""
        head = self._turn.head
        chosen = opening(self._noise)
        start = self._tokenize(chosen.text)[:OPENING_TOKENS]
        end = len(head) + len(start) + self._noise.choice(MESSAGE_TOKENS)
        tokens, forced = ([head[0]], head[1:] + start) if whole else (list(head), list(start))
        row = _Row(tokens, forced, end, self._noise.choice(TEMPERATURES))
        if chosen.whole:
            row.forced += self._turn.tail
            row.answer = len(head) + len(start) + len(self._turn.tail)
        return row

    def _draw(self, logits: torch.Tensor) -> list[int]:
        greedy = logits.argmax(-1)
        temperatures = torch.tensor([row.temperature if row.answer else MESSAGE_TEMPERATURE for row in self._rows])
        warm = temperatures.nonzero().squeeze(1)
        if len(warm):
            dist = torch.softmax(logits[warm] / temperatures[warm, None], -1)
            greedy[warm] = _by_bins(dist, torch.rand(len(warm), generator=self._torch_noise))
        drawn: list[int] = greedy.tolist()
        return drawn

    def _advance(self, row: _Row, drawn: int) -> bool:
        """Append the next token; whether the row has ended."""
        if row.forced:
            row.tokens.append(row.forced.pop(0))
            return False
        if not row.answer and self._ends_message(row, drawn):
            row.forced = self._turn.tail if drawn in self._turn.ends else [drawn, *self._turn.tail]
            row.answer = len(row.tokens) + len(row.forced)
            row.tokens.append(row.forced[0])
            row.forced = row.forced[1:]
            return False
        row.tokens.append(drawn)
        return bool(row.answer) and (drawn in self._turn.ends or _is_over(row.tokens[row.answer :]))

    def _ends_message(self, row: _Row, drawn: int) -> bool:
        beyond = len(row.tokens) + 1 - row.message_end
        closed = beyond >= 0 and drawn in self._turn.closing
        return drawn in self._turn.ends or closed or beyond >= SENTENCE_TOKENS


def _is_over(answer: list[int]) -> bool:
    """Whether it is as long as answers get, or says again what it said: a small target goes in circles from there."""
    if len(answer) >= ANSWER_TOKENS:
        return True
    last = answer[-REPEATED_TOKENS:]
    firsts = range(len(answer) - REPEATED_TOKENS)
    return any(answer[first] == last[0] and answer[first : first + REPEATED_TOKENS] == last for first in firsts)


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


def _example(row: _Row, start: int, hidden: torch.Tensor) -> Example:
    """The last token was never fed, so it is left out of the hidden states and of the example alike."""
    fed = len(row.tokens) - 1
    return Example(torch.tensor(row.tokens[:fed]), hidden[:fed].clone(), start, row.answer, row.temperature)


def _tokenizer(folder: Path) -> Callable[[str], list[int]]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    return ids
