"""Two models share a vocabulary, or the refusal says where they differ."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models

from specserve.errors import ConfigError
from specserve.models import vocabulary


def write(folder: Path, words: list[str], added: list[str] = ()) -> Path:
    folder.mkdir()
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    core.add_tokens([AddedToken(token, special=True) for token in added])
    core.save(str(folder / "tokenizer.json"))
    return folder


def test_heads_may_be_padded_differently(tmp_path):
    """The shared vocabulary is the tokenizers' own, added tokens included, whatever the widths."""
    target = write(tmp_path / "target", ["a", "b", "c"], ["<end>"])
    draft = write(tmp_path / "draft", ["a", "b", "c"], ["<end>"])
    assert vocabulary.check(target, draft, 151_936, 152_064) == 4


def test_different_tokenizers_are_refused_with_the_differences(tmp_path):
    """The count, and the first few tokens with both ids."""
    target = write(tmp_path / "target", ["a", "b", "c"], ["<end>"])
    draft = write(tmp_path / "draft", ["a", "c", "b"])
    with pytest.raises(ConfigError, match=r"3 tokens differ.*'b' is 1 / 2.*'c' is 2 / 1.*'<end>' is 3 / absent"):
        vocabulary.check(target, draft, 10, 10)


def test_a_head_narrower_than_the_tokenizer_is_refused(tmp_path):
    """Such a model could not say every token."""
    folder = write(tmp_path / "model", ["a", "b", "c"])
    with pytest.raises(ConfigError, match="draft's logits are only 2 wide"):
        vocabulary.check(folder, folder, 3, 2)


@pytest.mark.parametrize(("content", "said"), [(None, "no tokenizer.json"), ("{", "cannot read")])
def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path, content, said):
    """Missing and damaged tokenizer files are told apart."""
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=said):
        vocabulary.check(tmp_path, tmp_path, 3, 3)
