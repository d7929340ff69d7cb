"""What `make` would run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def commands(target: str, arguments: str) -> list[str]:
    """What a target runs where everything is installed; nothing is run."""
    asked = ["make", "-n", "-o", ".venv/.installed", target, f"ARGS={arguments}"]
    told = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [line for line in told.splitlines() if "specserve" in line]


@pytest.mark.parametrize("arguments", ["", "--depth 0", "--speculator ngram", "--profile llama-8b-1b-h100 --port 1"])
def test_check_serve_looks_at_what_serve_starts(arguments: str) -> None:
    """The same flags, with ARGS that name a speculator or models and with others."""
    (serve,), (check,) = commands("serve", arguments), commands("check-serve", arguments)
    assert serve.removeprefix("exec ").replace("specserve serve", "specserve check", 1) == check
    assert check.endswith(arguments)
