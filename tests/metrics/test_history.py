"""The last minutes, second by second, and the line in the log."""

from __future__ import annotations

import logging

from test_ledger import Clock
from test_metrics import ROUND

from specserve.metrics import EngineMetrics
from specserve.metrics.history import SECONDS, History, Moment
from specserve.types import PoolLevels

LEVELS = PoolLevels(2, 1, 4, 8, 5, 20, 6, 30)


def test_seconds_without_rounds_hold_levels_and_no_flow():
    """Columns have one value per whole second; quiet seconds are 0 and keep the levels."""
    clock = Clock()
    history = History(clock)
    history.now().add(Moment(tokens=3))
    history.level(running=2, waiting=0, slots_held=1)
    clock.now = 3.5
    columns = history.columns()
    assert columns["tokens"] == [3, 0, 0]
    assert columns["running"] == [2, 2, 2]


def test_five_minutes_are_kept():
    """Older seconds go, in the columns and in memory."""
    clock = Clock()
    history = History(clock)
    for second in range(2 * SECONDS):
        clock.now = float(second)
        history.now().add(Moment(tokens=second))
    columns = history.columns()
    assert len(columns["tokens"]) == SECONDS
    assert columns["tokens"][-1] == 2 * SECONDS - 2
    assert len(history._moments) <= SECONDS


def test_a_busy_engine_tells_every_ten_seconds():
    """One line for the last ten seconds, and none while nothing happens."""
    clock, told = Clock(), []
    metrics = EngineMetrics("m", clock=clock)
    # A handler of its own: how the package's logs reach the root depends on what ran before in this process.
    logger, handler = logging.getLogger("specserve.metrics.engine"), logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        metrics.levels(LEVELS)
        for tenth in range(105):
            clock.now = tenth / 10
            metrics.round(ROUND)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    (line,) = told
    assert line.startswith("2 running, 1 waiting; 100.0 tokens/s")
    assert "acceptance 56%" in line
    assert "slots 4/8" in line


def test_status_is_plain_data():
    """The page gets levels and history of the same length in every column."""
    clock = Clock()
    metrics = EngineMetrics("m", clock=clock)
    metrics.levels(LEVELS)
    metrics.round(ROUND)
    clock.now = 2.0
    status = metrics.status()
    assert status["levels"]["running"] == 2
    assert {len(column) for column in status["history"].values()} == {2}
    assert status["history"]["kept"] == [5, 0]
