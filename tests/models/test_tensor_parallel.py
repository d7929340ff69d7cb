"""Two processes hold one model over gloo: together they say what one says, and no failure of one leaves one waiting."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from rank_of_two import FEW, HOST, WAIT_S, group_of_two
from tiny_causal import BLOCK, BLOCKS, CONFIGS, ragged, random_tokens, tiny
from tiny_tokenizer import byte_level, write_folder
from transformers import AutoModelForCausalLM

from specserve import config as configs
from specserve.config import ModelConfig
from specserve.errors import ConfigError, GroupLost
from specserve.models import _memory, _memory_plan, _shards, _tensor_parallel, loading
from specserve.models._ranks import Meeting, MeetingPlace, arrive, shares
from specserve.models._stretches import Stretch
from specserve.models._worker import load_backend

MODELS = Path(__file__).parent


class Second:
    """The other process; started anew once it died."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def hold(self, port: int, path: Path, fault: str) -> None:
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, str(MODELS / "rank_of_two.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self.process.stdin is not None
        print(port, path, fault, file=self.process.stdin, flush=True)

    def says(self) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def second() -> Iterator[Second]:
    other = Second()
    yield other
    other.end()


def folder_of(family: str, base: Path) -> Path:
    folder = base / family
    if not folder.exists():
        core = byte_level()
        write_folder(folder, core)
        config = CONFIGS[family]()
        config.vocab_size = core.get_vocab_size(with_added_tokens=True)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("together")


@contextmanager
def together(
    second: Second, folder: Path, *, fault: str = "none", hang_after_s: float = WAIT_S, **model: Any
) -> Iterator[Any]:
    """Rank 0's backend, here, of a pair."""
    settings = {"source": str(folder), "kv_blocks": BLOCKS, "tensor_parallel": 2, "device": "cpu", "threads": 1} | model
    tree = {"target": settings, "engine": {"block_tokens": BLOCK}}
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(tree))
    place = MeetingPlace(HOST, WAIT_S)
    second.hold(place.meeting.port, path, fault)
    config = configs.parse(tree)
    ranks = group_of_two(place.store, 0, hang_after_s)
    try:
        backend, info = load_backend(config.target, "target", config.engine, ranks=ranks)
        assert second.says() == str(info.blocks)
        yield backend
    finally:
        if ranks.broken is None:
            ranks.tell(torch.zeros(512, dtype=torch.int64))  # means nothing, which ends the other's part
        dist.destroy_process_group()


def alone(folder: Path) -> Any:
    config = configs.parse({"target": {"source": str(folder), "kv_blocks": BLOCKS}, "engine": {"block_tokens": BLOCK}})
    return load_backend(config.target, "target", config.engine)[0]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def batches() -> list[Any]:
    """Prompts in scattered blocks, decode rows beside one, a batch whose logits nobody wants, and one behind it."""
    first, second, third = random_tokens(1, 30), random_tokens(2, 21), random_tokens(3, 9)
    tables = [[9, 3, 30, 11, 2, 5, 8, 1], [20, 21, 22, 23, 24, 25], [7, 6, 33]]
    return [
        ragged([(first[:25], 0, tables[0]), (second[:20], 0, tables[1])]),
        ragged([(first[25:28], 25, tables[0]), (third[:4], 0, tables[2]), (second[20:], 20, tables[1])]),
        replace(ragged([(third[4:8], 4, tables[2])]), wanted=np.empty(0, np.int64)),
        replace(ragged([(first[28:], 28, tables[0]), (third[8:], 8, tables[2])]), wanted=np.array([1, 2])),
    ]


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gemma3",
        pytest.param("qwen3", marks=pytest.mark.full),
        pytest.param("mistral_window", marks=pytest.mark.full),
    ],
)
def test_two_ranks_say_what_one_says(family, second, base):
    """Every logit of prompts, chains and decode rows, over scattered pages; 421 ids cannot be shared out evenly."""
    folder = folder_of(family, base)
    one = alone(folder)
    with together(second, folder) as two:
        assert two.vocab_size == one.vocab_size
        for batch in batches():
            close(two.forward(batch), one.forward(batch))


def test_copied_pages_are_copied_on_every_rank(second, base):
    """A row that goes on from copies of another's pages says what that row would have said."""
    folder = folder_of("llama", base)
    one, tokens = alone(folder), random_tokens(4, 12)
    expected = one.forward(ragged([(tokens, 0, [0, 1, 2])]))[8:]
    with together(second, folder) as two:
        two.forward(ragged([(tokens[:8], 0, [0, 1])]))
        two.copy_blocks([0, 1], [30, 17])
        close(two.forward(ragged([(tokens[8:], 8, [30, 17, 4])])), expected)


def test_each_rank_holds_half(second, base):
    """KV of a position takes half as much on each, and of the vocabulary rank 0 has the larger half."""
    folder = folder_of("llama", base)
    one = alone(folder)
    with together(second, folder) as two:
        assert 2 * two.bytes_per_block(BLOCK) == one.bytes_per_block(BLOCK)
        assert two._backend._model.model.embed_tokens.weight.shape == (211, 32)
        assert two._backend._flat is not None, "the fast way through a Llama is there for its parts too"


@pytest.mark.parametrize("total", [1, 97, 421, 4096])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shares_are_all_of_it_once(total, size):
    """Each row belongs to one rank, in order, and no share is larger than the first."""
    cut = shares(total, size)
    assert [row for begin, end in cut for row in range(begin, end)] == list(range(total))
    assert max(end - begin for begin, end in cut) == cut[0][1]


def test_pages_are_as_many_as_the_smallest_rank_has_room_for(second, base, monkeypatch):
    """Without a configured size both ranks have the blocks of the one with less memory."""
    folder = folder_of("llama", base)
    monkeypatch.setattr(_memory_plan, "_CPU_MOST", {"target": 1 << 20, "draft": 1 << 20})
    with together(second, folder, kv_blocks=None) as two:
        assert two._backend._pages.keys[0].shape[0] == (1 << 20) // two.bytes_per_block(BLOCK) * BLOCK


@pytest.mark.parametrize(("fault", "error"), [("memory", torch.OutOfMemoryError), ("error", RuntimeError)])
def test_a_rank_that_fails_says_so_and_goes_on(fault, error, second, base):
    """In the midst of a step: rank 0 raises what became of the other, and the next step is computed by both."""
    folder = folder_of("llama", base)
    one, tokens = alone(folder), random_tokens(5, 30)
    with together(second, folder, fault=fault) as two:
        with pytest.raises(error, match=r"rank 1.*(memory|a bug of the second rank)"):
            two.forward(ragged([(tokens, 0, list(range(8)))]))
        small = ragged([(tokens[:FEW], 0, [0, 1])])
        close(two.forward(small), one.forward(small))


def test_the_other_part_counts(second, base):
    """A rank that adds nothing in one layer of three is seen in the logits: the comparisons above can fail."""
    folder = folder_of("llama", base)
    one, batch = alone(folder), batches()[0]
    with together(second, folder, fault="nothing") as two, pytest.raises(AssertionError, match="not close"):
        close(two.forward(batch), one.forward(batch))


def test_rank_0_that_fails_leaves_nobody_waiting(second, base, monkeypatch):
    """Its own error comes out, and the next step is computed by both."""
    folder = folder_of("llama", base)
    one, batch = alone(folder), batches()[0]
    with together(second, folder) as two:
        layer = two._backend._model.model.layers[2].mlp.down_proj
        with monkeypatch.context() as patched:
            patched.setattr(layer.part, "forward", None)
            with pytest.raises(TypeError):
                two.forward(batch)
        close(two.forward(batch), one.forward(batch))


def test_what_does_not_fit_into_one_rank_is_computed_in_halves(second, base):
    """A forward of 30 positions, of which the other rank can hold 8: the logits are those of one process."""
    folder = folder_of("llama", base)
    tokens = random_tokens(6, 30)
    rows = [Stretch(0, tokens, np.arange(8), 5)]
    with together(second, folder, fault="memory") as two:
        close(_memory.forward(two, rows), _memory.forward(alone(folder), rows))


@pytest.mark.parametrize(("fault", "hang_after_s"), [("death", WAIT_S), ("hang", 3.0)])
def test_a_rank_that_is_gone_or_hangs_breaks_the_group(fault, hang_after_s, second, base):
    """Rank 0 gets GroupLost instead of waiting for ever, at once in every later step."""
    folder = folder_of("llama", base)
    batch = batches()[0]
    try:
        with together(second, folder, fault=fault, hang_after_s=hang_after_s) as two:
            for _ in range(2):
                with pytest.raises(GroupLost, match="rank 0 of 2 lost the others"):
                    two.forward(batch)
    finally:
        second.end()


def test_a_meeting_that_nobody_holds_is_a_lost_group():
    """A rank that comes to a place where rank 0 is no more says so, and does not wait for ever."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(GroupLost, match=f"no rank 0 waits at {HOST} port {port}"):
        arrive(Meeting(HOST, port), 1.0)


def test_a_meeting_is_held_on_its_own_address_only():
    """Not on every interface, as torch's store would be: another loopback address finds nobody."""
    place = MeetingPlace(HOST, 1.0)
    socket.create_connection((HOST, place.meeting.port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", place.meeting.port), timeout=5)


@pytest.mark.parametrize("size", [3, 4])
def test_heads_that_cannot_be_shared_out_are_refused(size, base):
    """4 attention heads and 2 key-value heads: three or four ranks cannot have as many each."""
    folder = folder_of("llama", base)
    with pytest.raises(ConfigError, match=f"tensor_parallel {size} does not divide this model's 4 attention heads"):
        _tensor_parallel.refuse_undivided(ModelConfig(source=str(folder), tensor_parallel=size), folder)


def test_emulated_devices_have_one_process():
    """What has no weights cannot be cut; the refusal says so."""
    model = ModelConfig(source="emulated", tensor_parallel=2)
    with pytest.raises(ConfigError, match="'emulated' can only be held by one process"):
        _tensor_parallel.refuse_undivided(model, loading.prepare(model, print))


def test_another_way_of_cutting_is_refused():
    """A style of transformers' plan that is not known here is named, before anything is computed."""
    model = tiny("llama")
    model.tp_plan = {"model.layers.*.self_attn.q_proj": "sequence_parallel"}
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.q_proj.*'sequence_parallel'; served are colwise"):
        _shards.put_in_place(model, None)


def test_several_ranks_need_several_processes(base):
    """One process, such as a notebook's, refuses to hold a part."""
    config = configs.parse({"target": {"source": str(folder_of("llama", base)), "tensor_parallel": 2}})
    with pytest.raises(ConfigError, match="tensor_parallel 2 needs a process for each rank"):
        load_backend(config.target, "target", config.engine)


def test_equal_bits_in_any_company_are_refused_for_several_ranks():
    """Sums over processes depend on the size of the batch."""
    with pytest.raises(ConfigError, match="batch_invariant is not there"):
        configs.parse({"engine": {"batch_invariant": True}, "target": {"tensor_parallel": 2}})
