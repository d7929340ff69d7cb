"""Which draft slots of a whole batch are worth their place in the next verification.

Slot j of request i adds P(the chain of i is kept up to j) tokens in expectation, and time. The most valuable slots are
admitted first, and as many as make most tokens per second: for a verification whose cost depends on how many slots it
has, no other set is better, whatever the shape of the cost. A deeper slot of one request never counts for more than
those before it, so what is admitted are chains. (Goodput as what to maximise: SmartSpec, Liu et al. 2024.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specserve.coordinator.costs import FloatArray
from specserve.transport.messages import Array

Seconds = Callable[[FloatArray], FloatArray]
"""float64 [n] seconds of a round for float64 [n] slots in it, which rise; 0 slots is a plain round."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """Slots of each request, int [rows]; what is expected of a round with them: tokens per second, and seconds."""

    depths: Array
    goodput: float
    seconds: float


def admit(survival: FloatArray, limits: Array, seconds: Seconds, draft_step_s: float, delivered: float) -> Admitted:
    """The best set of slots.

    survival float64 [rows, depth]: how likely each slot's token is kept. limits int [rows]: slots that each request
    may have. draft_step_s: what the round waits for each step of drafting, a step making one token for every request;
    0 where nobody waits. delivered: the share of admitted slots for which a draft is there in time.
    """
    rows, depth = survival.shape
    places = np.arange(depth)
    usable = (places < np.asarray(limits)[:, None]).ravel()
    worth = np.where(usable, survival.ravel(), -1.0)
    order = np.argsort(-worth, kind="stable")[: int(usable.sum())]  # stable: a shallower slot of equal worth first
    caps = places[-1:] + 1 if draft_step_s == 0 else places + 1  # deepest slot admitted: all of them, or each in turn
    within = (order % depth)[None, :] < caps[:, None]
    slots = np.concatenate([np.zeros((len(caps), 1)), np.cumsum(within, axis=1)], axis=1)
    kept = np.concatenate([np.zeros((len(caps), 1)), np.cumsum(within * worth[order], axis=1)], axis=1)
    verify_s = seconds(delivered * np.arange(len(order) + 1, dtype=np.float64))[slots.astype(int)]
    round_s = verify_s + np.where(slots > 0, caps[:, None] * draft_step_s, 0.0)
    goodput = (rows + delivered * kept) / round_s
    cap, count = np.unravel_index(int(goodput.argmax()), goodput.shape)
    chosen = order[:count][within[cap, :count]]
    depths = np.bincount(chosen // depth, minlength=rows)
    return Admitted(depths, float(goodput[cap, count]), float(round_s[cap, count]))
