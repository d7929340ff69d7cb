"""Ends at its start."""

DISTRIBUTION = "pytest"
REQUIREMENTS = ()
MODES = ("plain",)


def serve(asked):
    """Say why, and end."""
    print("the model is too large")
    raise SystemExit(3)
