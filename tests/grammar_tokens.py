"""A tokenizer of five tokens, so that everything a grammar allows can be counted, and a mask in words."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as CoreTokenizer

from specserve.sampling.grammar import Grammars, set_bits
from specserve.text import Tokenizer
from specserve.types import Structured

A, B, C, AB, END = range(5)
WIDTH = 7
"""Of a model's logits over these tokens; ids 5 and 6 are padding."""

PATTERN = "(ab|a|c){1,3}"


def abc_tokenizer() -> Tokenizer:
    """a, b, c, ab and an end token, byte-level."""
    core = CoreTokenizer(models.BPE({"a": A, "b": B, "c": C, "ab": AB}, [("a", "b")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<end>", special=True)])
    return Tokenizer(core, end_tokens=frozenset({END}))


def abc_grammars() -> Grammars:
    """The grammars over it."""
    return Grammars(abc_tokenizer())


def regex(pattern: str = PATTERN) -> Structured:
    """An answer that matches a pattern."""
    return Structured("regex", pattern)


def ids(bits) -> set[int] | None:
    """The allowed tokens as a set."""
    return None if bits is None else set(set_bits(bits))
