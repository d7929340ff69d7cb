"""Other engines' servers that a bench starts: in the table, or with a row that says why not; and nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_llama
from transformers import AutoModelForCausalLM

from specserve import folders
from specserve.bench import whole_head
from specserve.bench.peer_environments import ROOM, Environment, exported
from specserve.bench.peer_servers import llama_cpp
from specserve.bench.peer_servers._launch import Desk, Together
from specserve.bench.started_peers import Work, started
from specserve.cli import main
from specserve.cluster import processes
from specserve.config import ModelConfig
from specserve.errors import ConfigError, SpecserveError
from specserve.models import _gguf, _reduced_head
from specserve.models.loading import load_model

WORK = Work(Path("target"), None, 2, 8, 64, 1)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("target"), seed=1)


def compared(target: Path, folder: Path, peers: str, *more: str) -> list[dict]:
    """The rows of a comparison with the peers of a folder; the first is our own plain decoding."""
    path = folder / "compare.json"
    sizes = ["--prompts", "2", "--max-tokens", "3", "--passes", "1", "--concurrency", "1,2"]
    own = ["--target", str(target), "--systems", "local", "--speculators", "none", "--speculator", "none"]
    chosen = ["--peers", str(folder), "--peer-names", peers, "--json", str(path)]
    assert main(["bench", "compare", *sizes, *own, *chosen, *more]) == 0
    return json.loads(path.read_text())["rows"]


def running(pid: int) -> bool:
    """Whether it does; of one that only waits to be buried there is no command line left."""
    path = Path("/proc", str(pid), "cmdline")
    return path.exists() and path.read_bytes() != b""


def test_peers_are_started_each_way_they_decode_and_skipped_with_the_reason(target, tmp_path) -> None:
    """One that works has rows by mode and concurrency; the others one each that tells why there are no figures."""
    peers = ",".join(f"stub_peers.{name}" for name in ("counting", "elsewhere", "dying", "short"))
    rows = compared(target, tmp_path, peers, "--depth", "0,2")
    ours, theirs = ([row for row in rows if row["system"].startswith("specserve") == mine] for mine in (True, False))
    assert [row["equal_answers"] for row in ours if row["depth"] == 0] == [2, 2]
    worked = [(row["mode"], row["depth"], row["concurrency"]) for row in theirs if row["system"] == "counting"]
    assert worked == [("plain", 0, 1), ("plain", 0, 2), ("ngram", 2, 1), ("ngram", 2, 2)]
    assert all(row["tokens_per_s"] > 0 and row["equal_answers"] == 0 for row in theirs[:4])
    assert {row["version"] for row in theirs[:4]} == {pytest.__version__}
    elsewhere, dying, short = theirs[4:]
    assert f"`specserve bench peer-env elsewhere {tmp_path}`" in elsewhere["mode"]
    words = re.search(r"ended with status 3 at its start: … the model is too large for (\d+)", dying["mode"])
    assert words is not None
    assert not running(int(words[1]))
    assert "short answered with 3 tokens where 4 were asked for" in short["mode"]
    assert all(row["mode"].startswith("plain, skipped: ") and row["tokens_per_s"] is None for row in theirs[4:])


@pytest.mark.full
def test_transformers_answers_as_ours_do(target, tmp_path) -> None:
    """A real peer: a static batch and prompt lookup give our plain answers, token for token."""
    rows = compared(target, tmp_path, "transformers", "--depth", "0,2")
    found = [(row["mode"], row["equal_answers"]) for row in rows if row["system"] == "transformers"]
    assert found == [("plain", 2), ("plain", 2), ("ngram", 2), ("ngram", 2)]


_CHILD = """
import signal, sys, time
from pathlib import Path
from specserve.bench.peer_environments import Environment
from specserve.bench.started_peers import Work, started

work = Work(Path("target"), None, 2, 8, 64, 1)
with started(Environment.of("stub_peers.counting", Path(sys.argv[1])), "plain", work, lambda _: None):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would this
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.full)])
def test_an_interrupted_bench_leaves_no_server(number, tmp_path) -> None:
    """The server and its own process end with the bench, told to or not."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _CHILD, str(tmp_path)]
    with subprocess.Popen(command, stdout=-1, stderr=subprocess.DEVNULL, env=variables) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        below = processes.descendants(child.pid)
        assert len(below) == 2
        child.send_signal(number)
    deadline_s = time.monotonic() + 30
    while any(process.alive() for process in below) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert [process for process in below if process.alive()] == []


def test_a_server_that_is_not_needed_any_more_is_ended(tmp_path) -> None:
    """With its own process, when the block ends."""
    before = processes.descendants()
    with started(Environment.of("stub_peers.counting", tmp_path), "plain", WORK, lambda _: None) as peer:
        assert peer.run([[1], [2]], 4, 0, 2).answers == ((0, 1, 2, 3), (0, 1, 2, 3))
        assert len(processes.descendants() - before) == 2
    assert processes.descendants() - before == set()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peers", "/nowhere"], "or a folder"),
        (["--peer-names", "vllm"], "--peers takes the folder"),
        (["--peers", "{folder}", "--peer-names", "vlm"], "no bench.peer_servers called 'vlm'; there are: llama_cpp"),
    ],
)
def test_peers_that_cannot_be_are_refused_before_anything_runs(arguments, said, target, tmp_path, capsys) -> None:
    """No such folder, no folder at all, no such peer."""
    asked = [word.format(folder=tmp_path) for word in arguments]
    with contextlib.suppress(SystemExit):
        assert main(["bench", "compare", "--target", str(target), *asked]) != 0
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", folders.names_in(ROOM))
def test_a_peer_says_all_that_its_environment_needs(name, tmp_path) -> None:
    """Pinned requirements with its own distribution, ways to decode with plain as the first, and one way to serve."""
    peer = Environment.of(name, tmp_path).peer
    engines = [requirement for requirement in peer.REQUIREMENTS if requirement.startswith(f"{peer.DISTRIBUTION}==")]
    assert len(engines) == bool(peer.REQUIREMENTS)
    assert peer.MODES[0] == "plain"
    assert set(peer.MODES) <= {"plain", "draft", "ngram"}
    assert sum(hasattr(peer, way) for way in ("serve", "engine", "generate")) == 1


def test_an_environment_is_there_when_its_engine_is(tmp_path) -> None:
    """An interpreter alone does not make one, nor does a package of another name."""
    environment = Environment.of("stub_peers.elsewhere", tmp_path)
    packages = tmp_path / "elsewhere" / "lib" / "python3.11" / "site-packages"
    environment.python.parent.mkdir(parents=True)
    environment.python.touch()
    for name, there in (("other", None), ("elsewhere", "1.0")):
        place = packages / f"{name}-1.0.dist-info"
        place.mkdir(parents=True)
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        assert environment.version() == there
        if there is None:
            with pytest.raises(ConfigError, match="peer-env elsewhere"):
                environment.check()
    environment.check()


def test_what_waits_together_is_answered_together() -> None:
    """Requests for equally many tokens are one batch, others another; a batch that fails fails alone."""
    batches = []

    def generate(prompts, max_tokens):
        batches.append((list(prompts), max_tokens))
        if max_tokens == 9:
            raise ValueError("too many")
        return [[max_tokens] * max_tokens for _ in prompts]

    together = Together(generate)
    for key, prompt, count in ((1, [1], 2), (2, [2], 3), (3, [3], 2)):
        together.add(key, prompt, count)
    assert together.step() == [(1, [2, 2]), (3, [2, 2])]
    assert together.step() == [(2, [3, 3, 3])]
    assert batches == [([[1], [3]], 2), ([[2]], 3)]
    desk = Desk(Together(generate))
    threading.Thread(target=desk.work, daemon=True).start()
    with pytest.raises(ValueError, match="too many"):
        desk.answer([4], 9)
    assert desk.answer([5], 1) == [1]


def test_a_reduced_head_becomes_a_whole_one_with_the_same_guesses(tmp_path) -> None:
    """The folder is an ordinary one, and its likeliest token is the reduced head's, everywhere."""
    reduced, whole = tiny_llama(tmp_path / "reduced", seed=3), tmp_path / "whole"
    whole.mkdir()
    head = load_file(reduced / "model.safetensors")["lm_head.weight"]
    ids = torch.arange(0, len(head), 3)
    _reduced_head.write(reduced, head[ids], ids)
    assert whole_head.is_missing(reduced)
    whole_head.write(reduced, whole)
    assert not whole_head.is_missing(whole)
    tokens = torch.randint(len(head), (1, 64), generator=torch.Generator().manual_seed(0))
    ours = load_model(reduced, ModelConfig(source=str(reduced), device="cpu"))(tokens).logits
    theirs = AutoModelForCausalLM.from_pretrained(whole)(tokens).logits
    torch.testing.assert_close(theirs[..., ids], ours[..., ids])
    assert torch.equal(theirs.argmax(-1), ours.argmax(-1))


def test_a_gguf_export_is_the_same_model(target, tmp_path, monkeypatch) -> None:
    """Read back by transformers, which knows the format by itself, all weights are the same and so is the tokenizer."""
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "cache"))
    llama_cpp.export(target, tmp_path)
    back = _gguf.converted(tmp_path / "model.gguf", lambda _: None)
    before, after = load_file(target / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_export_that_fails_says_so_and_leaves_nothing(target, tmp_path, monkeypatch) -> None:
    """The peer's last words are in the error, and the next try begins anew."""
    environment = Environment.of("stub_peers.dying", tmp_path)
    monkeypatch.setattr(Environment, "own", True)
    monkeypatch.setattr(Environment, "python", Path(sys.executable))
    monkeypatch.setattr(environment.peer, "export", lambda source, to: None, raising=False)
    with pytest.raises(SpecserveError, match=r"exporting ended with status 1:[\s\S]*no attribute 'export'"):
        exported(environment, target, lambda _: None)
    assert [path.name for path in (tmp_path / "models").iterdir() if path.suffix != ".lock"] == []
