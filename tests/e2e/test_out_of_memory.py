"""Allocations that fail, for real: the batch is cut, tried again or refused, the worker lives, others do not notice."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tiny_models import equal_pair

from specserve.config import parse
from specserve.errors import SpecserveError
from specserve.local import LocalEngine, load_parts
from specserve.models import _memory
from specserve.models._stretches import Stretch, ragged
from specserve.types import Request, RequestId, Sampling

PROMPTS = [list(range(5, 25)), [8, 9, 10, 11], [12, 13], list(range(30, 60))]
TOKENS = 16
MORE_THAN_THERE_IS = 1 << 60  # bytes


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    pair = equal_pair(tmp_path_factory.mktemp("pair"), kv_blocks=200, context_length=256, threads=1)
    return parse(pair | {"engine": {"depth": 3}})


@pytest.fixture(scope="module")
def expected(config):
    with LocalEngine(config) as engine:
        return answers(engine)


def answers(engine):
    return [each.tokens for each in engine.generate(PROMPTS, max_tokens=TOKENS, ignore_eos=True)]


class Scarce:
    """A backend on a device whose memory holds so many positions of a forward: beyond them an allocation fails."""

    def __init__(self, backend, most, error=None):
        self.backend, self.most, self.error = backend, most, error
        self.failures, self.largest = 0, 0

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def forward(self, batch):
        if len(batch.tokens) > self.most:
            self.failures += 1
            if self.error is not None:
                raise self.error
            torch.empty(MORE_THAN_THERE_IS, dtype=torch.uint8)
        self.largest = max(self.largest, len(batch.tokens))
        return self.backend.forward(batch)


def scarce(parts, role, most, error=None):
    """The same workers, one of them short of memory."""
    if role == "target":
        parts.verifier._backend = Scarce(parts.verifier._backend, most, error)
        return parts.verifier._backend
    speculator = parts.draft_worker._speculator
    speculator._backend = Scarce(speculator._backend, most, error)
    return speculator._backend


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("most", [1, 7])
def test_a_batch_that_does_not_fit_is_computed_in_parts(config, expected, role, most):
    """Every request gets its own text, though no forward had room for more than a few positions."""
    parts = load_parts(config)
    short = scarce(parts, role, most)
    with LocalEngine(config, parts=parts) as engine:
        assert answers(engine) == expected
        levels = engine.levels()
    assert short.failures > 0
    assert short.largest <= most
    assert levels.slots_held == levels.target_blocks_held == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError("bad allocation")])
def test_other_devices_words_are_understood(config, expected, error):
    """What CUDA raises, and what C++ does, count as the same thing."""
    parts = load_parts(config)
    short = scarce(parts, "target", 5, error)
    with LocalEngine(config, parts=parts) as engine:
        assert answers(engine) == expected
    assert short.failures > 0


def test_a_target_without_any_memory_refuses_and_lives(config, expected):
    """Requests end with an error that says why; when there is memory again the same worker serves."""
    parts = load_parts(config)
    short = scarce(parts, "target", 0)
    with LocalEngine(config, parts=parts) as engine:
        with pytest.raises(SpecserveError, match="allocate memory"):
            answers(engine)
        short.most = 1 << 20
        assert answers(engine) == expected


def test_a_draft_without_any_memory_costs_drafts_only(config, expected):
    """Nobody's answer changes or waits for it."""
    parts = load_parts(config)
    short = scarce(parts, "draft", 0)
    with LocalEngine(config, parts=parts) as engine:
        assert answers(engine) == expected
    assert short.failures > 0


def test_a_request_that_alone_does_not_fit_harms_nobody_else(config, expected):
    """A token whose forward always fails ends its own request; those beside it get their texts."""
    parts = load_parts(config)
    backend = parts.verifier._backend

    class Poisoned(Scarce):
        def forward(self, batch):
            self.most = 0 if 77 in batch.tokens else 1 << 20
            return super().forward(batch)

    parts.verifier._backend = Poisoned(backend, 0)
    sampling = Sampling(temperature=0.0)
    with LocalEngine(config, parts=parts) as engine, ThreadPoolExecutor(2) as pool:
        bad = Request(RequestId("bad"), (77, 5, 6), TOKENS, sampling, ignore_eos=True)
        refused = pool.submit(engine.complete, [bad])
        assert answers(engine) == expected
        with pytest.raises(SpecserveError, match="allocate memory"):
            refused.result()


def test_halves_hold_all_rows_once_and_in_order():
    """Of rows and of one row's tokens, with the wanted ones where they belong; one token cannot be cut."""
    table = np.arange(9, dtype=np.int32)
    rows = [Stretch(3, [1, 2, 3, 4, 5], table, 2, 7), Stretch(0, [6], table, 1), Stretch(9, [7, 8, 9], table, 0)]
    whole = ragged(rows)
    pending, pieces = [rows], []
    while pending:
        part = pending.pop(0)
        halves = _memory._halves(part, cut_rows=True)
        if halves is None:
            pieces += part
        else:
            pending[:0] = halves
    assert [token for piece in pieces for token in piece.tokens] == whole.tokens.tolist()
    assert [piece.start for piece in pieces] == whole.positions.tolist()
    assert [index for index, piece in enumerate(pieces) if piece.wanted] == whole.wanted.tolist()
    assert _memory._halves(rows[:1], cut_rows=False) is None


def test_another_error_is_not_tried_again(config):
    """A bug is not taken for a lack of memory."""
    short = Scarce(load_parts(config).verifier._backend, 0, ValueError("no such layer"))
    rows = [Stretch(0, [1, 2], np.arange(1, dtype=np.int32), 1)] * 2
    with pytest.raises(ValueError, match="no such layer"):
        _memory.forward(short, rows)
    assert short.failures == 1
