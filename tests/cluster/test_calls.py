"""How long the answers of actors are waited for."""

from __future__ import annotations

import asyncio
import time

import pytest

from specserve.cluster import calls


async def never() -> None:
    await asyncio.Event().wait()


def test_a_pause_of_who_asks_is_no_silence_of_who_is_asked(monkeypatch):
    """A process that was stopped itself, for longer than an answer may take, still waits for the answer."""
    monkeypatch.setattr(calls, "STATE_TIMEOUT_S", 2.0)

    async def run() -> str:
        answer = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.1, time.sleep, 2.5)
        asyncio.get_running_loop().call_later(2.7, answer.set_result, "here")
        return await calls._awaited(answer)

    assert asyncio.run(run()) == "here"


def test_who_never_answers_is_not_waited_for(monkeypatch):
    """The bound holds, and nothing is left of the question."""
    monkeypatch.setattr(calls, "STATE_TIMEOUT_S", 1.0)

    async def run() -> int:
        with pytest.raises(TimeoutError):
            await calls._awaited(never())
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1
