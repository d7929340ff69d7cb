"""Answers 0, 1, 2, …, plainly and by n-gram, and has a process of its own."""

import subprocess
import sys

DISTRIBUTION = "pytest"
REQUIREMENTS = ()
MODES = ("plain", "draft", "ngram")


def generate(asked):
    """As many tokens as were asked for."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return lambda prompts, max_tokens: [list(range(max_tokens)) for _ in prompts]
