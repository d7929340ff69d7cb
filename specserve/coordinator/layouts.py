"""How the opaque rows of one sender are laid out: they are put together with each other, so all of them alike."""

from __future__ import annotations

from specserve.errors import ProtocolError
from specserve.transport.messages import Dists, Hidden


class Layout:
    """That of the first rows that came; the bytes themselves are never looked at."""

    def __init__(self, what: str) -> None:
        """what the rows are, for messages."""
        self._what = what
        self._first: tuple[object, ...] | None = None

    def check(self, sent: Dists | Hidden) -> None:
        """Raise ProtocolError for rows that are laid out in another way than the first. No rows say nothing."""
        if not len(sent.rows):
            return
        form = (sent.form, sent.width) if isinstance(sent, Dists) else (sent.dtype,)
        layout = (*form, sent.rows.shape[1])
        if self._first is None:
            self._first = layout
        elif layout != self._first:
            raise ProtocolError(
                f"{self._what} are laid out as {layout}; those before were {self._first}, and all must be alike"
            )
