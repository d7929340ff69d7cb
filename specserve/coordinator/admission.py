"""What is refused before a request takes a place."""

from __future__ import annotations

from specserve.config import EngineConfig
from specserve.errors import ContextLengthExceeded, InvalidField
from specserve.types import Request, WorkerInfo


def check_request(request: Request, engine: EngineConfig, target: WorkerInfo) -> None:
    """Raise a RequestError when this request can never be served here."""
    length, context = len(request.prompt), target.context_length
    if length < 1:
        raise InvalidField("the prompt has no tokens; send at least one", param="prompt")
    if length >= context:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {context} tokens, but the prompt has {length}; "
            f"shorten it to at most {context - 1}",
            param="prompt",
        )
    if not all(0 <= token < target.vocab_size for token in request.prompt):
        raise InvalidField(f"prompt token ids must be in [0, {target.vocab_size})", param="prompt")
    if request.max_tokens < 1:
        raise InvalidField(f"max_tokens must be at least 1, found {request.max_tokens}", param="max_tokens")
    if request.structured is not None and request.ignore_eos:
        raise InvalidField(
            "ignore_eos cannot go with structured output: an answer whose grammar is complete must end",
            param="ignore_eos",
        )
    if request.depth is not None and not 0 <= request.depth <= engine.depth:
        raise InvalidField(
            f"depth {request.depth} is outside [0, {engine.depth}], what this deployment can do",
            param="speculation.depth",
        )
