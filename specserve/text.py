"""Text in and out of tokens: the model's tokenizer, an incremental detokeniser, and the search for stop texts.

Loading a tokenizer and decoding need neither torch nor transformers, so the coordinator can do both; chat templates
(`templates`) are rendered with transformers when the first conversation comes.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as CoreTokenizer

from specserve.errors import ConfigError, UnsupportedField
from specserve.templates import CallFormat, ChatTemplate, Messages

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's own tokenizer, read from a folder with `tokenizer.json`.

    end_tokens are the ids that end an answer. vocab_size counts ids, added tokens included; the model's own
    vocabulary may be padded beyond it.
    """

    def __init__(
        self,
        core: CoreTokenizer,
        *,
        end_tokens: frozenset[int] = frozenset(),
        chat_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
    ) -> None:
        core.no_truncation()
        core.no_padding()
        self._core = core
        self._template = None if chat_template is None else ChatTemplate(chat_template, special_tokens or {})
        self._special_ids = frozenset(
            token for token, added in core.get_added_tokens_decoder().items() if added.special
        )
        # In characters: a token's entry in the vocabulary is never shorter than what it stands for.
        self._longest = max(map(len, core.get_vocab(with_added_tokens=True)), default=1)
        self._raw = _raw_bytes(core, self._special_ids)
        self.end_tokens = end_tokens
        self.vocab_size = 1 + max(core.get_vocab(with_added_tokens=True).values(), default=-1)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, chat_template.jinja and the end tokens of a model folder.

        Raises ConfigError when tokenizer.json is missing or damaged, or another file is not JSON.
        """
        core = _core(folder / "tokenizer.json")
        settings = json_object(folder / "tokenizer_config.json")
        specials = _special_tokens(settings)
        return cls(
            core,
            end_tokens=_end_tokens(folder, core, specials),
            chat_template=_chat_template(folder, settings),
            special_tokens=specials,
        )

    def encode(self, text: str, special: bool) -> list[int]:
        """Token ids of a text; `special` adds what tokenizer.json puts around it, often a start token."""
        # As a batch of one, because only that lets other threads run meanwhile: a long text takes seconds.
        ids: list[int] = self._core.encode_batch([text], add_special_tokens=special)[0].ids
        return ids

    def may_fit(self, text: str, tokens: int) -> bool:
        """False when even the longest tokens there are could not bring a text down to this many. Costs no encoding."""
        return len(text) <= tokens * self._longest

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of tokens. Ids that the tokenizer does not know have no text."""
        text: str = self._core.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def chat_prompt(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation in the model's own template, ready for the assistant's answer.

        tools are shown to the model as they are; options are variables of the template's own.
        Raises UnsupportedField when the model has no chat template, RequestError when the template refuses.
        """
        if self._template is None:
            raise UnsupportedField("this model has no chat template; use /v1/completions", param="messages")
        return self.encode(self._template.render(messages, tools, options), special=False)

    @property
    def takes_calls(self) -> bool:
        """Whether the chat template shows the tool calls of earlier turns."""
        return self._template is not None and self._template.takes_calls

    @cached_property
    def call_format(self) -> CallFormat | None:
        """How the model writes tool calls in plain text; None where it has no such way."""
        found = None if self._template is None else self._template.call_format()
        if found is None:
            return None
        found = replace(found, closing=self._before_special(found.closing))
        parts = (found.opening, found.head, found.middle, found.tail, found.separator or "", found.closing)
        # A special token is no text: it shows nothing, and a grammar cannot ask for it by its spelling.
        return None if any(self._before_special(part) != part for part in parts) else found

    def _before_special(self, text: str) -> str:
        """A text up to its first special token."""
        places = [text.find(self._core.id_to_token(token) or "") for token in self._special_ids]
        return text[: min((place for place in places if place >= 0), default=len(text))]

    def token_text(self, token: int) -> tuple[str, bytes]:
        """A token on its own, special ones too: its text (U+FFFD where it ends inside a character) and its bytes."""
        raw = self.raw_bytes(token)
        if raw:
            return raw.decode("utf-8", "replace"), raw
        # Behind itself, because a decoder may treat the first token differently.
        alone = self.decode([token], skip_special=False)
        text = self.decode([token, token], skip_special=False)[len(alone) :]
        return text, text.encode("utf-8", "replace")

    @property
    def definition(self) -> str:
        """The tokenizer as the JSON text of tokenizer.json."""
        text: str = self._core.to_str()
        return text

    def raw_bytes(self, token: int) -> bytes | None:
        """The bytes that a token stands for, b"" if it shows nothing, None if it stands for whole characters."""
        return self._raw.get(token, b"" if token >= self.vocab_size else None)


class Detokenizer:
    """Turns tokens into text one by one, in constant time each; special tokens show nothing.

    The pieces and the flush, put together, are the text that `Tokenizer.decode` gives for all tokens; no piece ends
    inside a character. One exception: a tokenizer with byte fallback decodes a run of byte tokens that is not valid
    UTF-8 to replacement characters throughout, even for the whole characters in it; here those are kept, because
    they were shown before the fault was known.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._before: list[int] = []

    def push(self, token: int) -> str:
        """The text that this token completed; "" inside a character."""
        raw = self._tokenizer.raw_bytes(token)
        if raw == b"":
            return ""
        if raw is None:
            return self._utf8.decode(b"", final=True) + self._joined(token)
        self._before = [token]
        return self._utf8.decode(raw)

    def flush(self) -> str:
        """The replacement characters for a character that never became whole, or ""."""
        return self._utf8.decode(b"", final=True)

    def _joined(self, token: int) -> str:
        # A decoder may treat the first token differently (it drops the word mark's space), so each token is decoded
        # behind the one before it.
        start = len(self._tokenizer.decode(self._before, skip_special=False))
        text = self._tokenizer.decode([*self._before, token], skip_special=False)
        self._before = [token]
        return text[start:]


class AnswerText:
    """The text of one answer as its tokens arrive: whole characters, ended by the first stop text.

    Stop texts are looked for in the text of the tokens after the first min_tokens; `keep_stop` shows the one found.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: tuple[str, ...] = (), min_tokens: int = 0, *, keep_stop: bool = False
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopText(stops, keep=keep_stop)
        self._unsearched = min_tokens
        self.length = 0  # characters so far, those of a stop text included

    def push(self, token: int) -> str:
        """The text that may be shown after this token."""
        piece = self._detokenizer.push(token)
        self.length += len(piece)
        if self._unsearched > 0:
            self._unsearched -= 1
            return piece
        return self._stops.push(piece)[0]

    def flush(self) -> str:
        """The rest of the text when the last token was pushed."""
        shown, _ = self._stops.push(self._detokenizer.flush())
        return shown + self._stops.flush()


class StopText:
    """Finds the first stop text in a stream and holds back what might become one.

    The match is the one that is complete first in stream order; of several that are complete with the same character,
    the longest. Every character costs constant time per stop text (Knuth, Morris, Pratt, 1977).
    With `keep` the match itself is shown.
    """

    def __init__(self, stops: tuple[str, ...], *, keep: bool = False) -> None:
        self._keep = keep
        self._scans = [_Scan(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._held = ""
        self._matched: str | None = None

    def push(self, piece: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop text that ended the stream, if one did.

        What follows the match, and whatever is pushed after it, is never shown.
        """
        if self._matched is not None:
            return "", self._matched
        text = self._held + piece
        for index, character in enumerate(piece):
            found = [scan.pattern for scan in self._scans if scan.advance(character)]
            if found:
                return self._finish(text, len(self._held) + index + 1, found[0])
        keep = max((scan.state for scan in self._scans), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """The rest of the text, when the stream ended without (or after) a match."""
        rest, self._held = self._held, ""
        return rest

    def _finish(self, text: str, end: int, pattern: str) -> tuple[str, str]:
        self._matched = pattern
        self._held = ""
        return text[: end if self._keep else end - len(pattern)], pattern


class _Scan:
    """How much of one stop text the stream ends with."""

    __slots__ = ("_fallback", "pattern", "state")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.state = 0
        self._fallback = [0] * len(pattern)
        length = 0
        for index in range(1, len(pattern)):
            while length and pattern[index] != pattern[length]:
                length = self._fallback[length - 1]
            length += pattern[index] == pattern[length]
            self._fallback[index] = length

    def advance(self, character: str) -> bool:
        """Read one character; True when it completes the stop text."""
        while self.state and self.pattern[self.state] != character:
            self.state = self._fallback[self.state - 1]
        self.state += self.pattern[self.state] == character
        return self.state == len(self.pattern)


def _core(path: Path) -> CoreTokenizer:
    if not path.is_file():
        raise ConfigError(f"{path} is missing; the model folder must hold the tokenizer as tokenizer.json")
    try:
        return CoreTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a damaged file
        raise ConfigError(f"cannot read the tokenizer {path}: {error}") from None


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file, empty where there is no file. Raises ConfigError for one that holds anything else."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object, found {type(data).__name__}")
    return data


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    found = {name: settings.get(name) for name in _SPECIAL_NAMES}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several named templates
        found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
    return found if isinstance(found, str) else None


def _end_tokens(folder: Path, core: CoreTokenizer, specials: dict[str, str]) -> frozenset[int]:
    """The end ids of the generation settings (else of the model's config), and the tokenizer's own end token."""
    generation = json_object(folder / "generation_config.json").get("eos_token_id")
    config = json_object(folder / "config.json")
    text_config = config.get("text_config")
    nested = text_config.get("eos_token_id") if isinstance(text_config, dict) else None
    named: Any = next((ids for ids in (generation, config.get("eos_token_id"), nested) if ids is not None), [])
    own = core.token_to_id(specials["eos_token"]) if "eos_token" in specials else None
    every: Iterable[Any] = [*(named if isinstance(named, list) else [named]), own]
    return frozenset(token for token in every if isinstance(token, int))


def _raw_bytes(core: CoreTokenizer, special_ids: frozenset[int]) -> dict[int, bytes]:
    """Bytes of every token that stands for bytes: all of a byte-level tokenizer, the <0xNN> tokens of byte fallback."""
    decoder = json.loads(core.to_str())["decoder"] or {}
    kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if "type" in part}
    vocabulary = core.get_vocab(with_added_tokens=True)
    raw: dict[int, bytes] = {}
    if "ByteLevel" in kinds:
        alphabet = _byte_alphabet()
        raw = {token: _spelt(text, alphabet) for text, token in vocabulary.items()}
    elif "ByteFallback" in kinds:
        spelling = {f"<0x{value:02X}>": bytes([value]) for value in range(256)}
        raw = {vocabulary[text]: value for text, value in spelling.items() if text in vocabulary}
    return raw | dict.fromkeys(special_ids, b"")


def _spelt(text: str, alphabet: dict[str, int]) -> bytes:
    # A token with any character outside the alphabet is an added token that stands for its own text.
    values = [alphabet.get(character) for character in text]
    return bytes(value for value in values if value is not None) if None not in values else text.encode("utf-8")


def _byte_alphabet() -> dict[str, int]:
    """The character by which a byte-level vocabulary spells each byte (Radford et al., 2019, GPT-2).

    Printable Latin-1 bytes stand for themselves; the others are numbered from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    spelt = {chr(value): value for value in printable}
    return spelt | {chr(256 + index): value for index, value in enumerate(others)}
