"""The tokenizer of emulated models: bytes and syllables, so that prompts of any text go in and words come out.

Ids 0 and 1 are the end and start marks of a turn, then come all bytes, then 200 syllables, half of them with a space
in front. Encoding finds syllables in lower-case text and spells the rest in bytes.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END, START = 0, 1
FIRST_SYLLABLE = 258
SYLLABLES = 199
"""How many of the 200 syllables the emulated models use: a prime number."""

_CONSONANTS = "bcdfghjklmnpqrstvwxz"
_VOWELS = "aeiou"
_SPACE = "Ġ"  # the space in the alphabet of byte-level vocabularies
_MARKS = ("<|end|>", "<|start|>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def tokenizer() -> Tokenizer:
    """The tokenizer as the tokenizers library knows it."""
    pairs = list(product(_CONSONANTS, _VOWELS))
    syllables = [left + right for left, right in pairs]
    words = [*_MARKS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *syllables, *(_SPACE + each for each in syllables)]
    merges = [*pairs, *((_SPACE, each) for each in syllables)]
    core = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(mark, special=True) for mark in _MARKS])
    return core


def write(folder: Path) -> int:
    """Write the tokenizer's files into a model folder; returns the size of its vocabulary."""
    core = tokenizer()
    core.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": _MARKS[START], "eos_token": _MARKS[END], "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}), encoding="utf-8")
    size: int = core.get_vocab_size(with_added_tokens=True)
    return size
