"""Hidden states for drafts that go on from them: of what was fed, and of the drafted tokens that were kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specserve.errors import ProtocolError
from specserve.models import Backend, ShowsHidden
from specserve.sampling import host
from specserve.sampling.wire import encode_hidden
from specserve.transport.messages import Array, Hidden, Verify
from specserve.verification._rows import Row


def shown(message: Verify, rows: Sequence[Row], last: Array, backend: Backend) -> Hidden:
    """The states of the rows that asked, after a forward over them; last int64 [n], the last kept drafted token.

    Raises ProtocolError when a row asks a target that keeps none.
    """
    if not message.shown.any():
        return Hidden.none()
    if not isinstance(backend, ShowsHidden):
        raise ProtocolError("hidden states are wanted of a target that shows none")
    places: list[int] = []
    at = 0
    for row in rows:
        if message.shown[row.index]:
            drafted = at + len(row.feed)
            places += [*range(at, drafted), *[drafted + each for each in row.path(int(last[row.index]))]]
        at += len(row.feed) + len(row.chain)
    states = backend.observed()
    # A forward that was computed in parts shows its last one: the draft guesses worse behind zeros, and that is all.
    states = torch.nn.functional.pad(states, (0, 0, at - len(states), 0))
    return encode_hidden(states[host.send(torch.tensor(places), states.device)])
