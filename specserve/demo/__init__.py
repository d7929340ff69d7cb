"""A target and a draft that need no download: what `source: demo` means.

The target is SmolLM2-135M-Instruct out of an installed Python package; the draft is cut from the target at first
start. Both are built once and cached as ordinary model folders.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def target(progress: Callable[[str], None]) -> Path:
    """The folder of SmolLM2-135M-Instruct in float32. Raises ConfigError when its package is not installed."""
    from specserve.demo import smollm2

    return smollm2.folder(progress)


def draft(progress: Callable[[str], None]) -> Path:
    """The folder of the draft model that was cut from the target. Raises ConfigError as `target` does."""
    from specserve.demo import layer_cut

    return layer_cut.folder(target(progress), progress)
