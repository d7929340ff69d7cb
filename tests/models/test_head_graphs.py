"""Recorded steps of draft heads say what eager ones say: states that come and go, origins, trees, and whole engines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import tiny_heads
import torch
from pretend_device import PretendDevice, moved, there
from taped import TapeRecorder
from test_step_graphs import torch_layers  # noqa: F401

from specserve.config import EngineConfig, ModelConfig, parse
from specserve.local import LocalEngine, load_parts
from specserve.models import RaggedBatch, RecordsSteps, TokenTree, eagle, loading
from specserve.models._pages import LayerLayout
from specserve.models._recorder import PlainRecorder
from specserve.models._static_states import StaticStates
from specserve.models._step_graphs import graph_bytes
from specserve.models._step_shapes import StepShape, planned
from specserve.models._stretches import Stretch, ragged
from specserve.models._worker import load_backend
from specserve.types import Request, RequestId, Sampling

VOCAB, BLOCK, BLOCKS, NODES = 24, 4, 40, 6
KINDS = ("eagle", "two layers", "eagle3")
SHAPES = (StepShape(2, 1, 48, 1), StepShape(4, 4, 48, 1), StepShape(4, 3, 48, 3, NODES))
TABLES = [
    np.array(blocks, dtype=np.int32)
    for blocks in ([9, 3, 27, 14, 30, 2], [1, 22, 16, 11, 5, 33], [4, 6, 7, 10, 13, 15], [0, 38, 8, 12, 35, 21])
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, and a head of each kind for it."""
    base = tmp_path_factory.mktemp("heads")
    return {
        "target": tiny_heads.few_words(base / "target", VOCAB, layers=4),
        "eagle": tiny_heads.eagle(base / "eagle", vocab_size=VOCAB),
        "two layers": tiny_heads.eagle(base / "two", vocab_size=VOCAB, layers=2, own=True),
        "eagle3": tiny_heads.eagle3(base / "three", vocab_size=VOCAB, read=(0, 1, 3), spoken=15),
    }


def built(folders: dict[str, Path], kind: str) -> eagle.EagleHead:
    """As it runs on a GPU: without C."""
    config = ModelConfig(source=str(folders[kind]), target=str(folders["target"]), device="cpu", quantization="none")
    head = eagle.build(config, loading.prepare(config, lambda _: None))
    head._native = None
    return head


def with_pages(head: eagle.EagleHead, recorder=None, shapes=SHAPES) -> eagle.EagleHead:
    """Recorded where a recorder is given; pages full of garbage."""
    if recorder is not None:
        head.plan_steps(shapes)
    head.allocate(BLOCKS, BLOCK)
    if recorder is not None:
        assert len(list(head.record_with(recorder))) == len(shapes)
    for pages in (*head.pages.keys.values(), *head.pages.values.values()):
        pages.fill_(float("nan"))
    return head


@dataclass
class Fed:
    """A batch, and what comes with it: states of its tokens, and the first position of each row that may be read."""

    batch: RaggedBatch
    hidden: torch.Tensor
    origins: np.ndarray


def fed(rows: list[Stretch], origins: list[int], seed: int = 0) -> Fed:
    batch = ragged(rows)
    noise = torch.Generator().manual_seed(seed)
    hidden = torch.randn(len(batch.tokens), tiny_heads.WIDTH, generator=noise)
    return Fed(batch, hidden, np.array(origins, dtype=np.int64))


def rounds(seed: int) -> list[Fed]:
    """Feeds of four rows, of which two begin behind a cached prefix; then of some of the rows, in any order, a drafted
    token each, several tokens to catch up, or two levels of a tree, another one each time."""
    chance = np.random.default_rng(seed)
    origins, lengths = [1, 6, 3, 1], [10, 1, 5, 7]
    rows = zip(lengths, origins, TABLES, strict=True)
    stretches = [Stretch(origin, chance.integers(0, VOCAB, length), table, 1) for length, origin, table in rows]
    made = [fed(stretches, origins, seed)]
    starts = [length + origin for length, origin in zip(lengths, origins, strict=True)]
    for number in range(9):
        taken = chance.permutation(4)[: chance.integers(1, 5)].tolist()
        trees = {
            row: TokenTree(starts[row], np.array([chance.integers(-1, node) for node in range(NODES)])) for row in taken
        }
        counts = {row: int(chance.integers(1, (2, 5, 4)[number % 3])) for row in taken}
        levels = (0, 1) if number % 3 == 2 else (0,)
        for level in levels:
            stretches = []
            for row in taken:
                first, tokens = starts[row] + level * counts[row], chance.integers(0, VOCAB, counts[row])
                tree = trees[row] if len(levels) > 1 and chance.random() < 0.8 else None
                shown = 1 if tree is None else counts[row]
                stretches.append(Stretch(first, tokens, TABLES[row], shown, tree=tree))
            made.append(fed(stretches, [origins[row] for row in taken], 100 * seed + 10 * number + level))
        for row in taken:
            starts[row] = min(14, starts[row] + (counts[row] if number % 3 == 1 else 0))
    return made


def compared(head: eagle.EagleHead, eager: eagle.EagleHead, batches: list[Fed]) -> None:
    for each in batches:
        found, expected = (one.forward_from(each.batch, each.hidden, each.origins) for one in (head, eager))
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_replays_say_what_eager_steps_say(folders, kind: str) -> None:
    """Logits and states, of all but the feeds; what lies before an origin is not a number, and never read."""
    for seed in range(4):
        head, batches = with_pages(built(folders, kind), PlainRecorder()), rounds(seed)
        compared(head, with_pages(built(folders, kind)), batches)
        assert (head.graphs.replayed, head.graphs.eager) == (len(batches) - 1, 1)
        assert {len(each.batch.offsets) - 1 for each in batches} > {1}
        assert any(each.batch.trees for each in batches)


@pytest.mark.usefixtures("torch_layers")
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_buffers_changes_between_replays(folders, kind: str) -> None:
    """The same from a tape of operators, on which nothing is left that Python or the host computed while recording."""
    head, batches = with_pages(built(folders, kind), TapeRecorder()), rounds(7)
    compared(head, with_pages(built(folders, kind)), batches)
    assert (head.graphs.replayed, head.graphs.eager) == (len(batches) - 1, 1)


def one_token(seed: int, rows: int = 1, start: int = 8) -> Fed:
    stretches = [Stretch(start, [5 + row], TABLES[row], 1) for row in range(rows)]
    return fed(stretches, [start] * rows, seed)


@pytest.mark.parametrize("what", ["sources", "origins"])
def test_what_is_left_of_the_batch_before_is_noticed(folders, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Where one of both is not written anew, a batch behind another one has other states."""
    head = with_pages(built(folders, "eagle3"), PlainRecorder(), SHAPES[1:2])
    eager = with_pages(built(folders, "eagle3"))
    first, second = fed([Stretch(1, range(4), TABLES[0], 1)], [1]), fed([Stretch(5, range(3), TABLES[0], 1)], [3])
    compared(head, eager, [first, second])
    fill = StaticStates.fill

    def partly(self, flat, origins):
        kept = getattr(self, what).clone()
        fill(self, flat, origins)
        getattr(self, what).copy_(kept)

    compared(head, eager, [first])
    monkeypatch.setattr(StaticStates, "fill", partly)
    stale, expected = (one.forward_from(second.batch, second.hidden, second.origins)[1] for one in (head, eager))
    assert (stale - expected).abs().max() > 0.01
    assert head.graphs.eager == 0


def test_results_are_the_callers(folders) -> None:
    """The next replay leaves logits and states alone, and takes no states from its caller's."""
    head = with_pages(built(folders, "eagle"), PlainRecorder())
    given = one_token(1, 2)
    kept = head.forward_from(given.batch, given.hidden, given.origins)
    copies = [each.clone() for each in kept]
    other = one_token(2, 2)
    head.forward_from(other.batch, other.hidden, other.origins)
    assert all(torch.equal(each, copy) for each, copy in zip(kept, copies, strict=True))
    again = head.forward_from(given.batch, given.hidden, given.origins)
    assert all(torch.equal(each, copy) for each, copy in zip(again, copies, strict=True))


def test_a_row_that_went_wrong_spares_the_others(folders) -> None:
    """States that are not numbers stay in their row's results, padded rows and tokens notwithstanding; twice."""
    head = with_pages(built(folders, "eagle"), PlainRecorder(), SHAPES[1:2])
    eager = with_pages(built(folders, "eagle"))
    rows = [Stretch(1, [3, 4], TABLES[0], 1), Stretch(1, [5], TABLES[1], 1), Stretch(2, [6, 7, 8], TABLES[2], 1)]
    given = fed(rows, [1, 1, 2])
    given.hidden[:2] = float("nan")
    for _ in range(2):
        logits, states = head.forward_from(given.batch, given.hidden, given.origins)
        expected = eager.forward_from(given.batch, given.hidden, given.origins)
        assert logits[0].isnan().all()
        assert states[0].isnan().all()
        torch.testing.assert_close(logits[1:], expected[0][1:], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(states[1:], expected[1][1:], atol=2e-5, rtol=2e-5)
    assert head.graphs.eager == 0


@pytest.mark.usefixtures("torch_layers")
def test_a_replay_is_one_transfer_and_no_look(folders) -> None:
    """On a device that is not there, where states are already."""
    for kind in KINDS:
        eager = with_pages(built(folders, kind))
        with PretendDevice() as device:
            head = built(folders, kind)
            moved(head._network)
            head._device = there(torch.zeros(1)).device
            with_pages(head, PlainRecorder())
            for number, each in enumerate(rounds(3)):
                device.looks.clear()
                device.waits.clear()
                before, hidden = device.sent, there(each.hidden)
                found = head.forward_from(each.batch, hidden, each.origins)
                if number:
                    assert not device.looks
                    assert not device.waits
                    assert device.sent == before + 1
                expected = eager.forward_from(each.batch, each.hidden, each.origins)
                for mine, theirs in zip(found, expected, strict=True):
                    torch.testing.assert_close(mine.as_subclass(torch.Tensor), theirs, atol=2e-5, rtol=2e-5)


def test_states_take_memory_of_their_own() -> None:
    """Those that come for every position, and those that go for every place that is shown."""
    layouts, shape = [LayerLayout(2, 8, 8, torch.float32, None)], StepShape(4, 4, 256, 1)
    plain, head = (
        graph_bytes([each], layouts, BLOCK, vocab_size=97, heads=4, width=48, itemsize=4)
        for each in (shape, replace(shape, head=True))
    )
    assert head - plain == (16 + 4) * 48 * 4 + 16 * (16 + 4)


def test_a_head_records_what_any_draft_records(folders) -> None:
    """At its start, where that is asked for; its memory is part of the plan, and told."""
    engine = EngineConfig(depth=2, max_requests=2, outcomes=0)
    for graphs in ("on", "auto"):
        config = ModelConfig(
            source=str(folders["eagle"]), target=str(folders["target"]), device="cpu", kv_blocks=64, graphs=graphs
        )
        head, info = load_backend(config, "draft", engine)
        assert isinstance(head, RecordsSteps)
        assert (head.graphs is not None) == (graphs == "on")
        assert info.memory["graphs"] == head.step_bytes(engine.block_tokens)
        assert (info.memory["graphs"] > 0) == (graphs == "on")
        assert head.pages.keys[0].shape[0] == (64 + (graphs == "on")) * engine.block_tokens
    config = config.model_copy(update={"graphs": "on"})
    head, _ = load_backend(config, "draft", engine)
    shapes = planned("draft", engine, head.context_length)
    assert head.graphs._recorded == tuple(replace(shape, head=True) for shape in shapes)


ENGINES = {
    "chains": {"outcomes": 0},
    "trees": {"outcomes": 0, "tree": "dynamic", "tree_nodes": 7, "tree_width": 3},
    "ahead": {"outcomes": 2},
}


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("how", ENGINES)
def test_answers_are_those_of_eager_steps(folders, kind: str, how: str) -> None:
    """Greedy, of several requests at once; target and head replay most of their steps, behind verdicts."""
    requests = [
        Request(RequestId(str(at)), tuple(range(3, 3 + length)), 24, Sampling(temperature=0.0), ignore_eos=True)
        for at, length in enumerate((5, 17, 9, 1))
    ]
    answers, drafted = {}, {}
    for graphs in ("off", "on"):
        model = {"device": "cpu", "kv_blocks": 200, "graphs": graphs}
        made = parse(
            {
                "target": model | {"source": str(folders["target"])},
                "draft": {"speculator": "eagle", "model": model | {"source": str(folders[kind])}},
                "engine": {"depth": 3, "max_requests": 4, **ENGINES[how]},
            }
        )
        parts = load_parts(made)
        with LocalEngine(made, parts=parts) as engine:
            done = engine.complete(requests)
        answers[graphs] = [each.tokens for each in done]
        drafted[graphs] = sum(each.stats.kept_tokens for each in done)
        for backend in (parts.verifier._backend, parts.draft_worker._speculator._head):
            assert (backend.graphs is not None) == (graphs == "on")
            if backend.graphs is not None:
                assert backend.graphs.replayed > (2 * backend.graphs.eager if how != "ahead" else 0)
    assert answers["on"] == answers["off"]
    assert drafted["on"] == drafted["off"] or how == "ahead"
