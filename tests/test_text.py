"""Facts about tokenizers, incremental detokenising and stop texts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from specserve.errors import ConfigError, RequestError, UnsupportedField
from specserve.text import Detokenizer, StopText, Tokenizer

BYTE_LEVEL = Tokenizer(tiny_tokenizer.byte_level())
WORD_MARK = Tokenizer(tiny_tokenizer.word_mark())
BYTE_FALLBACK = Tokenizer(tiny_tokenizer.byte_fallback())
EVERY = {"byte_level": BYTE_LEVEL, "word_mark": WORD_MARK, "byte_fallback": BYTE_FALLBACK}

texts = st.one_of(st.text(), st.lists(st.sampled_from(tiny_tokenizer.SAMPLES), max_size=3).map("".join))


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer)
    return "".join([*(detokenizer.push(token) for token in ids), detokenizer.flush()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer.write_folder(tmp_path_factory.mktemp("tiny"))


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=60))
def test_byte_level_pieces_make_the_whole_text_of_any_ids(ids: list[int]) -> None:
    """For any ids, broken UTF-8, special and unknown ones included, pieces and flush are the decoded text."""
    assert streamed(BYTE_LEVEL, ids) == BYTE_LEVEL.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, WORD_MARK.vocab_size + 3), max_size=40))
def test_word_mark_pieces_make_the_whole_text_of_any_ids(ids: list[int]) -> None:
    """The space that the first word mark loses is lost in the stream too, and no other."""
    assert streamed(WORD_MARK, ids) == WORD_MARK.decode(ids)


@pytest.mark.parametrize("name", EVERY)
def test_pieces_make_the_whole_text_of_real_texts(name: str) -> None:
    """Texts in many scripts and emoji come out of the stream as out of decode."""

    @settings(max_examples=150, deadline=None)
    @given(texts)
    def check(text: str) -> None:
        ids = EVERY[name].encode(text, special=False)
        assert streamed(EVERY[name], ids) == EVERY[name].decode(ids)

    check()


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])
def test_no_piece_splits_a_character(tokenizer: Tokenizer) -> None:
    """Whole characters only: no piece of a valid text holds a replacement character."""
    for text in tiny_tokenizer.SAMPLES[:-1]:
        detokenizer = Detokenizer(tokenizer)
        pieces = [detokenizer.push(token) for token in tokenizer.encode(text, special=False)]
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) == text
        assert detokenizer.flush() == ""


def test_a_piece_comes_with_the_token_that_completes_the_character() -> None:
    """An emoji spelt in bytes shows nothing until its last byte, then at once."""
    detokenizer = Detokenizer(BYTE_FALLBACK)
    ids = BYTE_FALLBACK.encode("😀", special=False)[-4:]
    assert [detokenizer.push(token) for token in ids] == ["", "", "", "😀"]


def test_a_broken_byte_run_keeps_its_whole_characters() -> None:
    """With byte fallback, a fault after a whole character replaces only the faulty byte."""
    ids = BYTE_FALLBACK.encode("é", special=False)[-2:]
    broken = BYTE_FALLBACK.encode("😀", special=False)[-4]
    assert streamed(BYTE_FALLBACK, [*ids, broken]) == "é\ufffd"


def expected_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop


small = st.text(alphabet="abc", max_size=40)


@settings(max_examples=600, deadline=None)
@given(small, st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4), st.data())
def test_stop_text_agrees_with_a_search_of_the_whole_text(text: str, stops: list[str], data: st.DataObject) -> None:
    """However the text is cut into pieces, what is shown ends before the stop text that is complete first."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stop_text = StopText(tuple(stops))
    shown, matched = "", None
    for piece in pieces:
        more, matched = stop_text.push(piece)
        shown += more
    assert (shown + stop_text.flush(), matched) == expected_stop(text, tuple(stops))


@settings(max_examples=300, deadline=None)
@given(small, st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4))
def test_only_a_possible_beginning_is_held_back(text: str, stops: list[str]) -> None:
    """What is held back is exactly the longest end of the text that begins a stop text."""
    if any(stop in text for stop in stops):
        return
    shown, _ = StopText(tuple(stops)).push(text)
    begins = [text[-k:] for k in range(1, len(text) + 1) if any(s.startswith(text[-k:]) for s in stops)]
    assert text[len(shown) :] == max(begins, key=len, default="")


def test_nothing_is_shown_after_a_match() -> None:
    """A match ends the stream for good; of two that end together the longer is named."""
    stop_text = StopText(("d", "cd"))
    assert stop_text.push("abcdef") == ("ab", "cd")
    assert stop_text.push("more") == ("", "cd")
    assert stop_text.flush() == ""


def test_end_tokens_come_from_the_model_files(folder: Path) -> None:
    """The generation settings' end ids and the tokenizer's own end token all end an answer."""
    assert Tokenizer.load(folder).end_tokens == {0, 2}


def test_end_tokens_fall_back_to_the_config(tmp_path: Path) -> None:
    """Without generation settings the model's config names the end tokens."""
    folder = tiny_tokenizer.write_folder(tmp_path, eos_token=None)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [7]}}))
    assert Tokenizer.load(folder).end_tokens == {7}


@pytest.mark.parametrize("start", [None, "<|start|>"])
@pytest.mark.parametrize("extra", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_start_tokens_are_added_as_transformers_does(tmp_path: Path, start: str | None, extra: dict[str, bool]) -> None:
    """Encoding with special tokens, and the chat prompt, give transformers' own ids: tokenizer.json decides."""
    from transformers import AutoTokenizer

    core = tiny_tokenizer.byte_level()
    if start is not None:
        core.post_processor = TemplateProcessing(single=[start, "$A"], special_tokens=[(start, 1)])
    folder = tiny_tokenizer.write_folder(tmp_path, core, **extra)
    reference = AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer.load(folder)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Straße 😀?"}]
    assert tokenizer.encode("Straße 😀", special=True) == reference.encode("Straße 😀")
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.chat_prompt(messages) == expected


def test_a_template_file_goes_before_the_settings(tmp_path: Path) -> None:
    """chat_template.jinja replaces the template of tokenizer_config.json."""
    folder = tiny_tokenizer.write_folder(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0]['content'] }}")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode(tokenizer.chat_prompt([{"role": "user", "content": "hi"}]), False) == "<|start|>hi"


def test_a_template_that_refuses_is_the_clients_error(folder: Path) -> None:
    """raise_exception in a template, and anything the template trips over, is a RequestError."""
    tokenizer = Tokenizer.load(folder)
    with pytest.raises(RequestError, match="system must come first"):
        tokenizer.chat_prompt([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}])
    with pytest.raises(RequestError):
        tokenizer.chat_prompt([{"role": "user"}])


def test_a_template_runs_in_a_sandbox(tmp_path: Path) -> None:
    """A template cannot reach Python's internals."""
    folder = tiny_tokenizer.write_folder(tmp_path, chat_template="{{ ''.__class__.__mro__ }}")
    with pytest.raises(RequestError):
        Tokenizer.load(folder).chat_prompt([{"role": "user", "content": "a"}])


def test_a_model_without_template_serves_no_chat(tmp_path: Path) -> None:
    """No chat template means UnsupportedField, not an invented format."""
    folder = tiny_tokenizer.write_folder(tmp_path, chat_template=None)
    with pytest.raises(UnsupportedField):
        Tokenizer.load(folder).chat_prompt([{"role": "user", "content": "a"}])


def test_truncation_in_the_tokenizer_file_is_switched_off(tmp_path: Path) -> None:
    """A tokenizer.json that would cut or pad texts does neither here."""
    core = tiny_tokenizer.byte_level()
    core.enable_truncation(4)
    core.enable_padding(length=8)
    tokenizer = Tokenizer.load(tiny_tokenizer.write_folder(tmp_path, core))
    assert tokenizer.decode(tokenizer.encode("abc" * 20, special=False)) == "abc" * 20


@pytest.mark.parametrize("damage", ["missing", "not json", "[]"])
def test_a_damaged_folder_is_a_config_error(tmp_path: Path, damage: str) -> None:
    """A missing or unreadable tokenizer is named in a ConfigError."""
    if damage != "missing":
        (tmp_path / "tokenizer.json").write_text(damage)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_loading_and_decoding_import_neither_torch_nor_transformers(folder: Path) -> None:
    """The coordinator may hold a tokenizer without the heavy libraries; a chat prompt needs no torch either."""
    code = (
        "import sys; from pathlib import Path; from specserve.text import Tokenizer, Detokenizer\n"
        f"t = Tokenizer.load(Path({str(folder)!r})); d = Detokenizer(t)\n"
        "assert ''.join(map(d.push, t.encode('hi there', True))) == 'hi there'\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "t.chat_prompt([{'role': 'user', 'content': 'x'}]); assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
