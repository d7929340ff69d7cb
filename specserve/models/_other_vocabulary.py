"""A draft model with another tokenizer than its target: which tokens both know, and a folder that says so.

Tokens are the same where they spell the same bytes (a word mark is a space), special ones where they have the same
name. The draft speaks of those only, its dist renormalised over them, and reads every other one as one substitute, so
that positions agree. Answers keep the target's law: a token that the draft cannot say has no mass in the dist that is
drawn from (token-level intersection: Timor et al. 2025).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from specserve import cache
from specserve.errors import ConfigError
from specserve.models import loading, vocabulary
from specserve.text import Tokenizer

FILE = "other_vocabulary.safetensors"

_FORMAT = 1  # part of the cache key
_WORD_MARK = "▁"
_SUBSTITUTES = ("<unk>", "<|unk|>", "[UNK]")


def is_translated(folder: Path) -> bool:
    """Whether a folder says how to read it with another model's tokens."""
    return (folder / FILE).is_file()


def read(folder: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int64: the draft's id for each of the target's [V], and the ids of shared tokens, target's and draft's [m]."""
    found = load_file(folder / FILE)
    return found["read_as"].long(), found["target_ids"].long(), found["draft_ids"].long()


def translated(folder: Path, target: Path, progress: Callable[[str], None]) -> Path:
    """The draft's folder with its target's tokenizer, made at first use. Raises ConfigError where they share nothing.

    Where both have the same tokens in the first place it is the draft's folder itself.
    """
    if vocabulary.token_ids(folder) == vocabulary.token_ids(target):
        return folder
    name = f"translated-{cache.key_of(_FORMAT, *map(cache.file_identity, sorted(folder.iterdir())), target)}"
    return cache.built_once(name, lambda new: _translate(folder, target, new, progress))


def _translate(folder: Path, target: Path, new: Path, progress: Callable[[str], None]) -> None:
    theirs, own = _spellings(target), _spellings(folder)
    shared = sorted((theirs[spelling], own[spelling]) for spelling in theirs.keys() & own.keys())
    if not shared:
        raise ConfigError(f"the tokenizers of {target} and {folder} have no token in common; use another draft")
    progress(f"{len(shared)} of the target's {len(theirs)} tokens are the draft's, too; it drafts with these only")
    target_ids, draft_ids = torch.tensor(shared, dtype=torch.int32).T
    read_as = torch.full((max(vocabulary.token_ids(target).values()) + 1,), _substitute(folder, own), dtype=torch.int32)
    read_as[target_ids.long()] = draft_ids
    save_file(
        {"read_as": read_as, "target_ids": target_ids.contiguous(), "draft_ids": draft_ids.contiguous()}, new / FILE
    )
    for path in folder.iterdir():
        if path.suffix in (".safetensors", ".bin") or path.name in ("config.json", "model.safetensors.index.json"):
            (new / path.name).symlink_to(path.resolve())
    loading.copy_tokenizer(target, new)


def _spellings(folder: Path) -> dict[bytes, int]:
    """What each token of a folder's tokenizer spells; of those that spell the same the first."""
    tokenizer = Tokenizer.load(folder)
    found: dict[bytes, int] = {}
    for token, number in sorted(vocabulary.token_ids(folder).items(), key=lambda each: each[1]):
        raw = tokenizer.raw_bytes(number)
        if raw is None:
            raw = token.replace(_WORD_MARK, " ").encode()
        found.setdefault(raw or b"\0" + token.encode(), number)
    return found


def _substitute(folder: Path, own: dict[bytes, int]) -> int:
    """The draft's id for what it does not know: its own for that, else a space, else its first."""
    ids = vocabulary.token_ids(folder)
    named = [ids[name] for name in _SUBSTITUTES if name in ids]
    return named[0] if named else own.get(b" ", 0)
