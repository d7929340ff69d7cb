"""Limits that can never work are refused at start, with the numbers and what to change."""

from __future__ import annotations

from specserve.config import EngineConfig
from specserve.errors import ConfigError
from specserve.types import Role, WorkerInfo


def check_limits(
    engine: EngineConfig, target: WorkerInfo, draft: WorkerInfo | None, *, pipelines_per_draft: int = 1
) -> None:
    """Raise ConfigError unless one request of full context fits into each worker's KV, or this pipeline's share."""
    for info, sharing in ((target, 1), (draft, pipelines_per_draft)):
        if info is None:
            continue
        # The draft never looks past the target's context, whatever its own is.
        context = min(info.context_length, target.context_length)
        check_room(info.role, info.blocks, info.block_tokens, context, sharing)
        if info.block_tokens != engine.block_tokens:
            raise ConfigError(
                f"the {info.role} made blocks of {info.block_tokens} positions, engine.block_tokens is "
                f"{engine.block_tokens}; restart both with one configuration"
            )
    if target.drafts and engine.outcomes not in ("auto", 0):
        raise ConfigError(
            f"engine.outcomes is {engine.outcomes}, but what drafts beside the verifier cannot work while that "
            f"verifies; set engine.outcomes to 0 or auto"
        )
    if draft is not None and draft.vocab_size < 1:
        raise ConfigError("the draft model has no vocabulary in common with the target")


def check_room(role: Role, blocks: int, block_tokens: int, context: int, sharing: int = 1) -> None:
    """Raise ConfigError unless a request of this context fits. blocks are those of one of the pipelines that share."""
    positions = blocks * block_tokens
    if positions >= context:
        return
    needed = -(-context // block_tokens)
    model = {"target": "target", "draft": "draft.model"}[role]
    holder, to_all = f"the {role}'s KV", ""
    if sharing > 1:
        holder = f"the share of the draft's KV that each of {sharing} pipelines has (cluster.pipelines_per_draft)"
        to_all = f" ({sharing} × {needed} blocks are enough), lower cluster.pipelines_per_draft"
    raise ConfigError(
        f"{holder} holds {blocks} blocks × {block_tokens} = {positions} positions, fewer than one request of its "
        f"context ({context}); raise {model}.kv_memory_gib or kv_blocks{to_all}, or lower context_length to at most "
        f"{positions}"
    )
