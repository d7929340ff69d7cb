"""A target and a draft that need no download: what `source: demo` means.

The target is SmolLM2-135M-Instruct out of an installed Python package; of the draft, what was trained for this target
lies here, and the rest is the target's. Both are put together once and cached as ordinary model folders. How the
draft was made, and what it keeps, is told in docs/drafts.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

TRAINED_DRAFT = Path(__file__).parent / "draft"
HEAD = Path(__file__).parent / "head"
"""An EAGLE head for the target, in the published layout."""


def check() -> None:
    """Raise ConfigError when the package with the target is not installed."""
    from specserve.demo import smollm2

    smollm2.gguf_file()


def target(progress: Callable[[str], None]) -> Path:
    """The folder of SmolLM2-135M-Instruct in float32. Raises ConfigError when its package is not installed."""
    from specserve.demo import smollm2

    return smollm2.folder(progress)


def draft(progress: Callable[[str], None]) -> Path:
    """The folder of the draft model that was trained for the target. Raises ConfigError as `target` does."""
    from specserve.models import trained_draft

    return trained_draft.completed(TRAINED_DRAFT, progress)
