"""Hidden states for drafts that go on from them: of what was fed, and of the drafted tokens that were kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specserve.errors import ProtocolError
from specserve.models import ShowsHidden
from specserve.sampling import host
from specserve.sampling.wire import encode_hidden
from specserve.transport.messages import Array, Hidden, Verify
from specserve.verification._rows import Row


def shown(message: Verify, rows: Sequence[Row], last: Array, target: ShowsHidden | None) -> Hidden:
    """The states of the rows that asked, after a forward over them; last int64 [n], the last kept drafted token.

    Raises ProtocolError when a row asks a target that keeps none.
    """
    if not message.shown.any():
        return Hidden.none()
    if target is None:
        raise ProtocolError("hidden states are wanted of a target that shows none")
    places: list[int] = []
    at = 0
    for row, end in zip(rows, last.tolist(), strict=True):
        drafted = at + len(row.feed)
        if row.shown:
            places += [*range(drafted - row.shown, drafted), *[drafted + each for each in row.path(end)]]
        at = drafted + len(row.chain)
    states = target.observed()
    if at != len(states):
        # A forward computed in parts shows its last one: the draft guesses worse behind zeros, and that is all.
        return encode_hidden(states.new_zeros(len(places), states.shape[1]))
    return encode_hidden(states.index_select(0, host.send(np.array(places), states.device)))
