"""The cache of built models: built once, nothing half done is seen, nothing half done stays."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specserve import cache
from specserve.errors import ConfigError


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


@pytest.mark.parametrize("damage", ["truncated", "changed", "gone", "unlisted", "empty", "a file"])
def test_a_damaged_folder_is_built_anew(root, damage, caplog):
    """Whoever has the old file open or mapped keeps it: the folder is replaced, not written again."""
    folder = cache.built_once("model", build)
    file = folder / "weights"
    with file.open() as held:
        if damage == "truncated":
            copy = root / "copy"
            copy.write_text("all")
            copy.rename(file)
        elif damage == "changed":
            copy = root / "copy"
            copy.write_text("none of them"[: len("all of them")])
            copy.rename(file)
        elif damage == "gone":
            file.unlink()
        elif damage == "unlisted":
            (folder / cache.LISTED).write_text("")
        else:
            folder.rename(root / "elsewhere")
            folder.touch() if damage == "a file" else folder.mkdir()
        assert (cache.built_once("model", build) / "weights").read_text() == "all of them"
        assert held.read() == "all of them"
    assert "is built anew" in caplog.text
    assert not list(root.glob("*.partial-*"))
    assert cache.built_once("model", lambda folder: pytest.fail("built twice")) == folder


def test_large_files_are_compared_by_size(monkeypatch):
    """Nobody waits for hundreds of megabytes to be read at each start."""
    monkeypatch.setattr(cache, "_COMPARED_BYTES", 4)
    folder = cache.built_once("model", build)
    (folder / "weights").write_text("ALL OF THEM")
    assert cache.built_once("model", lambda folder: pytest.fail("built twice")) == folder
    (folder / "weights").write_text("all of")
    assert (cache.built_once("model", build) / "weights").read_text() == "all of them"


def test_many_who_find_it_damaged_build_it_once(root):
    """Those that wait for the lock find it mended."""
    folder = cache.built_once("model", build)
    (folder / "weights").unlink()
    built = []

    def slowly(fresh: Path) -> None:
        built.append(fresh)
        time.sleep(0.05)
        build(fresh)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: (cache.built_once("model", slowly) / "weights").read_text(), range(8)))
    assert found == ["all of them"] * 8
    assert len(built) == 1


def test_a_user_without_a_home_is_told(monkeypatch):
    """In containers there may be none."""
    monkeypatch.setenv("SPECSERVE_CACHE", "~nobody-of-this-name/cache")
    with pytest.raises(ConfigError, match="set SPECSERVE_CACHE"):
        cache.root()
