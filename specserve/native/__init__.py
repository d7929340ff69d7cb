"""C kernels for CPUs, compiled where they run: a machine's own compiler knows its vector instructions best.

All `.c` files here become one shared library, once per machine: the first process that asks compiles them (seconds)
into the cache, under a key of the sources, the compiler and the processor. Without a C compiler that knows OpenMP there
is no library, and whoever asked takes the way that torch has, to the same results in more time.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from specserve import cache

_logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared")
_FILE = "kernels.so"
_COMPILE_TIMEOUT_S = 120.0


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The kernels, compiled now if nobody did before; None where that cannot be done, which the log then tells once."""
    reasons = []
    try:
        for compiler in _compilers():
            try:
                return _compiled_by(compiler)
            except Exception as error:  # whatever it is, there is another way to the same results
                reasons.append(f"{shlex.join(compiler)}: {_told(error)}")
    except ValueError as error:
        reasons.append(f"CC is {os.environ['CC']!r}: {error}")
    if reasons:
        _logger.warning("the C kernels could not be built, so steps take torch's ways: %s", "; ".join(reasons))
    else:
        _logger.info("no C compiler, so steps take torch's ways: set CC, or install gcc, for faster ones")
    return None


def _compilers() -> Iterator[list[str]]:
    """What CC names, or the compilers of this machine, each once. Raises ValueError where CC is no command line."""
    named = shlex.split(os.environ.get("CC", ""))
    if named:
        yield named
        return
    found = (shutil.which(name) for name in ("gcc", "clang", "cc"))
    for path in {os.path.realpath(path): path for path in reversed(list(filter(None, found)))}.values():
        yield [path]


def _compiled_by(compiler: list[str]) -> ctypes.CDLL:
    sources = sorted(_HERE.glob("*.c"))
    written = [path.read_text(encoding="utf-8") for path in [*sources, *sorted(_HERE.glob("*.h"))]]
    key = cache.key_of(*written, *_identity(compiler))
    folder = cache.built_once(f"native/{key}", lambda fresh: _compile(compiler, sources, fresh / _FILE))
    return ctypes.CDLL(str(folder / _FILE))


def _told(error: Exception) -> str:
    """What a compiler said, or else what went wrong; the end of it."""
    return str(getattr(error, "stderr", None) or error or type(error).__name__).strip()[-2000:]


def _identity(compiler: list[str]) -> tuple[str, ...]:
    """What the same sources may compile differently for."""
    version = _run([*compiler, "--version"], timeout_s=10.0)
    return (shlex.join(compiler), version, " ".join(_FLAGS), platform.machine(), _processor())


def _processor() -> str:
    """The vector instructions of this machine's processor, where the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compile(compiler: list[str], sources: list[Path], into: Path) -> None:
    _run([*compiler, *_FLAGS, *map(str, sources), "-o", str(into), "-lm"], timeout_s=_COMPILE_TIMEOUT_S)


def _run(command: list[str], timeout_s: float) -> str:
    """What a compiler says, in whatever language and encoding it does. Raises SubprocessError and OSError."""
    done = subprocess.run(
        command, check=True, capture_output=True, encoding="utf-8", errors="replace", timeout=timeout_s
    )
    return done.stdout
