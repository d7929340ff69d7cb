"""The C kernels are built where they run, once, and do without where they cannot be."""

import ctypes
import os
import shutil
import stat

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


def test_a_compiler_that_is_not_there_is_no_error(fresh, monkeypatch):
    """CC may name what is missing."""
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert native.library() is None


def test_a_compiler_that_fails_is_told_and_is_no_error(fresh, monkeypatch, caplog):
    """A compiler without OpenMP, for one."""
    broken = fresh / "cc"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit 0\necho no OpenMP here >&2\nexit 1\n')
    os.chmod(broken, broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(broken))
    assert native.library() is None
    assert "no OpenMP here" in caplog.text
    assert not list(fresh.glob("native/*/kernels.so"))
