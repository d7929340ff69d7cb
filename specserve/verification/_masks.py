"""The grammar masks of a round, built while the target's forward runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specserve.errors import SpecserveError
from specserve.sampling.constraint import Constraint
from specserve.transport.messages import Array
from specserve.verification._rows import Row


@dataclass(slots=True)
class Masks:
    """rows are indices into the round's logits, bits what each of them allows; faults say why, by index in the message.

    A target row is held to what its request's grammar allows after the committed tokens and the drafted ones before
    it. Rows past a drafted token that the grammar refuses are free: the rule refuses that token, so they do not count.
    """

    rows: list[int] = field(default_factory=list)
    bits: list[Array] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)


def build(rows: Sequence[Row]) -> Masks:
    """The masks of these rows, the due ones among which own the round's logits in order. Needs no torch."""
    masks = Masks()
    at = 0
    for row in rows:
        if row.profile.constraint is not None:
            try:
                _add(masks, row, row.profile.constraint, at)
            except SpecserveError as error:
                masks.faults[row.index] = error.message
        at += len(row.chain) + 1 if row.due else 0
    return masks


def _add(masks: Masks, row: Row, constraint: Constraint, at: int) -> None:
    constraint.write(row.start, row.feed.tolist())
    if not row.due:
        return
    bits = constraint.allowed()
    if bits is None:
        raise SpecserveError("the answer so far is none that its grammar allows")
    found: list[Array | None] = [bits]
    for node in range(len(row.chain)):
        path = row.path(node)
        parent = path[-2] if len(path) > 1 else -1
        before = found[parent + 1]
        # Behind its own parent a node is written alone, else its whole path anew.
        known = len(path) - 1 if parent == node - 1 else 0
        constraint.write(row.first + known, row.tokens_to(node)[known:])
        found.append(None if before is None else constraint.allowed())
    for place, each in enumerate(found):
        if each is not None:
            masks.rows.append(at + place)
            masks.bits.append(each)
