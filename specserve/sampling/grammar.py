"""Structured output: from a request's specification to a matcher that says which tokens may come next.

The matching is llguidance's: an Earley parser over a lexer of regular expression derivatives, walked along the
tokenizer's trie. Every step of it is bounded, in compiling as in matching, so a specification that explodes is refused
or fails alone; it never hangs a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from specserve.errors import InvalidField, UnsupportedField
from specserve.text import Tokenizer
from specserve.transport.messages import Array
from specserve.types import Structured, StructuredKind

_LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=100_000,
    step_lexer_fuel=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""Tenths of a second to compile and to take a step, at the very most; ordinary specifications need a hundredth."""

_JSON: Final[Any] = {
    # One space, or a line break and its indentation: unbounded white space is a place where models get lost for ever.
    "whitespace_flexible": True,
    "whitespace_pattern": r" |\n {0,20}",
    # A keyword that cannot be enforced is refused, whatever the schema's own x-guidance asks for.
    "lenient": False,
    "coerce_one_of": False,
}

_COMPILED = 64
"""Grammars kept per process; a request gets a copy of its grammar, which shares what was compiled."""

_PROBED = 8
"""Tokens tried at the door: what explodes as a rule does so at the first steps."""


class Grammars:
    """The grammars over one tokenizer. Thread-safe.

    Building it walks the whole vocabulary (0.3 s for 50,000 tokens), so a process that serves should do so at start.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.end_tokens = tokenizer.end_tokens
        self._why_not = "" if tokenizer.end_tokens else "this model has no end token, with which such an answer ends"
        try:
            self._tokens = _trie(tokenizer.definition, tokenizer.vocab_size, tuple(sorted(tokenizer.end_tokens)))
        except ValueError as error:
            self._why_not = f"this model's tokenizer has no bytes to match ({error})"
        self._compiled: Callable[[Structured], LLMatcher] = lru_cache(_COMPILED)(self._compile)

    def matcher(self, structured: Structured) -> LLMatcher:
        """A matcher at the beginning of an answer.

        Raises InvalidField for a specification that is wrong, unsupported or too complex, and UnsupportedField where
        the tokenizer cannot be held to any.
        """
        return self._compiled(structured).deep_copy()

    def check(self, structured: Structured, *, max_bytes: int) -> None:
        """Raise what `matcher` raises, also when the first few tokens show that it is too complex, or too long."""
        size = len(structured.spec.encode())
        if size > max_bytes:
            raise InvalidField(
                f"structured output: the {structured.kind} has {size} bytes, at most {max_bytes} are allowed",
                param=structured.kind,
            )
        matcher = self.matcher(structured)
        for _ in range(_PROBED):
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            if matcher.is_error() or not bits.any():
                raise _refused(structured, matcher.get_error() or "NoExtension")
            likely = [token for token in set_bits(bits) if token not in self.end_tokens]
            if matcher.is_stopped() or not likely:
                return
            matcher.consume_token(likely[-1])

    def ends(self) -> Array:
        """uint8 [bytes]: only end tokens may come."""
        flags = np.zeros(1 + max(self.end_tokens), dtype=np.uint8)
        flags[sorted(self.end_tokens)] = 1
        return np.packbits(flags, bitorder="little")

    def _compile(self, structured: Structured) -> LLMatcher:
        if self._why_not:
            raise UnsupportedField(f"structured output: {self._why_not}", param=structured.kind)
        try:
            grammar = _SOURCES[structured.kind](structured.spec)
        except ValueError as error:
            raise _refused(structured, str(error)) from None
        matcher = LLMatcher(self._tokens, grammar, limits=_LIMITS, log_level=0)
        if matcher.is_error():
            raise _refused(structured, matcher.get_error())
        return matcher


def set_bits(bits: Array) -> list[int]:
    """The token ids whose bits are set in uint8 [bytes]."""
    found: list[int] = np.unpackbits(bits, bitorder="little").nonzero()[0].tolist()
    return found


def brief(reason: str) -> str:
    """The library's words on one line of bounded length."""
    return " ".join(reason.replace("<non-verbose/>", "").split())[:300]


@lru_cache(maxsize=4)
def _trie(definition: str, vocab_size: int, end_tokens: tuple[int, ...]) -> LLTokenizer:
    # A door and two workers in one process share this. Where there are no end tokens any id will do: nothing compiles.
    return LLTokenizer(definition, n_vocab=vocab_size, eos_token=list(end_tokens) or [0])


def _json_schema(schema: str) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON)


_SOURCES: Mapping[StructuredKind, Callable[[str], str]] = {
    "json_schema": _json_schema,
    "json_object": lambda _: _json_schema('{"type": "object"}'),
    "regex": LLMatcher.grammar_from_regex,
    "choice": lambda spec: grammar_from("choice", spec),
    "grammar": lambda spec: grammar_from("grammar", spec),
}


def _refused(structured: Structured, reason: str) -> InvalidField:
    told = "it allows no text that this model can write" if reason.startswith("NoExtension") else brief(reason)
    return InvalidField(f"structured output: the {structured.kind} is refused: {told}", param=structured.kind)
