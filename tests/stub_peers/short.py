"""Answers with one token less than it was asked for."""

DISTRIBUTION = "pytest"
REQUIREMENTS = ()
MODES = ("plain",)


def generate(asked):
    """One token is missing."""
    return lambda prompts, max_tokens: [list(range(max_tokens - 1)) for _ in prompts]
