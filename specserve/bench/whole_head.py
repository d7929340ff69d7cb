"""A draft with a head for a part of the vocabulary, rewritten in the ordinary layout that other engines read."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from specserve.models import _reduced_head, loading


def is_missing(model: Path) -> bool:
    """Whether the model's head is for a part of the vocabulary only."""
    return (model / _reduced_head.FILE).is_file()


def write(model: Path, to: Path) -> None:
    """The same guesses from a head [V, width]: ids outside the part get the row of the part's highest id.

    An ordinary layout has no place for a logit of −∞. The highest id of a byte-pair vocabulary was merged last and is
    seldom the likeliest token; where it is, guesses may differ from ours.
    """
    described = loading.read_model_config(model) | {"tie_word_embeddings": False}
    part = load_file(model / _reduced_head.FILE)
    ids = part["ids"].long()
    head = part["weight"][ids.argmax()].repeat(described["vocab_size"], 1)
    head[ids] = part["weight"]
    weights = load_file(model / "model.safetensors") | {"lm_head.weight": head}
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    (to / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    loading.copy_tokenizer(model, to)
