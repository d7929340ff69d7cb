"""One sequence as its deltas come: tokens, the text that may be shown, scores, and calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specserve.api.tools import CallReader, ToolCall
from specserve.text import AnswerText, Tokenizer
from specserve.types import Delta, Request, RequestStats, TokenLogprob


@dataclass(frozen=True, slots=True)
class Scored:
    """A token's log-probability, and where in the choice's text the token begins, in characters."""

    score: TokenLogprob
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What a delta makes visible: text, a score per token where the client asked, whole calls of tools, its tokens.

    shown is the text that each token made visible; what the end set free is the last one's.
    """

    text: str
    scores: list[Scored]
    calls: list[ToolCall] = field(default_factory=list)
    tokens: tuple[int, ...] = ()
    shown: tuple[str, ...] = ()


class Answer:
    """One sequence as it grows: its tokens, and the text of them that may be shown; with `echo`, behind its prompt.

    `keep_stop` shows the stop text that ended it. `reader` takes the calls of tools out of the text.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        *,
        echo: bool = False,
        keep_stop: bool = False,
        reader: CallReader | None = None,
    ) -> None:
        self.request = request
        self.text = ""
        self.calls: list[ToolCall] = []
        self.tokens: list[int] = []
        self.finish: str | None = None
        self.stop_reason: int | str | None = None
        self.stats: RequestStats | None = None
        self.scores: list[Scored] = []
        self._end_tokens = tokenizer.end_tokens - frozenset(request.stop_token_ids)
        self._echoed = request.prompt if echo else ()
        unsearched = len(self._echoed) + request.sampling.min_tokens
        self._visible = AnswerText(tokenizer, request.stop, unsearched, keep_stop=keep_stop)
        self._reader = reader

    def add(self, delta: Delta) -> Piece:
        """Take a delta; returns what it makes visible."""
        self.tokens += delta.tokens
        echoed, self._echoed = self._echoed, ()
        before: list[str] = []
        shown: list[str] = []
        scores = [*self._push(echoed, delta.prompt_logprobs, before), *self._push(delta.tokens, delta.logprobs, shown)]
        if delta.finish is not None:
            rest = self._end(delta)
            shown = [*shown[:-1], "".join(shown[-1:]) + rest]
        text, calls = self._read("".join([*before, *shown]), ended=delta.finish is not None)
        self.text += text
        self.calls += calls
        self.scores += scores
        return Piece(text, scores, calls, delta.tokens, tuple(shown[: len(delta.tokens)]))

    def _read(self, shown: str, *, ended: bool) -> tuple[str, list[ToolCall]]:
        if self._reader is None:
            return shown, []
        text, calls = self._reader.push(shown)
        if not ended:
            return text, calls
        rest, cut = self._reader.flush()
        return text + rest, calls + cut

    @property
    def reason(self) -> str | None:
        """Why it ended, in OpenAI's words."""
        return "tool_calls" if self.finish == "stop" and self.calls else self.finish

    def _push(self, tokens: Sequence[int], scores: Sequence[TokenLogprob], shown: list[str]) -> list[Scored]:
        offsets = []
        for token in tokens:
            offsets.append(self._visible.length)
            shown.append(self._visible.push(token))
        return [Scored(score, offset) for score, offset in zip(scores, offsets, strict=False)]

    def _end(self, delta: Delta) -> str:
        self.finish = delta.finish
        self.stats = delta.stats
        # The model's own end is the ordinary end and needs no reason; an id that the client named is one.
        self.stop_reason = None if delta.stop_reason in self._end_tokens else delta.stop_reason
        return self._visible.flush()
