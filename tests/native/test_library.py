"""The C kernels are built where they run, once, and do without where they cannot be."""

import ctypes
import os
import shutil
import stat
import subprocess
import sys

import pytest

from specserve import native

NO_COMPILER = "needs a C compiler with OpenMP"


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache, and a library that nobody has asked for."""
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path))
    native.library.cache_clear()
    yield tmp_path
    native.library.cache_clear()


@pytest.mark.skipif(shutil.which("gcc") is None, reason=NO_COMPILER)
def test_what_was_compiled_is_found_again(fresh):
    """The second process of a machine does not compile."""
    assert native.library() is not None
    (built,) = fresh.glob("native/*/kernels.so")
    before = built.stat().st_mtime_ns
    native.library.cache_clear()
    assert native.library() is not None
    assert built.stat().st_mtime_ns == before


@pytest.mark.skipif(shutil.which("gcc") is None, reason=NO_COMPILER)
def test_kernels_compute(fresh):
    """A call through to the code, with lengths around the width of a vector."""
    argmax = native.library().specserve_argmax_f32
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    argmax.argtypes = [pointer, number, number, number, pointer, ctypes.c_int]
    for n in (1, 15, 16, 17, 1000):
        row = (ctypes.c_float * n)(*[float(i % 7) - 3 for i in range(n)])
        row[n - 1] = 9.0
        place = (number * 1)(-1)
        argmax(row, n, 1, n, place, 1)
        assert place[0] == n - 1


@pytest.mark.skipif(shutil.which("gcc") is None, reason=NO_COMPILER)
@pytest.mark.parametrize("left", [0, pytest.param(5000, marks=pytest.mark.full)])
def test_a_library_that_was_cut_off_is_compiled_anew(fresh, left):
    """A full disk leaves such files; a process that maps one dies of SIGBUS where it reads behind the end."""
    assert native.library() is not None
    (built,) = fresh.glob("native/*/kernels.so")
    cut = fresh / "cut"
    cut.write_bytes(built.read_bytes()[:left])
    cut.rename(built)
    native.library.cache_clear()
    assert native.library() is not None
    assert built.stat().st_size > 5000


@pytest.mark.parametrize(
    ("variable", "value"), [("CC", 'gcc "'), ("CC", "/nowhere/cc"), ("SPECSERVE_CACHE", "~nobody-of-this-name/x")]
)
def test_whatever_is_wrong_is_told_once_and_is_no_error(fresh, monkeypatch, caplog, variable, value):
    """A quote that nobody closes, and a user without a home folder."""
    monkeypatch.setenv(variable, value)
    assert native.library() is None
    assert native.library() is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "so steps take torch's ways" in record.message
    assert (variable if variable != "CC" else value.split()[0]) in record.message


@pytest.mark.skipif(shutil.which("gcc") is None, reason=NO_COMPILER)
def test_the_locale_does_not_matter(fresh):
    """Sources are UTF-8, and compilers may say their version in anything."""
    compiler = shim(fresh / "cc", r"printf 'gcc \344\n'", 'exec gcc "$@"')
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "CC": str(compiler)}
    program = "from specserve import native; assert native.library() is not None"
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | plain)


@pytest.mark.skipif(shutil.which("gcc") is None, reason=NO_COMPILER)
def test_where_one_compiler_fails_the_next_is_tried(fresh, monkeypatch):
    """A clang without OpenMP beside a gcc that has it, or the other way round."""
    shim(fresh / "gcc", "echo broken 1.0", "exit 1")
    (fresh / "clang").symlink_to(shutil.which("gcc"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", f"{fresh}:{os.environ['PATH']}")
    assert native.library() is not None


def shim(path, version, otherwise):
    """A compiler that is a script."""
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {version} && exit 0\n{otherwise}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_compiler_that_fails_is_told_and_is_no_error(fresh, monkeypatch, caplog):
    """A compiler without OpenMP, for one."""
    broken = shim(fresh / "cc", "echo broken 1.0", "echo no OpenMP here >&2; exit 1")
    monkeypatch.setenv("CC", str(broken))
    assert native.library() is None
    assert "no OpenMP here" in caplog.text
    assert not list(fresh.glob("native/*/kernels.so"))
