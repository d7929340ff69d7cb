"""The cache folder of models that were converted or built here: built once, by one process, never seen half done.

Each built folder lists its files with their sizes, and small ones with a digest, and is compared with that whenever it
is used: what a full disk, a crash or a cleaner damaged is built anew. Processes that still use the old one have its
files open or mapped, and keep them: a folder is replaced as a whole, and its files are never written again.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from specserve.errors import ConfigError

_logger = logging.getLogger(__name__)

LOCK_WAIT_S = 600.0
HASHED_BYTES = 512 * 2**20
LISTED = ".built.json"
"""The list of a built folder's files, in it."""

_COMPARED_BYTES = 2**20
"""Files up to this size are compared by content (a millisecond each), larger ones by their size."""


def root() -> Path:
    """`$SPECSERVE_CACHE`, or ~/.cache/specserve. Raises ConfigError for a user without a home folder."""
    named = os.environ.get("SPECSERVE_CACHE")
    try:
        return Path(named).expanduser() if named else Path.home() / ".cache" / "specserve"
    except RuntimeError as error:
        raise ConfigError(f"there is no place for the model cache: {error}; set SPECSERVE_CACHE to a folder") from None


def key_of(*parts: object) -> str:
    """A short name that changes with any of the parts."""
    return hashlib.sha256("\0".join(str(part) for part in parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def file_identity(path: Path) -> str:
    """Changes when the file's content does, so that another copy of it (a new clone, a new venv) finds what is cached.

    Files above HASHED_BYTES would take long to read: they are known by path, size and modification time.
    """
    stat = path.stat()
    if stat.st_size > HASHED_BYTES:
        return key_of(path.resolve(), stat.st_size, stat.st_mtime_ns)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def built_once(name: str, build: Callable[[Path], None], *, under: Path | None = None) -> Path:
    """The folder `name` under the cache root, or `under` another folder.

    When absent, or not as it was built, `build(folder)` fills a temporary one, which then takes its place.

    Processes that ask for the same name wait for the first. Raises ConfigError when the cache cannot be written.
    """
    final = (under or root()) / name
    if _fault(final) is None:
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{final}.lock", timeout=LOCK_WAIT_S):
            fault = _fault(final)
            if fault is not None:
                if os.path.lexists(final):
                    _logger.warning("%s in the cache is built anew: %s", final, fault)
                _remove_stale(final)
                _build_and_rename(final, build)
    except OSError as error:  # filelock's Timeout is one, too
        raise ConfigError(f"cannot write the model cache {final}: {error}; set SPECSERVE_CACHE elsewhere") from None
    return final


def _fault(folder: Path) -> str | None:
    """What keeps a folder from being used; None where it is as it was built."""
    try:
        listed: dict[str, list[object]] = json.loads((folder / LISTED).read_text(encoding="utf-8"))
        changed = next((name for name, told in listed.items() if _described(folder / name) != told), None)
    except (OSError, ValueError, AttributeError) as error:
        return f"it is not complete, or of an earlier version ({error})"
    return None if changed is None else f"{changed} is not as it was written"


def _described(file: Path) -> list[object]:
    """What a folder's list says of a file: its size, and a digest where that is read at once."""
    size = file.stat().st_size
    return [size, hashlib.sha256(file.read_bytes()).hexdigest() if size <= _COMPARED_BYTES else None]


def _remove_stale(final: Path) -> None:
    """What processes left that were killed while they built. The caller holds the lock, so nobody builds now."""
    for left in final.parent.glob(f"{glob.escape(final.name)}.partial-*"):
        shutil.rmtree(left, ignore_errors=True)


def _build_and_rename(final: Path, build: Callable[[Path], None]) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f"{final.name}.partial-", dir=final.parent))
    fresh = temporary / "fresh"
    try:
        fresh.mkdir()
        fresh.chmod(0o755)
        build(fresh)
        files = [path for path in sorted(fresh.rglob("*")) if path.is_file()]
        listed = {path.relative_to(fresh).as_posix(): _described(path) for path in files}
        (fresh / LISTED).write_text(json.dumps(listed), encoding="utf-8")
        _write_through(fresh)
        if os.path.lexists(final):
            final.rename(temporary / "damaged")
        fresh.rename(final)
        _write_folder_through(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_through(folder: Path) -> None:
    """Onto the disk, so that a machine that stops finds all of a folder that has its final name, or none of it."""
    for path in folder.rglob("*"):
        if path.is_dir():
            _write_folder_through(path)
        elif path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _write_folder_through(folder)


def _write_folder_through(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems on a network know this for files only
            os.fsync(number)
    finally:
        os.close(number)
