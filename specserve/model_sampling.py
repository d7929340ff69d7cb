"""How a model's makers would have its tokens drawn: the sampling settings of its generation_config.json.

They hold where a request says nothing (`server.sampling_defaults`), as they do in vLLM and SGLang. A small chat model
is made for a low temperature and writes nonsense at OpenAI's default of 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specserve.errors import ConfigError
from specserve.text import json_object
from specserve.types import Sampling

FILE = "generation_config.json"

_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
}
"""What a request may ask for, but that top_p 0 would leave no token."""


def read(folder: Path) -> Sampling:
    """The settings of a model folder; where it has none, those that leave the dist as it is.

    Raises ConfigError for a file that cannot be read, and for a value that no request could ask for.
    """
    path = folder / FILE
    settings = json_object(path)
    found: dict[str, Any] = {
        name: _checked(path, name, settings[name]) for name in _BOUNDS if settings.get(name) is not None
    }
    if "top_k" in found:
        found["top_k"] = max(0, int(found["top_k"]))
    return Sampling(**found)


def _checked(path: Path, name: str, value: Any) -> float:
    least, most = _BOUNDS[name]
    kinds = int if name == "top_k" else (int, float)
    number = isinstance(value, kinds) and not isinstance(value, bool)
    if not number or not least <= value <= most or (name == "top_p" and value == 0):  # nan is in no bounds
        raise ConfigError(
            f"{path} has {name} = {value!r}, which no request could ask for; correct it there, or take it out"
        )
    return float(value)


def described(sampling: Sampling) -> str:
    """Where these differ from settings that leave the dist as it is, for people; empty where they do not."""
    plain, told = Sampling(), {name: getattr(sampling, name) for name in _BOUNDS}
    return ", ".join(f"{name} {value:g}" for name, value in told.items() if value != getattr(plain, name))
