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
from functools import lru_cache
from pathlib import Path

from specserve import cache
from specserve.errors import ConfigError

_logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared")
_FILE = "kernels.so"
_COMPILE_TIMEOUT_S = 120.0


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The kernels, compiled now if nobody did before; None where that cannot be done, which the log then tells once."""
    compiler = _compiler()
    if compiler is None:
        _logger.info("no C compiler, so steps take torch's ways: set CC, or install gcc, for faster ones")
        return None
    sources = sorted(_HERE.glob("*.c"))
    try:
        written = [path.read_text() for path in [*sources, *sorted(_HERE.glob("*.h"))]]
        key = cache.key_of(*written, *_identity(compiler))
        folder = cache.built_once(f"native/{key}", lambda fresh: _compile(compiler, sources, fresh / _FILE))
        return ctypes.CDLL(str(folder / _FILE))
    except (ConfigError, OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        _logger.warning("the C kernels could not be built, so steps take torch's ways: %s", str(said)[-2000:])
        return None


def _compiler() -> list[str] | None:
    named = shlex.split(os.environ.get("CC", ""))
    if named:
        return named if shutil.which(named[0]) else None
    found = next((name for name in ("gcc", "clang", "cc") if shutil.which(name)), None)
    return None if found is None else [found]


def _identity(compiler: list[str]) -> tuple[str, ...]:
    """What the same sources may compile differently for."""
    version = subprocess.run([*compiler, "--version"], check=True, capture_output=True, text=True, timeout=10.0)
    return (shlex.join(compiler), version.stdout, " ".join(_FLAGS), platform.machine(), _processor())


def _processor() -> str:
    """The vector instructions of this machine's processor, where the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compile(compiler: list[str], sources: list[Path], into: Path) -> None:
    command = [*compiler, *_FLAGS, *map(str, sources), "-o", str(into), "-lm"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
