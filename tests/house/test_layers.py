"""The rooms of docs/architecture.md, held by reading every import."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "specserve"

GROUND = {
    *("types", "errors", "config", "folders", "metrics", "templates", "text", "logs", "timeline", "tracing"),
    "tree_shape",
    "cache",
    "native",
}
ROOMS = {
    "transport": set(),
    "models": set(),
    "demo": {"models"},
    "distill": {"models"},
    "sampling": {"transport"},
    "verification": {"transport", "sampling", "models"},
    "drafting": {"transport", "sampling", "models"},
    "coordinator": {"transport"},
    "api": set(),
}
"""What each room may import besides the ground floor and itself. Rooms not listed see everything."""

FORBIDDEN = {
    "coordinator": {"torch", "ray", "fastapi", "transformers"},
    "api": {"torch", "ray", "transformers"},
    "transport": {"torch", "ray"},
    "types": {"torch", "ray", "transformers", "fastapi"},
    "errors": {"torch", "ray"},
    "config": {"torch", "ray"},
    "metrics": {"torch", "ray"},
    "tracing": {"torch", "ray", "fastapi"},
}


def files():
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file imports, at any depth, under TYPE_CHECKING too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if node.module == "specserve" else {node.module}
    return frozenset(found)


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_what_its_room_may_see(path):
    """Ground floor, transport ← sampling ← verification, drafting; the coordinator and the api see the least."""
    room = room_of(path)
    mine = {name.split(".")[1] for name in imports(path) if name.startswith("specserve.")}
    if room in ROOMS:
        assert mine <= GROUND | ROOMS[room] | {room}
    elif room in GROUND:
        assert mine <= GROUND


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_cluster_room_knows_ray_and_light_rooms_know_no_torch(path):
    """Ray is at the rim; the coordinator's mind and the HTTP side run without torch."""
    room = room_of(path)
    outside = {name.split(".")[0] for name in imports(path)}
    assert room == "cluster" or "ray" not in outside
    assert not outside & FORBIDDEN.get(room, set())


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_tracing_room_knows_opentelemetry(path):
    """It is an extra: nothing else imports it, and the room's own front does so only when spans are wanted."""
    assert path.name == "opentelemetry.py" or not any(name.startswith("opentelemetry") for name in imports(path))


def test_model_free_speculators_import_no_torch():
    """They live in the coordinator's process."""
    for name in ("ngram", "prediction", "suffix"):
        assert "torch" not in {found.split(".")[0] for found in imports(PACKAGE / "drafting" / f"{name}.py")}
