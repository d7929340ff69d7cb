"""Which source of drafts fits a draft worker."""

from __future__ import annotations

from collections.abc import Callable

from specserve.coordinator.ahead import AheadDrafts
from specserve.coordinator.either import EitherDrafts
from specserve.coordinator.hidden_drafts import HiddenAhead, HiddenDrafts
from specserve.coordinator.serial import SerialDrafts
from specserve.coordinator.worker_drafts import WorkerLink, WorkerSource


def source_of(link: WorkerLink, clock: Callable[[], float], *, in_turns: bool) -> WorkerSource:
    """The source for one life of a draft worker. in_turns: it must not work while the target does (`takes_turns`)."""
    if link.reads_hidden:
        return HiddenDrafts(link) if in_turns else HiddenAhead(link)
    if in_turns:
        return SerialDrafts(link)
    # A depth that adapts to what drafts bring goes down to 0 where they come too late.
    either = link.config.outcomes == "auto" and link.config.depth_policy == "fixed"
    return EitherDrafts(link, clock) if either else AheadDrafts(link)
