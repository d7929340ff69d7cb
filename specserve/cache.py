"""The cache folder of models that were converted or built here: built once, by one process, never seen half done."""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from specserve.errors import ConfigError

LOCK_WAIT_S = 600.0
HASHED_BYTES = 512 * 2**20


def root() -> Path:
    """`$SPECSERVE_CACHE`, or ~/.cache/specserve."""
    named = os.environ.get("SPECSERVE_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "specserve"


def key_of(*parts: object) -> str:
    """A short name that changes with any of the parts."""
    return hashlib.sha256("\0".join(str(part) for part in parts).encode()).hexdigest()[:16]


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

    When absent, `build(folder)` fills a temporary one, which is then renamed.

    Processes that ask for the same name wait for the first. Raises ConfigError when the cache cannot be written.
    """
    final = (under or root()) / name
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{final}.lock", timeout=LOCK_WAIT_S):
            if not final.is_dir():
                _remove_stale(final)
                _build_and_rename(final, build)
    except OSError as error:  # filelock's Timeout is one, too
        raise ConfigError(f"cannot write the model cache {final}: {error}; set SPECSERVE_CACHE elsewhere") from None
    return final


def _remove_stale(final: Path) -> None:
    """What processes left that were killed while they built. The caller holds the lock, so nobody builds now."""
    for left in final.parent.glob(f"{glob.escape(final.name)}.partial-*"):
        shutil.rmtree(left, ignore_errors=True)


def _build_and_rename(final: Path, build: Callable[[Path], None]) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f"{final.name}.partial-", dir=final.parent))
    try:
        temporary.chmod(0o755)
        build(temporary)
        temporary.rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
