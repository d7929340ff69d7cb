"""Limits that can never work are refused at start, with the numbers and what to change."""

from __future__ import annotations

from specserve.config import EngineConfig
from specserve.errors import ConfigError
from specserve.types import WorkerInfo


def check_limits(engine: EngineConfig, target: WorkerInfo, draft: WorkerInfo | None) -> None:
    """Raise ConfigError unless one request of full context fits into each worker's KV."""
    for info in (target, draft):
        if info is None:
            continue
        positions = info.blocks * info.block_tokens
        # The draft never looks past the target's context, whatever its own is.
        context = min(info.context_length, target.context_length)
        if positions < context:
            raise ConfigError(
                f"the {info.role}'s KV holds {info.blocks} blocks × {info.block_tokens} = {positions} positions, fewer "
                f"than one request of its context ({context}); raise {info.role}.kv_memory_gib or kv_blocks, or lower "
                f"context_length to at most {positions}"
            )
        if info.block_tokens != engine.block_tokens:
            raise ConfigError(
                f"the {info.role} made blocks of {info.block_tokens} positions, engine.block_tokens is "
                f"{engine.block_tokens}; restart both with one configuration"
            )
    reads_hidden = target.drafts or (draft is not None and draft.reads_hidden)
    if reads_hidden and engine.outcomes not in ("auto", 0):
        raise ConfigError(
            f"engine.outcomes is {engine.outcomes}, but a draft that reads the target's hidden states can only go on "
            f"from a verdict; set engine.outcomes to 0 or auto"
        )
    if draft is not None and draft.vocab_size < 1:
        raise ConfigError("the draft model has no vocabulary in common with the target")
