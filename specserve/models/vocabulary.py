"""Whether two models speak of the same tokens."""

from __future__ import annotations

from pathlib import Path

from specserve.errors import ConfigError


def check(target_folder: Path, draft_folder: Path, target_width: int, draft_width: int) -> int:
    """The size of the shared vocabulary: ids below it mean the same token to both models and have logits in both.

    The tokenizers are compared token by token, added tokens included. Head widths (logits per position) may be padded
    differently, e.g. 151,936 and 152,064; ids at or above the result must be masked in both.
    Raises ConfigError with the number of differences and the first few.
    """
    target, draft = token_ids(target_folder), token_ids(draft_folder)
    require_same(target, draft, str(target_folder), str(draft_folder))
    known = max(target.values()) + 1
    narrowest = min(target_width, draft_width)
    if narrowest < known:
        model = "target" if target_width < draft_width else "draft"
        raise ConfigError(f"the tokenizer knows {known} ids, but the {model}'s logits are only {narrowest} wide")
    return known


def require_same(target: dict[str, int], draft: dict[str, int], target_name: str, draft_name: str) -> None:
    """Raise ConfigError, with the number of differences and the first few, unless every token has the same id."""
    if target != draft:
        raise ConfigError(_differences(target, draft, target_name, draft_name))


def token_ids(folder: Path) -> dict[str, int]:
    """Every token of a model folder's tokenizer with its id, added ones included. Raises ConfigError."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json, so its vocabulary cannot be compared")
    try:
        ids: dict[str, int] = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises plain Exception for a damaged file
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not ids:
        raise ConfigError(f"{path} holds an empty vocabulary")
    return ids


def _differences(target: dict[str, int], draft: dict[str, int], target_name: str, draft_name: str) -> str:
    different = [token for token in {**target, **draft} if target.get(token) != draft.get(token)]
    different.sort(key=lambda token: (min(target.get(token, 1 << 62), draft.get(token, 1 << 62)), token))
    shown = "; ".join(f"{token!r} is {_said(target, token)} / {_said(draft, token)}" for token in different[:5])
    return (
        f"target ({target_name}) and draft ({draft_name}) have different tokenizers: {len(different)} tokens "
        f"differ. target / draft: {shown}. Use a draft model of the target's own family, "
        f"or set draft.model.vocabulary to intersection"
    )


def _said(ids: dict[str, int], token: str) -> str:
    return str(ids[token]) if token in ids else "absent"
