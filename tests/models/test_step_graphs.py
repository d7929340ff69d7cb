"""Recorded steps say what eager ones say: static buffers, padding, cutting out, and blocks that change their owners."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pretend_device import ELSEWHERE, PretendDevice, moved, there
from taped import TapeRecorder
from tiny_causal import BLOCK, BLOCKS, CONFIGS, VOCABULARY, paged, ragged, random_tokens, tiny

from specserve.models import _linear
from specserve.models._pages import LayerLayout, PagedStep, Pages
from specserve.models._recorder import PlainRecorder
from specserve.models._row_groups import RaggedPlan
from specserve.models._static_plan import StaticInputs, StaticPlan
from specserve.models._step_shapes import StepShape
from specserve.models.paged_transformers import PagedTransformers

SHAPES = tuple(StepShape(rows, queries, keys, queries) for rows in (1, 2, 4) for queries in (1, 4) for keys in (16, 48))
Row = tuple[np.ndarray, int, list[int]]


def garbage(backend: PagedTransformers) -> None:
    """What pages hold before they are written must never matter, the null block's content neither."""
    for pages in (backend.pages.keys, backend.pages.values):
        for layer in pages.values():
            layer.fill_(float("nan"))


def recorded(family: str, recorder=None) -> PagedTransformers:
    """A backend with the weights of `tiny(family)` and recorded steps."""
    backend = PagedTransformers(tiny(family), None)
    backend.plan_steps(SHAPES)
    backend.allocate(BLOCKS, BLOCK)
    assert list(backend.record_with(recorder or PlainRecorder())) == list(reversed(backend.graphs._planned))
    garbage(backend)
    return backend


@pytest.fixture
def torch_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that a tape sees."""
    monkeypatch.setattr(_linear, "speed_up", lambda model: None)


def rounds() -> list[list[Row]]:
    """Prompts; then decoding, verification with rows of fewer drafts, a rewind, and another owner of a block."""
    first, second, third = random_tokens(1, 40), random_tokens(2, 20), random_tokens(3, 9)
    scattered, other = [31, 2, 17, 5, 9, 12], [20, 3, 7, 11]
    return [
        [(first[:15], 0, scattered), (second[:5], 0, other)],
        [(first[15:16], 15, scattered), (second[5:6], 5, other)],
        [(first[16:20], 16, scattered), (second[6:8], 6, other)],
        [(first[20:24], 18, scattered), (second[8:9], 7, other), (third[:3], 0, [2, 39])],  # rewound; 2 is the first's
        [(third[3:4], 3, [2, 39])],
        [(second[9:12], 8, other), (third[4:5], 4, [2, 39]), (third[:1], 0, [31])],
    ]


def compared(backend: PagedTransformers, eager: PagedTransformers, batches: list[list[Row]]) -> None:
    for rows in batches:
        batch = ragged(rows)
        torch.testing.assert_close(backend.forward(batch), eager.forward(batch), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_replays_say_what_eager_steps_say(family: str) -> None:
    """Scaled ropes, windows and soft caps; all but the prompts are replayed. The first row's block 2 changes owners
    where the first row is gone, so nothing of it may be read."""
    backend = recorded(family)
    compared(backend, paged(family), rounds())
    assert (backend.graphs.replayed, backend.graphs.eager) == (5, 1)


@pytest.mark.usefixtures("torch_layers")
@pytest.mark.parametrize("family", ["llama", "mistral_window", "gemma2_softcap"])
def test_nothing_but_buffers_changes_between_replays(family: str) -> None:
    """The same from a tape of operators, on which nothing is left that Python or the host computed while recording."""
    backend = recorded(family, TapeRecorder())
    compared(backend, paged(family), rounds())
    assert (backend.graphs.replayed, backend.graphs.eager) == (5, 1)


@pytest.mark.usefixtures("torch_layers")
def test_a_replay_does_not_depend_on_who_was_there_before() -> None:
    """The same bits for a small batch after a full one as in fresh buffers: padding is written anew each time."""
    full = [(random_tokens(9 + row, 4), 0, [20 + row]) for row in range(4)]
    small = [(random_tokens(5, 3), 0, [7]), (random_tokens(6, 2), 0, [8])]
    for recorder in (PlainRecorder(), TapeRecorder()):
        fresh, used = recorded("llama", recorder), recorded("llama", recorder)
        used.forward(ragged(full))
        assert torch.equal(used.forward(ragged(small)), fresh.forward(ragged(small)))


def test_logits_are_the_callers() -> None:
    """The next replay leaves them alone, and what is done to them does not reach it."""
    backend = recorded("llama")
    rows = ragged([(random_tokens(5, 3), 0, [7])])
    kept = backend.forward(rows)
    copy = kept.clone()
    backend.forward(ragged([(random_tokens(6, 3), 0, [8])]))
    assert torch.equal(kept, copy)
    with torch.inference_mode():
        kept.fill_(float("-inf"))
    assert torch.equal(backend.forward(rows), copy)


def test_only_wanted_logits_come_back_in_order() -> None:
    """Of rows of different lengths, from padded places; none where none is wanted."""
    backend, eager = recorded("llama"), paged("llama")
    whole = ragged([(random_tokens(1, 3), 0, [4]), (random_tokens(2, 1), 0, [5]), (random_tokens(3, 4), 0, [6])])
    for wanted in ([0, 3, 5, 7], [2], []):
        batch = type(whole)(whole.tokens, whole.positions, whole.offsets, whole.tables, np.array(wanted, np.int64))
        torch.testing.assert_close(backend.forward(batch), eager.forward(batch), atol=2e-5, rtol=2e-5)
    assert backend.graphs.eager == 0


def test_only_the_null_block_is_written_besides() -> None:
    """A padded replay changes its own rows' slots, and the block behind those that are given out."""
    backend = recorded("llama")
    for pages in (backend.pages.keys, backend.pages.values):
        for layer in pages.values():
            layer.fill_(3.0)
    backend.forward(
        ragged([(random_tokens(1, 2), 5, [9, 4]), (random_tokens(2, 3), 0, [30]), (random_tokens(3, 1), 0, [1])])
    )
    slots = backend.pages.keys[0].shape[0]
    assert slots == (BLOCKS + 1) * BLOCK
    written = {slot for slot in range(slots) if (backend.pages.keys[0][slot] != 3.0).any()}
    assert written == {4 * BLOCK + 1, 4 * BLOCK + 2, 30 * BLOCK, 30 * BLOCK + 1, 30 * BLOCK + 2, BLOCK, BLOCKS * BLOCK}


def test_a_row_that_went_wrong_spares_the_others() -> None:
    """Not a number in one row's pages stays in its own logits, padded tokens and rows notwithstanding."""
    backend, eager = recorded("llama"), paged("llama")
    sound = (random_tokens(1, 3), 0, [4])
    for pages in (backend.pages.values, eager.pages.values):
        pages[0][5 * BLOCK] = float("nan")
    batch = ragged([(random_tokens(2, 2), 1, [5]), sound, (random_tokens(3, 1), 0, [6])])
    for _ in range(2):  # the second time the null block holds what the first row's padding wrote
        logits = backend.forward(batch)
        assert logits[:2].isnan().all()
        torch.testing.assert_close(logits[2:], eager.forward(batch)[2:], atol=2e-5, rtol=2e-5)


@dataclass
class _Cached:
    """A row of made-up tokens with blocks of its own, none or some of them cached."""

    tokens: np.ndarray
    blocks: list[int] = field(default_factory=list)
    covered: int = 0


LONGEST = 44


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_traffic_gets_the_same_logits(data: st.DataObject) -> None:
    """Rows that start, grow by 1 to 6 tokens, rewind, end and give their blocks to others, in batches of 1 to 4."""
    backend, eager = BACKENDS[0], BACKENDS[1]
    free = list(np.random.default_rng(data.draw(st.integers(0, 99))).permutation(BLOCKS))
    rows: list[_Cached] = []
    for turn in range(data.draw(st.integers(1, 8))):
        while len(rows) < 3:
            rows.append(_Cached(random_tokens(data.draw(st.integers(0, 9)), LONGEST)))
        taken = data.draw(st.lists(st.sampled_from(range(len(rows))), min_size=1, max_size=4, unique=True))
        batch = []
        for index in taken:
            row = rows[index]
            start = max(0, row.covered - data.draw(st.integers(0, 3)))
            end = min(LONGEST, start + data.draw(st.integers(1, 6)))
            row.covered = end
            while len(row.blocks) * BLOCK < end:
                row.blocks.append(int(free.pop()))
            batch.append((row.tokens[start:end], start, row.blocks))
        compared(backend, eager, [batch])
        for row in [row for row in rows if row.covered == LONGEST or turn % 3 == 2]:
            free += row.blocks
            rows.remove(row)


BACKENDS = (recorded("mistral_window"), paged("mistral_window"))


def test_greedy_answers_are_equal() -> None:
    """Drafted by eager steps, verified by replays, and the other way round, over some 20 tokens."""
    answers = []
    for backend in (recorded("qwen3"), paged("qwen3")):
        read, start, tables, tokens = (
            [random_tokens(4, 7), random_tokens(5, 3)],
            [0, 0],
            [[9, 1, 8, 2, 7, 3, 6], [15, 25, 16, 26, 17, 27]],
            [],
        )
        for _ in range(18):
            logits = backend.forward(ragged(list(zip(read, start, tables, strict=True))))
            ends = np.cumsum([len(each) for each in read]) - 1
            chosen = logits[ends].argmax(-1).numpy()
            start = [begin + len(each) for begin, each in zip(start, read, strict=True)]
            read = [np.array([token]) for token in chosen]
            tokens.append(chosen.tolist())
        answers.append(tokens)
    assert answers[0] == answers[1]
    assert len({token for step in answers[0] for token in step}) > 5


@pytest.mark.parametrize(
    "look", [lambda rows: rows.sum().item(), lambda rows: rows[rows > 0], lambda rows: rows.nonzero()]
)
def test_a_step_that_looks_at_values_is_refused(look) -> None:
    """As capturing would refuse it on a GPU; with the operator's name."""
    rows = torch.zeros(3)
    for inference in (False, True):
        with torch.inference_mode(inference), pytest.raises(RuntimeError, match="cannot be recorded"):
            PlainRecorder().record(lambda: look(rows))


def test_a_step_that_brings_values_to_the_host_is_refused() -> None:
    """From a device of another kind than the host's."""
    with pytest.raises(RuntimeError, match="cannot be recorded"):
        PlainRecorder().record(lambda: torch.zeros(3, device="meta").to("cpu"))


@pytest.mark.parametrize("recorded_step", [True, False])
def test_steps_on_a_device_neither_look_nor_wait(recorded_step: bool) -> None:
    """Plans and attention on a device that is not there: what the host's plan says, and all of it sent ahead."""
    shape = StepShape(4, 4, 48, 4)
    rows = [(random_tokens(1, 3), 5, [9, 4]), (random_tokens(2, 1), 0, [30]), (random_tokens(3, 4), 6, [1, 2, 7])]
    batch = ragged(rows)
    words = torch.zeros(StaticInputs.size(shape, BLOCK), dtype=torch.int64)
    StaticInputs.within(words, shape, BLOCK).fill(batch, BLOCKS)
    layouts = {layer: LayerLayout(2, 8, 8, torch.float32, window) for layer, window in enumerate((None, 5))}
    tokens = shape.positions if recorded_step else len(batch.tokens)
    heads = torch.randn(3, tokens, 4, 8, generator=torch.Generator().manual_seed(0))

    def attended(device: torch.device, put) -> list[torch.Tensor]:
        pages = Pages(layouts, BLOCKS + 1, BLOCK, device)
        if recorded_step:
            inputs = StaticInputs.within(put(words), shape, BLOCK)
            plan = StaticPlan(shape, inputs, BLOCK, BLOCKS * BLOCK, torch.float32)
        else:
            plan = RaggedPlan(batch, BLOCK, torch.float32, device)
        query, key, value = put(heads[0]), put(heads[1, :, :2]), put(heads[2, :, :2])
        assert plan.packed() is not None
        return [
            PagedStep(pages, plan).attend(layer, query, key, value, scaling=None, window=window, softcap=softcap)
            for layer, window in enumerate((None, 5))
            for softcap in (None, 2.0)
        ]

    expected = attended(torch.device("cpu"), lambda tensor: tensor)
    with PretendDevice() as device:
        found = attended(ELSEWHERE, there)
    assert not device.looks
    assert not device.waits
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine.as_subclass(torch.Tensor), theirs)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_replay_is_one_transfer_and_no_look(family: str) -> None:
    """A whole model on a device that is not there: eager steps send what they need ahead, replays all of it at once."""
    eager = paged(family)
    with PretendDevice() as device:
        backend = PagedTransformers(moved(tiny(family)), None)
        assert backend.device == ELSEWHERE
        backend.plan_steps(SHAPES)
        backend.allocate(BLOCKS, BLOCK)
        assert list(backend.record_with(PlainRecorder()))
        for number, rows in enumerate(rounds()):
            device.looks.clear()
            device.waits.clear()
            before, replayed = device.sent, backend.graphs.replayed
            found = backend.forward(ragged(rows))
            assert not device.looks
            assert not device.waits
            if number:
                assert (backend.graphs.replayed, device.sent) == (replayed + 1, before + 1)
            expected = eager.forward(ragged(rows))
            torch.testing.assert_close(found.as_subclass(torch.Tensor), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("layers", [(), (0, 2)])
def test_hidden_states_are_those_of_eager_steps(layers: tuple[int, ...]) -> None:
    """The last ones, or those that enter layers, of the real tokens in order; replayed or not, here and on a device."""
    eager = paged("llama")
    eager.observe(layers)
    for on_device in (False, True):
        with PretendDevice() if on_device else contextlib.nullcontext():
            backend = PagedTransformers(moved(tiny("llama")) if on_device else tiny("llama"), None)
            backend.observe(layers)
            backend.plan_steps(SHAPES)
            backend.allocate(BLOCKS, BLOCK)
            assert list(backend.record_with(PlainRecorder()))
            for rows in rounds():
                batch = ragged(rows)
                backend.forward(batch)
                eager.forward(batch)
                found, expected = backend.observed(), eager.observed()
                assert found.shape == (len(batch.tokens), 32 * max(1, len(layers)))
                torch.testing.assert_close(found.as_subclass(torch.Tensor), expected, atol=2e-5, rtol=2e-5)
            assert backend.graphs.replayed == len(rounds()) - 1


def test_before_all_is_recorded_nothing_is_replayed() -> None:
    """And a model whose hidden states are read only from now on computes eagerly."""
    backend = PagedTransformers(tiny("llama"), None)
    backend.plan_steps(SHAPES)
    assert backend.step_bytes(BLOCK) > 0
    backend.allocate(BLOCKS, BLOCK)
    next(backend.record_with(PlainRecorder()))
    assert backend.graphs is None
    backend = recorded("llama")
    backend.observe(())
    assert backend.graphs is None
    assert backend.forward(ragged([(random_tokens(1, 3), 0, [4])])).shape == (3, VOCABULARY)
    assert len(backend.observed()) == 3
