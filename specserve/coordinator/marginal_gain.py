"""Which draft slots of a whole batch are worth their place in the next verification.

Slot j of request i adds P(the chain of i is kept up to j) tokens in expectation, and time; a slot of a tree, P(the path
that is kept goes through it). The most valuable slots are admitted first, and as many as make most tokens per second:
for rounds whose cost depends on how many slots and levels they have, no other set is better, whatever the shape of the
cost. A deeper slot of one request never counts for more than those before it, so what is admitted are chains, or trees.
(Goodput as what to maximise: SmartSpec, Liu et al. 2024.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specserve.coordinator.round_costs import FloatArray
from specserve.transport.messages import Array

Seconds = Callable[[FloatArray], FloatArray]
"""float64 [n] seconds of a round for float64 [n] slots in it, which rise; 0 slots is a plain round."""


StepSeconds = Callable[[FloatArray], FloatArray]
"""float64 [m, n] seconds of a step of drafting by float64 [m, n] tokens that it makes, for one level, for two, …"""


@dataclass(frozen=True, slots=True)
class Admitted:
    """Slots of each request, int [rows], and the tokens per second that are expected of a round with them."""

    slots: Array
    goodput: float


def admit(
    worth: FloatArray,
    levels: Array,
    limits: Array,
    seconds: Seconds,
    step_seconds: StepSeconds | None,
    delivered: float,
) -> Admitted:
    """The best set of slots.

    worth float64 [rows, n]: how likely each slot's token is kept, falling; levels int [rows, n] say how many are before
    it, in its chain or tree, and limits int [rows] how many levels each request may have. step_seconds: what the round
    waits for a step of drafting, a step making one level for every request; None where nobody waits. delivered: the
    share of admitted slots for which a draft is there in time.
    """
    rows, columns = worth.shape
    values = np.where(levels < np.asarray(limits)[:, None], worth, -1.0).ravel()
    order = np.argsort(-values, kind="stable")[: int((values >= 0).sum())]  # stable: of equal ones the shallower first
    deepest = int(levels.max(initial=0)) + 1
    caps = np.arange(deepest if step_seconds is None else 1, deepest + 1)[
        :, None
    ]  # levels: all of them, or each in turn
    within = levels.ravel()[order] < caps
    none = np.zeros((len(caps), 1))
    slots = np.concatenate([none, np.cumsum(within, axis=1)], axis=1)
    kept = np.concatenate([none, np.cumsum(within * values[order], axis=1)], axis=1)
    round_s = seconds(delivered * np.arange(len(order) + 1, dtype=np.float64))[slots.astype(int)]
    if step_seconds is not None:
        round_s += np.where(slots > 0, caps * step_seconds(np.maximum(rows, slots / caps)), 0.0)
    goodput = (rows + delivered * kept) / round_s
    cap, count = np.unravel_index(int(goodput.argmax()), goodput.shape)
    chosen = order[:count][within[cap, :count]]
    admitted = np.bincount(chosen // columns, minlength=rows)
    return Admitted(admitted, float(goodput[cap, count]))
