"""The soak bench: what it counts as growth, and a short run on a real Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from command import command

from specserve.bench import soak
from specserve.bench.soak import Look, Options, Outcome, Use, broken, look, rows, summary
from specserve.errors import ConfigError

MIB = 1 << 20


def outcome(**changes) -> Outcome:
    first = Look({1: Use("worker", 100 * MIB, 10), 2: Use("ingress", 50 * MIB, 5)}, 8 * MIB)
    last = Look({1: Use("worker", 101 * MIB, 10), 2: Use("ingress", 50 * MIB, 5)}, 8 * MIB)
    return Outcome(**({"first": first, "last": last, "ends": {"finished": 3}} | changes))


def test_growth_within_the_bound_is_flat():
    """One hundredth of growth is told in the row and breaks nothing; the largest process stands first."""
    flat = outcome()
    assert broken(flat, 0.02) == []
    worker, ingress = rows(flat)
    assert (worker["process"], worker["growth"], ingress["growth"]) == ("worker", pytest.approx(0.01), 0.0)
    assert summary(flat)["shared_end_mib"] == 8.0


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"last": Look({1: Use("worker", 110 * MIB, 10), 2: Use("ingress", 50 * MIB, 5)}, 0)}, r"grew by 10\.0 MiB"),
        ({"last": Look({1: Use("worker", 100 * MIB, 10)}, 0)}, "ended: ingress"),
        ({"ends": {"finished": 2, "failed": 1}}, "failed"),
        ({"wrong": 1}, "another text"),
        ({"left": {"slots": 2.0}}, "2 slots"),
    ],
)
def test_what_does_not_stay_flat_is_told(changes, told):
    """Memory, processes, streams and what is held."""
    import re

    (line,) = broken(outcome(**changes), 0.02)
    assert re.search(told, line)


def test_a_look_tells_what_a_process_really_holds():
    """A child that takes 64 MiB and opens five files shows both."""
    code = (
        "import sys; kept = bytearray(64 * 2**20); files = [open('/dev/null') for _ in range(5)]; "
        "print(flush=True); sys.stdin.read(1); more = bytearray(b'x' * 64 * 2**20); "
        "files += [open('/dev/null') for _ in range(5)]; print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        before = look().uses[child.pid]
        child.stdin.write(b"x")
        child.stdin.flush()
        child.stdout.readline()
        after = look().uses[child.pid]
        child.kill()
    assert after.resident - before.resident > 60 * MIB
    assert after.files - before.files == 5
    assert os.getpid() not in look().uses


@pytest.mark.parametrize(("wrong", "told"), [({"clients": 0}, "--clients"), ({"minutes": 0}, "--minutes")])
def test_what_cannot_be_run_is_refused(wrong, told):
    """In words, by the option's name."""
    with pytest.raises(ConfigError, match=told):
        soak.measure(Options(**wrong), print)


@pytest.mark.ray
@pytest.mark.full
def test_a_short_run_on_a_real_ray(tmp_path):
    """Half a minute: streams with their texts, nothing held, a row for each process. Growth needs longer to tell."""
    report = tmp_path / "soak.json"
    arguments = ["--clients", "4", "--minutes", "0.3", "--warm-up", "5", "--max-tokens", "80", "--growth", "1"]
    done = command("bench", "soak", *arguments, "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(report.read_text())
    assert written["config"]["whole"]["finished"] > 4
    assert len(written["rows"]) > 5
