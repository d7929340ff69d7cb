"""The cache of built models: built once, nothing half done is seen, nothing half done stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from specserve import cache


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path))
    return tmp_path


def build(folder: Path) -> None:
    (folder / "weights").write_text("all of them")


def test_a_folder_is_built_once():
    """The second call finds what the first one built."""
    first = cache.built_once("model", build)
    assert cache.built_once("model", lambda folder: pytest.fail("built twice")) == first
    assert (first / "weights").read_text() == "all of them"


def test_what_a_killed_build_left_is_removed(root):
    """Partial folders of the same name go when the name is built again; those of other names stay."""
    for name in ("model.partial-abc", "model-2.partial-abc"):
        (root / name).mkdir()
        (root / name / "weights").write_text("half of th")
    cache.built_once("model", build)
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == ["model", "model-2.partial-abc"]


def test_a_copy_of_a_file_is_the_same_file(tmp_path, monkeypatch):
    """By content up to a size; above it by path, size and time, since nobody waits for gigabytes to be read."""
    first, copy, other = (tmp_path / name for name in ("first", "copy", "other"))
    first.write_bytes(b"weights")
    copy.write_bytes(b"weights")
    other.write_bytes(b"weighty")
    assert cache.file_identity(first) == cache.file_identity(copy) != cache.file_identity(other)
    monkeypatch.setattr(cache, "HASHED_BYTES", 6)
    assert len({cache.file_identity(path) for path in (first, copy, other)}) == 3
