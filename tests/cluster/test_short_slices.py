"""Threads that ask for short slices: those that are made for it, and no others."""

import threading

import pytest

from specserve.cluster.short_slices import SLICE_S, short_slices, slice_s

pytestmark = pytest.mark.skipif(slice_s() is None, reason="no slices of threads on this system")


def slice_of_a_new_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(slice_s()))
    thread.start()
    thread.join()
    return found[0]


def test_threads_made_within_stay_prompt_and_others_are_as_before():
    """A thread made within keeps its slice when the one that made it has its own again."""
    before, go_on, found = slice_s(), threading.Event(), []

    def later():
        go_on.wait()
        found.append(slice_s())

    thread = threading.Thread(target=later)
    with short_slices():
        thread.start()
        assert slice_of_a_new_thread() == pytest.approx(SLICE_S)
    go_on.set()
    thread.join()

    assert found == [pytest.approx(SLICE_S)]
    assert slice_s() == before
    assert slice_of_a_new_thread() == before


def test_what_is_raised_within_leaves_the_slice_as_it_was():
    """The thread that makes others is prompt meanwhile only."""
    before = slice_s()

    with pytest.raises(RuntimeError, match="no thread"), short_slices():
        raise RuntimeError("no thread")

    assert slice_s() == before
