"""Rows of a round that are judged together: ragged chains as padded index tensors."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from specserve.sampling import host
from specserve.sampling.noise import Purpose, token_keys, tree_places, uniform
from specserve.sampling.profiles import Settings
from specserve.types import RuleName
from specserve.verification import RuleNoise
from specserve.verification._rows import Row
from specserve.verification._tree import ABSENT


@dataclass(frozen=True, slots=True)
class Group:
    """B due rows under one rule, all chains or all trees; K is the most tokens that one was drafted. On the CPU, int64.

    places [B] in the message; logits [m] the rows of the round's logits that belong to the group, in order, and
    owners [m] the group row of each; steps [B, K + 1] indices into these two, repeating the last one past a chain's
    end; tokens and dist_rows [B, K], 0 and -1 past a chain's end; lengths [B]; first [B] the absolute position of
    token 0.
    """

    rule: str
    places: torch.Tensor
    logits: torch.Tensor
    owners: torch.Tensor
    steps: torch.Tensor
    tokens: torch.Tensor
    dist_rows: torch.Tensor
    lengths: torch.Tensor
    first: torch.Tensor
    settings: Settings
    parents: torch.Tensor | None
    levels: torch.Tensor

    def by_step(self, values: torch.Tensor) -> torch.Tensor:
        """[B, K + 1, …] from one value, or row of values, per group logit [m, …]."""
        if self.steps.numel() == len(values):
            return values.view(*self.steps.shape, *values.shape[1:])
        return values[host.send(self.steps, values.device)]

    def noise(self, device: torch.device) -> RuleNoise:
        """The noise of each chain position, keyed by absolute position; tests of drafted tokens also by their place."""
        return _GroupNoise(self, device)


class _GroupNoise:
    """`RuleNoise`, each kind made when a rule asks for it: no rule needs all of them."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._device = device
        self._levels = group.levels
        self._positions = group.first[:, None] + group.levels
        self._seeds, self._branches = group.settings.seeds[:, None], group.settings.branches[:, None]

    @cached_property
    def accept(self) -> torch.Tensor:
        """See `RuleNoise`."""
        levels = self._levels[:, 1:] - 1
        positions, places = self._positions[:, 1:] - 1, tree_places(levels)
        return host.send(uniform(self._seeds, Purpose.ACCEPT, positions, self._branches, places), self._device)

    @cached_property
    def choose(self) -> torch.Tensor:
        """See `RuleNoise`."""
        return host.send(uniform(self._seeds, Purpose.CHOOSE, self._positions, self._branches), self._device)

    @cached_property
    def keys(self) -> torch.Tensor:
        """See `RuleNoise`."""
        return host.send(token_keys(self._seeds, self._positions, self._branches), self._device)


def grouped(rows: Sequence[Row], greedy_walks: Container[RuleName]) -> tuple[list[tuple[Row, int]], list[Group]]:
    """The due rows of a round, in order; their logits are taken to stand in the same order.

    First those of temperature 0 under one of the rules greedy_walks, each with the place of its first logits, then the
    others by rule.
    """
    greedy: list[tuple[Row, int]] = []
    members: dict[tuple[str, bool], list[tuple[Row, int]]] = {}
    at = 0
    for row in rows:
        if row.due:
            rule = row.profile.rule
            walks = row.profile.temperature == 0 and rule in greedy_walks
            (greedy if walks else members.setdefault((rule, row.parents is not None), [])).append((row, at))
            at += len(row.chain) + 1
    return greedy, [_group(rule, *zip(*found, strict=True)) for (rule, _), found in members.items()]


def _group(rule: str, rows: Sequence[Row], ats: Sequence[int]) -> Group:
    lengths = torch.tensor([len(row.chain) for row in rows])
    longest = int(lengths.max())
    ends = (lengths + 1).cumsum(0)
    begins = ends - lengths - 1
    parents = [list(row.parents) for row in rows if row.parents is not None]
    owners = torch.arange(len(rows)).repeat_interleave(lengths + 1)
    return Group(
        rule=rule,
        places=torch.tensor([row.index for row in rows]),
        logits=torch.arange(int(ends[-1])) + (torch.tensor(ats) - begins)[owners],
        owners=owners,
        steps=begins[:, None] + torch.minimum(torch.arange(longest + 1), lengths[:, None]),
        tokens=_padded([row.chain.tolist() for row in rows], longest, 0),
        dist_rows=_padded([row.dist_rows.tolist() for row in rows], longest, -1),
        lengths=lengths,
        first=torch.tensor([row.first for row in rows]),
        settings=Settings.of([row.profile for row in rows]),
        parents=_padded(parents, longest, ABSENT) if parents else None,
        levels=_padded(list(map(_levels, parents)), longest + 1, 0) if parents else torch.arange(longest + 1)[None],
    )


def _levels(parents: Sequence[int]) -> list[int]:
    """How many drafted tokens stand before the one that is chosen at each place of a tree."""
    levels = [0]
    for parent in parents:
        levels.append(levels[parent + 1] + 1)
    return levels


def _padded(values: Sequence[list[int]], width: int, fill: int) -> torch.Tensor:
    padded = [row + [fill] * (width - len(row)) for row in values]
    return torch.tensor(padded, dtype=torch.int64).view(len(values), width)
