"""Log-probabilities for those who ask: what the target itself thinks of tokens, before any sampling option.

The rows of logits that matter are turned into log-softmax before processors write into them; which tokens they are
asked for is known after the rules have spoken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specserve.sampling import host
from specserve.transport.messages import Array, Scores
from specserve.verification._rows import Row


class Scorer:
    """The scores of one round. logits [m, V] are those of `Row.looked_at`, row after row."""

    def __init__(self, rows: Sequence[Row], logits: torch.Tensor, vocab_size: int) -> None:
        self._rows = rows
        self._vocab_size = vocab_size
        self._first: dict[int, int] = {}
        wanted: list[int] = []
        at = 0
        for row in rows:
            kinds = (row.profile.logprobs is not None and row.due, row.prompt_tokens > 0)
            if any(kinds):
                self._first[row.index] = len(wanted)
                wanted += range(at, at + row.looked_at)
            at += row.looked_at
        self._logs: torch.Tensor | None = None  # where nobody asks
        if wanted:
            places = host.send(torch.tensor(wanted), logits.device)
            self._logs = torch.log_softmax(logits[places, :vocab_size], -1)

    def emitted(self, last: Array, chosen: Array) -> Scores:
        """The scores of the kept and chosen tokens of each due row that asked.

        last int64 [n] is the last kept drafted token, −1 for none; chosen int64 [n].
        """
        if self._logs is None:
            return Scores.none()
        asked: list[tuple[Row, Sequence[int], list[int]]] = []
        for row in self._rows:
            if row.due and row.profile.logprobs is not None:
                node, offset = int(last[row.index]), row.looked_at - len(row.chain) - 1
                tokens = [*row.tokens_to(node), int(chosen[row.index])]
                asked.append((row, [offset, *[offset + 1 + each for each in row.path(node)]], tokens))
        return self._scores(self._logs, asked, [row.profile.logprobs or 0 for row in self._rows])

    def prompt(self) -> Scores:
        """The scores of the prompt tokens after each fed one, of each row that asked."""
        if self._logs is None:
            return Scores.none()
        asked: list[tuple[Row, Sequence[int], list[int]]] = []
        for row in self._rows:
            if row.prompt_tokens:
                after = row.start + 1
                tokens = list(row.profile.prompt[after : after + row.prompt_tokens])
                asked.append((row, range(len(tokens)), tokens))
        return self._scores(self._logs, asked, [row.profile.prompt_logprobs or 0 for row in self._rows])

    def _scores(
        self, all_logs: torch.Tensor, asked: Sequence[tuple[Row, Sequence[int], list[int]]], widths: Sequence[int]
    ) -> Scores:
        """Score these tokens, each from one of its row's logits, and the alternatives beside them."""
        if not asked:
            return Scores.none()
        lengths = np.zeros(len(self._rows), dtype=np.int32)
        places: list[int] = []
        for row, seen, tokens in asked:
            lengths[row.index] = len(tokens)
            begin = self._first[row.index]
            places += [begin + each for each in seen]
        ids = host.send(torch.tensor([token for _, _, tokens in asked for token in tokens]), all_logs.device)
        logs = all_logs[host.send(torch.tensor(places), all_logs.device)]
        widest = min(max(widths), self._vocab_size)
        top = logs.topk(widest, -1)
        mine = np.repeat(np.minimum(widths, widest), lengths)
        within = np.arange(widest) < mine[:, None]
        scores, likeliest, theirs = host.read(logs.gather(1, ids[:, None]).squeeze(1), top.indices, top.values)
        return Scores(
            lengths,
            np.minimum(widths, widest).astype(np.int32),
            scores,
            likeliest.astype(np.int32)[within],
            theirs[within],
        )
