"""The command line in a process of its own: a process has one Ray in its life, and other tests may need theirs."""

from __future__ import annotations

import subprocess
import sys


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`specserve` with these arguments, run to its end."""
    return subprocess.run([sys.executable, "-m", "specserve", *arguments], check=False, capture_output=True, text=True)
