"""Finding and ending the processes below this one."""

from __future__ import annotations

import os
import subprocess
import sys

from specserve.cluster.processes import Process, descendants, end


def test_children_of_children_are_found_and_ended():
    """A process tree is found at any depth, and nothing of it is left."""
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE).wait()"
    before = descendants()
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        while len(descendants() - before) < 2:
            assert child.poll() is None
        tree = descendants() - before
        assert child.pid in {process.pid for process in tree}
        assert end(tree, patience_s=0.2) == set()
        assert not any(process.alive() for process in tree)
    finally:
        child.kill()
        child.wait()


def test_a_number_used_again_is_another_process():
    """The same pid with another start time is not taken for the process that was meant."""
    assert not Process(os.getpid(), "0").alive()
