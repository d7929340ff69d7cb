"""Emulated devices: the dials are what is measured, wrong feeds are refused, and no step is faster than its profile."""

from __future__ import annotations

import json
import random
from itertools import chain
from time import perf_counter, sleep, thread_time

import numpy as np
import pytest

from specserve.config import parse
from specserve.errors import ConfigError, EmulationTooSlow, ProtocolError
from specserve.models import _device_profile, _syllables, emulated, loading
from specserve.models._device_profile import Device, Point
from specserve.models._digest_pages import DigestPages
from specserve.models._hash_language import SUPPORT, HashLanguage, Quality
from specserve.models._pace import Pace
from specserve.models._stretches import Stretch, ragged

QUALITY = Quality(0.7, 0.8, 3)
BLOCK = 4


def language(quality=QUALITY, seed=0):
    return HashLanguage(seed, quality, first=_syllables.FIRST_SYLLABLE, count=_syllables.SYLLABLES, vocab_size=458)


def contexts(count):
    return np.random.default_rng(7).integers(0, 2**63, count).astype(np.uint64)


def device(ms=1.0):
    return Device(
        about="made up",
        kv_bytes_per_position=8,
        kv_memory_gib=1e-5,
        context_length=64,
        decode=(Point(size=1, ms=ms, source="a test"), Point(size=9, ms=2 * ms, source="a test")),
        extend=(Point(size=2, ms=3 * ms, source="a test"), Point(size=4, ms=4 * ms, source="a test")),
    )


def close_to(share, chance, count):
    """Within four standard deviations of a share of independent trials."""
    return abs(share - chance) < 4 * np.sqrt(chance * (1 - chance) / count)


def ranks_of_target(quality, count, score):
    """The place, from 0, of the target's token in the draft's order, in `count` contexts.

    score turns logits [m, V] into what both order their tokens by.
    """
    spoken = language(quality)
    where = contexts(count)
    target, draft = score(spoken.target(where)), score(spoken.draft(where))
    token = target.argmax(1)[:, None]
    return (draft > np.take_along_axis(draft, token, 1)).sum(1)


# ---- the language -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quality", [QUALITY, Quality(0.3, 0.5, 1), Quality(0.78, 0.9, 8), Quality(0, 1, 2)])
def test_greedy_acceptance_and_runners_up_are_the_dials(quality):
    """20,000 contexts: first choices agree as often as set, else ranks 2 … F + 1 hold the target's token as set."""
    ranks = ranks_of_target(quality, 20_000, lambda logits: logits)
    wrong = ranks[ranks > 0]

    assert close_to((ranks == 0).mean(), quality.acceptance, 20_000) or quality.acceptance == 0 == (ranks == 0).sum()
    hit = (wrong <= quality.runners_up).mean()
    assert close_to(hit, quality.runner_up_hit, len(wrong)) or hit == quality.runner_up_hit == 1
    counts = np.bincount(wrong, minlength=20)[1 : quality.runners_up + 1]
    assert all(
        close_to(each / counts.sum(), 1 / quality.runners_up, counts.sum()) for each in counts if len(counts) > 1
    )


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 1.5])
def test_shared_noise_gives_the_acceptance_and_hits_that_are_documented(temperature):
    """One Gumbel noise for both: measured in 20,000 contexts, and the same numbers must refute other dials."""
    noise = np.random.default_rng(3).gumbel(size=(20_000, 458))
    ranks = ranks_of_target(QUALITY, 20_000, lambda logits: logits / temperature + noise)
    acceptance, hit = QUALITY.expected(temperature)
    wrong = ranks[ranks > 0]

    assert close_to((ranks == 0).mean(), acceptance, 20_000)
    assert close_to((wrong <= QUALITY.runners_up).mean(), hit, len(wrong))
    assert not close_to((ranks == 0).mean(), acceptance + 0.03, 20_000)
    assert not close_to((wrong <= QUALITY.runners_up).mean(), hit - 0.04, len(wrong))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_target_and_draft_overlap_by_the_documented_acceptance(temperature):
    """Enumerated: the mean of Σ min(target, draft) over the kinds of contexts is what `rejection` accepts with."""
    heated = QUALITY.dists ** (1 / temperature)
    heated /= heated.sum(1, keepdims=True)
    overlap = np.minimum(heated, heated[0]).sum(1)

    assert QUALITY.chances.sum() == pytest.approx(1)
    assert QUALITY.chances @ overlap == pytest.approx(QUALITY.expected(temperature)[0])


def test_what_replaces_a_refused_token_is_hit_as_documented():
    """Enumerated at temperature 1, default dials: 0.64 of residual draws are of ranks 2 … 4; exact keeps 0.39."""
    quality = Quality(0.78, 0.9, 3)
    dists, target = quality.dists, quality.dists[0]
    residuals = np.maximum(target - dists, 0)
    refused = quality.chances * residuals.sum(1)
    ranks = np.argsort(-dists, axis=1)[:, 1 : quality.runners_up + 1]
    hits = np.take_along_axis(residuals, ranks, 1).sum(1) / np.maximum(residuals.sum(1), 1e-9)

    assert refused @ hits / refused.sum() == pytest.approx(0.64, abs=0.005)
    assert quality.chances @ target[dists.argmax(1)] == pytest.approx(0.39, abs=0.001)


def test_logits_are_log_probabilities_of_few_ids_and_pure():
    """Each row sums to 1, over SUPPORT distinct syllables; the same context says the same in any company."""
    spoken, where = language(), contexts(300)
    logits = spoken.target(where)
    probs = np.exp(logits.astype(float))

    np.testing.assert_allclose(probs.sum(1), 1, rtol=1e-6)
    assert ((probs > 1e-6).sum(1) == SUPPORT).all()
    ids = spoken.ids(where)
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    assert ids.min() >= _syllables.FIRST_SYLLABLE
    assert ids.max() < _syllables.FIRST_SYLLABLE + _syllables.SYLLABLES
    np.testing.assert_array_equal(logits[17:18], spoken.target(where[17:18]))
    assert (language(seed=1).target(where) != logits).any(1).mean() > 0.99


# ---- the pages --------------------------------------------------------------------------------------------------


def fed(pages, *rows):
    """Write (tokens, start, table) rows in one batch; the digests per row."""
    stretches = [Stretch(start, tokens, np.array(table), 1, owner) for owner, (tokens, start, table) in enumerate(rows)]
    batch = ragged(stretches)
    return [row.tolist() for row in np.split(pages.write(batch), batch.offsets[1:-1])]


def test_digests_do_not_depend_on_how_a_history_was_cut_or_where_it_lies():
    """Every cut of ten tokens in two, in other blocks and company, gives the digests of feeding them at once."""
    tokens = list(range(5, 15))
    (whole,) = fed(DigestPages(8, BLOCK), (tokens, 0, [0, 1, 2]))
    for cut in range(1, 10):
        pages = DigestPages(8, BLOCK)
        first, _ = fed(pages, (tokens[:cut], 0, [7, 3, 5]), ([9, 9, 9], 0, [0]))
        _, second = fed(pages, ([4], 3, [0]), (tokens[cut:], cut, [7, 3, 5]))
        assert first + second == whole
    assert len(set(whole)) == len(whole)


WRONG = {
    "a position that was never written": (([1], 7, [0, 1]),),
    "a block of nobody": (([1], 6, [0, 4]),),
    "another order of blocks": (([1], 6, [1, 0]),),
    "another request's first block": (([1], 6, [2, 1]),),
    "another request's last block": (([1], 6, [0, 3]),),
    "one block for two rows": (([1], 6, [0, 1]), ([1], 6, [0, 1])),
    "one block twice in a table": (([1] * 8, 0, [5, 5]),),
    "a table that ends too early": (([1], 8, [0, 1]),),
    "a block that there is not": (([1], 0, [99]),),
    "a negative position": (([1], -1, [0]),),
    "no tokens": (([], 6, [0, 1]),),
}


@pytest.mark.parametrize("rows", WRONG.values(), ids=WRONG.keys())
def test_what_was_never_written_is_refused_and_nothing_is_changed(rows):
    """Wrong starts, tables and shares raise ProtocolError; the right feed still works afterwards."""
    pages = DigestPages(8, BLOCK)
    fed(pages, ([1, 2, 3, 4, 5, 6], 0, [0, 1]), ([1, 2, 3, 9, 5, 6], 0, [2, 3]))
    with pytest.raises(ProtocolError):
        fed(pages, *rows)

    fresh = DigestPages(8, BLOCK)
    assert fed(pages, ([7], 6, [0, 1])) == [fed(fresh, ([1, 2, 3, 4, 5, 6, 7], 0, [0, 1]))[0][-1:]]


def test_what_lies_past_a_changed_position_is_void_and_past_an_equal_one_is_kept():
    """A rewind that writes another token voids the rest; a shared block that is fed again with its own tokens stays."""
    pages = DigestPages(8, BLOCK)
    fed(pages, ([1, 2, 3, 4, 5, 6], 0, [0, 1]))
    fed(pages, ([2], 1, [0, 1]))
    fed(pages, ([7], 6, [0, 1]))

    fed(pages, ([8], 1, [0, 1]))
    with pytest.raises(ProtocolError, match="only 2 positions"):
        fed(pages, ([7], 6, [0, 1]))


def test_a_block_that_was_given_to_another_request_is_noticed():
    """Freed too early, a block comes back with the history of its new holder."""
    pages = DigestPages(8, BLOCK)
    fed(pages, ([1, 2, 3, 4, 5], 0, [0, 1]))
    fed(pages, ([6, 7, 8, 9], 0, [0]))
    with pytest.raises(ProtocolError, match="another history"):
        fed(pages, ([6], 5, [0, 1]))


class PlainPages:
    """The pages, token by token: a block holds (history before it, its tokens), and a row is read block by block."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[tuple[int, ...], list[int]]] = {}

    def write(self, rows) -> list[list[tuple[int, ...]]]:
        """The histories that end with each token. Raises ValueError where ProtocolError is due."""
        written = [block for tokens, start, table in rows for block in self.own(tokens, start, table)]
        if len(set(written)) != len(written):
            raise ValueError("a block is written twice")
        befores = [self.read(start, table) for _, start, table in rows]
        return [self.extend(before, *row) for before, row in zip(befores, rows, strict=True)]

    def own(self, tokens, start, table) -> list[int]:
        if not tokens or start < 0 or (start + len(tokens) - 1) // BLOCK >= len(table):
            raise ValueError("no tokens, or a table that ends too early")
        return table[start // BLOCK : (start + len(tokens) - 1) // BLOCK + 1]

    def read(self, start: int, table) -> tuple[int, ...]:
        history: tuple[int, ...] = ()
        for place in range(-(-start // BLOCK)):
            before, held = self.blocks.get(table[place], ((), []))
            need = min(BLOCK, start - place * BLOCK)
            if before != history or len(held) < need:
                raise ValueError("not the row's history")
            history += tuple(held[:need])
        return history

    def extend(self, history, tokens, start, table) -> list[tuple[int, ...]]:
        found = []
        for at, token in enumerate(tokens, start):
            before, held = self.blocks.get(table[at // BLOCK], ((), []))
            offset = at % BLOCK
            same = before == history[: at - offset] and held[: offset + 1] == [*history[at - offset :], token]
            if not same:
                self.blocks[table[at // BLOCK]] = history[: at - offset], [*history[at - offset :], token]
            history = (*history, token)
            found.append(history)
        return found


def any_row(chance):
    """Few tokens and blocks, so that rows often go on from what lies there, and often from what does not."""
    start, table = chance.choice((0, 0, *range(10))), [chance.randrange(6) for _ in range(3)]
    return [chance.randrange(2) for _ in range(chance.randint(1, 5))], start, table


@pytest.mark.parametrize("seed", range(4))
def test_pages_take_and_refuse_what_a_plain_model_of_them_does(seed):
    """Over 1,500 random batches: the same ones are refused, and equal histories, and no others, have equal digests."""
    chance, pages, plain = random.Random(seed), DigestPages(6, BLOCK), PlainPages()
    known: dict[tuple[int, ...], int] = {}
    refused = 0
    for _ in range(1500):
        rows = [any_row(chance) for _ in range(chance.randint(1, 2))]
        try:
            histories = plain.write(rows)
        except ValueError:
            refused += 1
            with pytest.raises(ProtocolError):
                fed(pages, *rows)
            continue
        for history, digest in zip(chain(*histories), chain(*fed(pages, *rows)), strict=True):
            assert known.setdefault(history, digest) == digest
    assert len(set(known.values())) == len(known) > 100
    assert 200 < refused < 1400


# ---- time -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "positions", "ms"),
    [(1, 1, 1), (5, 5, 1.5), (9, 9, 2), (17, 17, 3), (1, 2, 3), (2, 3, 3.5), (1, 6, 5)],
)
def test_step_times_are_interpolated_by_rows_or_positions(rows, positions, ms):
    """One position per row is a decode step; anything else goes by positions; both go on past their last point."""
    assert device().step_s(rows, positions) == pytest.approx(ms / 1000)


def test_no_result_is_there_before_its_device_would_have_it():
    """Ten steps of 1 ms, three of them prefill of 3 ms, counted from each batch's arrival."""
    pace = Pace(device(), strict=False)
    for rows, positions in [(1, 1)] * 7 + [(1, 2)] * 3:
        began = perf_counter()
        pace.arrived()
        pace.step(rows, positions)
        pace.finish()
        assert perf_counter() - began >= device().step_s(rows, positions)
    assert pace.steps == 10


def test_steps_of_one_batch_follow_each_other_on_the_device():
    """Three steps of 10 ms, waited for one by one or at the end, take 30 ms, whatever the host does meanwhile."""
    for told_together in (False, True):
        pace, began = Pace(device(10), strict=True), perf_counter()
        pace.arrived()
        for step in range(3):
            pace.step(1, 1)
            if not told_together or step == 2:
                pace.finish()
                sleep(0.002)
        assert perf_counter() - began >= 0.03 + 0.002
        assert pace.refused == 0


def test_a_step_that_computed_longer_than_its_device_is_refused_where_asked_and_counted_anyhow():
    """Busy for 5 ms in a step of 0.1 ms: strict raises, otherwise it is late; sleeping is not computing."""

    def busy_step(pace):
        pace.arrived()
        pace.step(1, 1)
        began = thread_time()
        while thread_time() - began < 0.005:
            pass
        pace.finish()

    lenient, strict = Pace(device(0.1), strict=False), Pace(device(0.1), strict=True)
    busy_step(lenient)
    assert lenient.counted() == (0, 1, 0)
    for _ in range(2):
        with pytest.raises(EmulationTooSlow, match=r"0\.10 ms"):
            busy_step(strict)
    assert strict.counted() == (0, 0, 2)
    busy_step(lenient)
    assert (lenient.counted(), lenient.counted()) == ((0, 1, 0), (0, 0, 0))
    pace = Pace(device(500), strict=True)
    pace.arrived()
    pace.step(1, 1)
    pace.finish()
    assert pace.counted() == (1, 0, 0)


def test_a_batch_without_a_forward_is_never_late():
    """Nothing was asked of the device: there is nothing to wait for and nothing to count."""
    pace = Pace(device(), strict=True)
    pace.arrived()
    pace.finish()
    assert pace.steps == pace.late == 0


@pytest.mark.parametrize("name", _device_profile.names())
def test_shipped_profiles_say_where_each_number_comes_from(name):
    """Each point has a source or a reason; a bigger step of one kind never takes less."""
    profile = _device_profile.load(name)
    for each in (profile.target, profile.draft):
        for point in (*each.decode, *each.extend):
            assert (point.source is None) == point.assumed == (point.reason is not None)
        decode = [each.step_s(rows, rows) for rows in range(1, 600, 7)]
        extend = [each.step_s(1, positions) for positions in range(2, 6000, 97)]
        assert decode == sorted(decode)
        assert extend == sorted(extend)


def test_the_measured_pair_has_its_published_times():
    """Plain decoding 10.27 ms, verification 11.45 ms, a draft step 2.54 ms."""
    profile = _device_profile.load("qwen3-32b-0.6b-h100")
    assert profile.target.step_s(1, 1) == pytest.approx(0.01027)
    assert [profile.target.step_s(1, positions) for positions in (5, 8)] == pytest.approx([0.01145] * 2)
    assert [profile.draft.step_s(rows, rows) for rows in (1, 15, 24)] == pytest.approx([0.00254] * 3)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"assumed": True}, "either a source, or assumed"),
        ({"source": None}, "either a source, or assumed"),
        ({"ms": 0}, "greater than 0"),
        ({"size": 9}, "does not go on"),
        ({"speed": 1}, "not permitted"),
    ],
)
def test_a_wrong_profile_is_refused_with_its_place(tmp_path, change, told):
    """Unfounded, falling or misspelt points are ConfigErrors that name the file."""
    tree = json.loads((_device_profile.FOLDER / "qwen3-32b-0.6b-h100.json").read_text())
    tree["target"]["extend"][0] |= change
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=told) as error:
        _device_profile.load(str(path))
    assert "mine.json" in error.value.message
    assert "target" in error.value.message


def test_an_unknown_profile_names_those_there_are():
    """A misspelt name is told what to choose from."""
    with pytest.raises(ConfigError, match="qwen3-32b"):
        _device_profile.load("qwen3")


# ---- the backend ------------------------------------------------------------------------------------------------


def model(role="target", **settings):
    config = parse({"target": {"source": "emulated", "emulated": settings}}).target
    backend = emulated.build(config, loading.prepare(config, lambda _: None, role=role))
    backend.allocate(16, BLOCK)
    return backend


def test_the_source_names_the_backend_and_the_folder_the_role():
    """`source: emulated` goes the ordinary way from configuration to backend; target and draft differ."""
    config = parse({"target": {"source": "emulated"}}).target
    folder = loading.prepare(config, lambda _: None, role="draft")
    assert loading.backend_of(folder, config) == "emulated"
    batch = ragged([Stretch(0, list(range(12)), np.arange(3), 12)])
    target, draft = (model(role, acceptance=0.5).forward(batch) for role in ("target", "draft"))
    assert target.shape == draft.shape == (12, 458)
    agree = (target.argmax(-1) == draft.argmax(-1)).numpy()
    assert 0 < agree.sum() < 12


def test_a_forward_gives_the_wanted_rows_only_and_takes_its_time():
    """Logits of the last two of five positions are those of all five; the step lasts a verification at least."""
    whole = model().forward(ragged([Stretch(0, [1, 2, 3, 4, 5], np.array([3, 1]), 5)]))
    began, emulated = perf_counter(), model()
    emulated.hardware.arrived()
    part = emulated.forward(ragged([Stretch(0, [1, 2, 3, 4, 5], np.array([0, 2]), 2)]))
    emulated.hardware.finish()
    assert perf_counter() - began >= 0.01145
    assert (part == whole[-2:]).all()


def test_a_forward_beyond_the_context_or_before_pages_is_refused():
    """The last position that may be fed is context_length − 1."""
    config = parse({"target": {"source": "emulated", "context_length": 16}}).target
    backend = emulated.build(config, loading.prepare(config, lambda _: None))
    batch = ragged([Stretch(0, [1] * 17, np.arange(5), 1)])
    with pytest.raises(ConfigError, match="no pages yet"):
        backend.forward(batch)
    backend.allocate(8, BLOCK)
    with pytest.raises(ProtocolError, match="position 16 in a context of 16"):
        backend.forward(batch)
