"""From a model's configuration to a backend that is ready to serve: what both workers do when they start.

Only what the model needs is imported: transformers takes longer than all else that a worker starts with, and a worker
that starts again does so beside open streams.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Literal, cast

from specserve import folders
from specserve.config import EngineConfig, ModelConfig
from specserve.errors import ConfigError
from specserve.models import Backend, NoRowStates, _memory_plan, _quantization, _recording, _servable, loading
from specserve.models._ranks import RankGroup
from specserve.models.vocabulary import check as check_vocabulary
from specserve.types import WorkerInfo

_log = logging.getLogger("specserve")


def load_backend(
    config: ModelConfig,
    role: Literal["draft", "target"],
    engine: EngineConfig,
    slot_bytes: Callable[[int], int] = lambda _: 0,
    ranks: RankGroup | None = None,
    attach: Callable[[Backend, Path], Backend] = lambda backend, _: backend,
) -> tuple[Backend, WorkerInfo]:
    """The loaded model with its KV pages allocated, and what was found out about it.

    slot_bytes tells what the draft's slots will take, by the size of the vocabulary. ranks are the processes that hold
    the model together, if several do: each of them calls this, and gets its own part of the model and as many KV pages
    as the one with the least room has. Rank 0's part speaks for all. attach gives the model, read from a folder, what
    is to be served together with it.
    Raises ConfigError for a model that cannot be loaded, that has no room for itself or for one full context, or, as a
    target, that cannot be batch-invariant where the engine is to be, or whose steps cannot be recorded with graphs on.
    """
    began = perf_counter()
    loading.apply_threads(config.threads)
    folder = loading.prepare(config, _log.info, role=role)
    name = _servable.backend_for(role, config, folder)
    _check_ranks(config, ranks)
    emulated, device = name == loading.EMULATED, loading.device_of(config)
    config = _quantization.decided(config, role, folder, name)
    weights = 0
    if not emulated:
        arriving = _memory_plan.arriving_bytes(folder, config, device) // config.tensor_parallel
        _memory_plan.check_weights(role, arriving, config, device)
        weights = _memory_plan.held_bytes(folder, config, device) // config.tensor_parallel
    backend = attach(_built(name, config, folder, ranks), folder)
    invariant = role == "target" and engine.batch_invariant
    if invariant:
        backend.make_batch_invariant()
    recording = _recording.plan(backend, config, role, engine, ranks)
    graphs = 0 if recording is None else recording.step_bytes(engine.block_tokens)
    slots = slot_bytes(backend.vocab_size)
    plan = _memory_plan.plan(engine, backend.vocab_size, backend.device, weights, slots, graphs)
    room = _least(plan.kv_room(role, backend.device), ranks)
    blocks = loading.derive_blocks(config, backend, engine.block_tokens, engine.max_requests, room)
    memory: Mapping[str, int] = {}
    if not emulated:
        memory = plan.with_kv(blocks * backend.bytes_per_block(engine.block_tokens), role, backend.device)
    backend.allocate(blocks, engine.block_tokens)
    backend.states.reserve(engine.max_requests)
    if recording is not None:
        _recording.record(recording, role, config)
    if invariant:
        from specserve.models import _invariance

        _invariance.check(backend, blocks, engine.block_tokens)
    info = WorkerInfo(
        role=role,
        device=str(backend.device),
        place=backend.place,
        blocks=blocks,
        block_tokens=engine.block_tokens,
        context_length=backend.context_length,
        vocab_size=check_vocabulary(folder, folder, backend.vocab_size, backend.vocab_size),
        weights_bytes=weights * config.tensor_parallel,
        load_s=perf_counter() - began,
        memory=memory,
        quantization=config.quantization,
        positional=isinstance(backend.states, NoRowStates),
    )
    return backend, info


def _built(name: str, config: ModelConfig, folder: Path, ranks: RankGroup | None) -> Backend:
    if ranks is not None:
        from specserve.models import _tensor_parallel

        return _tensor_parallel.build(config, folder, ranks)
    return cast(Backend, folders.load("models", name).build(config, folder))


def _least(room: int, ranks: RankGroup | None) -> int:
    return room if ranks is None else ranks.smallest(room)


def _check_ranks(config: ModelConfig, ranks: RankGroup | None) -> None:
    found = 1 if ranks is None else ranks.size
    if config.tensor_parallel != found:
        raise ConfigError(
            f"tensor_parallel {config.tensor_parallel} needs a process for each rank, which `specserve serve` starts; "
            f"here there is only {found}: set it to 1"
        )
