"""Where each token of a stream came from, for clients that ask with `stream_options.include_origins`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from specserve.types import Delta

Origin = Literal["accepted", "correction", "bonus", "plain"]


def origins_of(delta: Delta) -> list[Origin]:
    """One per token: drafted and kept; the target's own after a refused draft, after a whole chain, or without any."""
    own: Origin = "plain"
    if delta.offered:
        own = "bonus" if delta.kept == delta.offered else "correction"
    return [own if place >= delta.kept else "accepted" for place in range(len(delta.tokens))]


def origins_field(delta: Delta, shown: Sequence[str]) -> dict[str, Any]:
    """The extension of a chunk: one round's tokens as texts with origins, and how many drafts were offered and kept."""
    if not delta.tokens:
        return {}
    origins = origins_of(delta)
    return {"specserve": {"texts": list(shown), "origins": origins, "drafted": delta.offered, "kept": delta.kept}}
