"""`--speculative-config`: how drafting is written in vLLM, JSON in one flag, for those who bring their command line."""

from __future__ import annotations

import json
from typing import Any

from specserve.errors import ConfigError

_METHODS = {
    "draft_model": "small_model",
    "eagle": "eagle",
    "eagle3": "eagle",
    "ngram": "ngram",
    "suffix": "suffix",
}
"""Speculators by their names there."""

_SETTINGS = {
    "model": "draft.model.source",
    "num_speculative_tokens": "engine.depth",
    "prompt_lookup_max": "draft.ngram_max",
    "prompt_lookup_min": "draft.ngram_min",
}
_METHOD = "method"
_SHOWN = 80


def settings(text: str) -> dict[str, Any]:
    """Settings by dotted name. Raises ConfigError for what is no JSON object, and for keys and methods not known here.

    A model without a method is a small model that drafts.
    """
    given = _object(text)
    known = [_METHOD, *_SETTINGS]
    strange = sorted(given.keys() - set(known))
    if strange:
        raise ConfigError(f"--speculative-config has no {strange[0]!r} here; it takes {', '.join(known)}")
    found = {_SETTINGS[name]: value for name, value in given.items() if name != _METHOD}
    method = given.get(_METHOD, "draft_model" if "model" in given else None)
    return found if method is None else found | {"draft.speculator": _speculator(method)}


def _object(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ConfigError(
            f"--speculative-config takes a JSON object, found {text[:_SHOWN]!r}; "
            'write for example {"model": "path/to/draft", "num_speculative_tokens": 4}'
        )
    return given


def _speculator(method: object) -> str:
    if not isinstance(method, str) or method not in _METHODS:
        raise ConfigError(f"--speculative-config has no method {method!r} here; there are: {', '.join(_METHODS)}")
    return _METHODS[method]
