"""From a model's configuration to a backend that is ready to serve: what both workers do when they start."""

from __future__ import annotations

import logging
from time import perf_counter
from typing import Literal, cast

from specserve import folders
from specserve.config import ModelConfig
from specserve.models import Backend, loading, vocabulary
from specserve.types import WorkerInfo

_log = logging.getLogger("specserve")

_BACKEND = "paged_transformers"


def load_backend(
    config: ModelConfig, role: Literal["draft", "target"], block_tokens: int
) -> tuple[Backend, WorkerInfo]:
    """The loaded model with its KV pages allocated, and what was found out about it.

    Raises ConfigError for a model that cannot be loaded, or that has no room for one full context.
    """
    began = perf_counter()
    loading.apply_threads(config.threads)
    folder = loading.prepare(config, _log.info, role=role)
    backend = cast(Backend, folders.load("models", _BACKEND).build(config, folder))
    blocks = loading.derive_blocks(config, backend, block_tokens)
    backend.allocate(blocks, block_tokens)
    info = WorkerInfo(
        role=role,
        device=str(backend.device),
        blocks=blocks,
        block_tokens=block_tokens,
        context_length=backend.context_length,
        vocab_size=vocabulary.check(folder, folder, backend.vocab_size, backend.vocab_size),
        weights_bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        load_s=perf_counter() - began,
    )
    return backend, info
