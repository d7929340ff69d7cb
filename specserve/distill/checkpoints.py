"""A training run on disk: what it needs to go on from where it stopped, and the best student so far."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from specserve.errors import ConfigError

_RUN, _BEST = "run.pt", "best.safetensors"


def save_run(folder: Path, step: int, student: nn.Module, optimiser: torch.optim.Optimizer, best: float) -> None:
    """Write the run's state; a reader sees the old one or the new one."""
    partial = folder / f"{_RUN}.partial"
    state = {"step": step, "student": student.state_dict(), "optimiser": optimiser.state_dict(), "best": best}
    torch.save(state, partial)
    os.replace(partial, folder / _RUN)


def has_run(folder: Path) -> bool:
    """Whether there is a run to go on with."""
    return (folder / _RUN).is_file()


def load_run(folder: Path, student: nn.Module, optimiser: torch.optim.Optimizer) -> tuple[int, float]:
    """Put the saved state into student and optimiser; the next step and the best figure. (0, -∞) without one.

    Raises ConfigError for the state of another student.
    """
    if not has_run(folder):
        return 0, -math.inf
    state: dict[str, Any] = torch.load(folder / _RUN, weights_only=True)
    try:
        student.load_state_dict(state["student"])
        optimiser.load_state_dict(state["optimiser"])
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the run in {folder} has another student than this one; use another folder: {error}"
        ) from None
    return state["step"], state["best"]


def save_best(folder: Path, student: nn.Module) -> None:
    """Keep this student's weights as the best ones."""
    partial = folder / f"{_BEST}.partial"
    save_file({name: weight.contiguous() for name, weight in student.state_dict().items()}, partial)
    os.replace(partial, folder / _BEST)


def load_best(folder: Path) -> dict[str, torch.Tensor]:
    """The best student's weights by name."""
    found: dict[str, torch.Tensor] = load_file(folder / _BEST)
    return found
