"""The README's file tree and the code agree."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_readme_names_every_room():
    """Each folder and top-level module of the package stands in the README's file tree."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = readme[readme.index("specserve/\n") :]
    rooms = {path.name for path in (ROOT / "specserve").iterdir() if path.is_dir() and path.name != "__pycache__"}
    modules = {path.name for path in (ROOT / "specserve").glob("*.py") if not path.name.startswith("__")}

    assert {room for room in rooms if not re.search(rf"\b{room}/", tree)} == set()
    assert {module for module in modules if module not in tree} == set()
