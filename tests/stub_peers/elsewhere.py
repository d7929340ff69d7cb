"""Wants an environment of its own, which nobody made."""

DISTRIBUTION = "elsewhere"
REQUIREMENTS = ("elsewhere==1.0",)
MODES = ("plain", "ngram")
