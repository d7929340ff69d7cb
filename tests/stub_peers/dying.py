"""Ends at its start, and leaves a process of its own behind."""

import subprocess
import sys

DISTRIBUTION = "pytest"
REQUIREMENTS = ()
MODES = ("plain",)


def serve(asked):
    """Say why, and end."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(f"the model is too large for {child.pid}")
    raise SystemExit(3)
