"""Which pipeline takes a request. Pure: no Ray, no clock.

What a pipeline's prefix cache holds is not asked for: whoever routes remembers what it sent where, by chained hashes of
full KV blocks, as the pipelines' own caches name them. A longer shared prefix saves prefill, but may not cost balance:
only pipelines whose load is near the least one's are looked at. The match against load is that of SGLang's router
(Zheng et al., 2024), the bound that of consistent hashing with bounded loads (Mirrokni et al., 2018), here as a sum.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Literal

Policy = Literal["prefix", "least_loaded", "round_robin"]

MEMORY_BLOCKS = 16384
"""Blocks remembered of one pipeline; about 2 MB."""

_HASH_BYTES = 8


def block_hashes(tokens: Sequence[int], block_tokens: int) -> tuple[bytes, ...]:
    """One hash for each full block of tokens, of the block and all that precedes it."""
    data = memoryview(array("q", tokens)).cast("B")
    size = block_tokens * 8
    hashes: list[bytes] = []
    last = b""
    for start in range(0, len(data) - size + 1, size):
        last = hashlib.blake2b(data[start : start + size], digest_size=_HASH_BYTES, key=last).digest()
        hashes.append(last)
    return tuple(hashes)


def choose(loads: Mapping[str, float], matched: Mapping[str, int], slack: float, turn: int = 0) -> str:
    """The pipeline with the longest match among those whose load is at most `slack` above the least.

    loads: requests by pipeline, at least one. matched: blocks shared with what it was sent before; none counts as 0.
    Of equal matches the least loaded one is taken; of equals in both, each in its turn.
    """
    names = sorted(loads)
    least = min(loads.values())
    turned = names[turn % len(names) :] + names[: turn % len(names)]
    near = [name for name in turned if loads[name] <= least + slack]
    return min(near, key=lambda name: (-matched.get(name, 0), loads[name]))


class PrefixMemory:
    """The blocks that were sent to each pipeline lately, at most `blocks` of each; the longest unused are forgotten."""

    def __init__(self, blocks: int = MEMORY_BLOCKS) -> None:
        self._blocks = blocks
        self._sent: dict[str, OrderedDict[bytes, None]] = {}

    def matched(self, name: str, hashes: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on without a gap, this pipeline was sent."""
        sent = self._sent.get(name)
        if not sent:
            return 0
        return next((place for place, one in enumerate(hashes) if one not in sent), len(hashes))

    def note(self, name: str, hashes: Sequence[bytes]) -> None:
        """This pipeline is sent these blocks. A block is never forgotten before those that follow it."""
        sent = self._sent.setdefault(name, OrderedDict())
        for one in reversed(hashes[: self._blocks]):
            sent[one] = None
            sent.move_to_end(one)
        while len(sent) > self._blocks:
            sent.popitem(last=False)

    def forget(self, name: str) -> None:
        """This pipeline is gone, or its cache is. Unknown names are fine."""
        self._sent.pop(name, None)


class Router:
    """One policy with what it remembers. Not thread-safe.

    slack: requests that a pipeline may have above the least loaded one and still be taken for its prefix.
    """

    def __init__(self, policy: Policy, *, block_tokens: int, slack: float, memory: PrefixMemory | None = None) -> None:
        self._block_tokens = block_tokens
        self._slack = slack
        self._memory = memory or PrefixMemory()
        self._turns = itertools.count()
        self._route = {"prefix": self._by_prefix, "least_loaded": _least_loaded, "round_robin": _in_turn}[policy]
        self.blocks = 0
        self.matched_blocks = 0

    def route(self, prompt: Sequence[int], loads: Mapping[str, float]) -> str:
        """The pipeline for a prompt, out of those in `loads`, of which there must be one. Counts matched blocks."""
        hashes = block_hashes(prompt, self._block_tokens)
        matched = {name: self._memory.matched(name, hashes) for name in loads}
        name = self._route(loads, matched, next(self._turns))
        self.blocks += len(hashes)
        self.matched_blocks += matched[name]
        self._memory.note(name, hashes)
        return name

    def forget(self, name: str) -> None:
        """This pipeline is gone."""
        self._memory.forget(name)

    def _by_prefix(self, loads: Mapping[str, float], matched: Mapping[str, int], turn: int) -> str:
        return choose(loads, matched, self._slack, turn)


def _least_loaded(loads: Mapping[str, float], matched: Mapping[str, int], turn: int) -> str:
    del matched
    return choose(loads, {}, 0, turn)


def _in_turn(loads: Mapping[str, float], matched: Mapping[str, int], turn: int) -> str:
    del matched
    return sorted(loads)[turn % len(loads)]
