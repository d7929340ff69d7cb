"""Device profiles of another pace than the shipped ones."""

from __future__ import annotations

import json
from pathlib import Path

from specserve.models import _device_profile


def paced(folder: Path, name: str, *, target: float, draft: float) -> Path:
    """A shipped profile whose steps take so many times as long, as a file in this folder."""
    tree = json.loads((_device_profile.FOLDER / f"{name}.json").read_text())
    for role, factor in (("target", target), ("draft", draft)):
        for point in (*tree[role]["decode"], *tree[role]["extend"]):
            point["ms"] *= factor
    path = folder / "paced.json"
    path.write_text(json.dumps(tree))
    return path
