"""The ingresses of an engine: what each was told and may not have yet, and how long it is waited for.

A session outlives the connections that carry it. Everything that is sent stays in the session until the ingress has
acknowledged it, so an ingress that connects again is sent what it lacks, and nothing else is. When a connection breaks
the session is waited for a lease; an ingress that says nothing at all has been silent that long already, and one whose
process is dead does not come back. See docs/delivery.md. Everything here happens on the engine's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from specserve.errors import ChannelError
from specserve.transport.messages import Deltas, Message, Places, Reconnect
from specserve.types import Delta

MOST_UNREAD = 1024
"""Messages that an ingress may leave unacknowledged; one that reads so little is as good as gone."""


class Line(Protocol):
    """One connection to an ingress."""

    @property
    def acknowledged(self) -> int:
        """The last cursor that the ingress said it has."""
        ...

    def send(self, message: Message) -> None:
        """Hand a message over. Raises ChannelError when the ingress takes nothing any more."""
        ...

    def close(self) -> None:
        """Release what the line holds. Idempotent."""
        ...


@dataclass(slots=True)
class _Session:
    """cursor numbers what was sent, from 1; `unread` of that is not acknowledged. A broken one ends at `ends_s`."""

    life: int
    line: Line
    cursor: int = 0
    unread: deque[Deltas] = field(default_factory=deque)
    ends_s: float | None = None

    def has(self, cursor: int) -> bool:
        """All that follows this cursor is still here."""
        return self.cursor - len(self.unread) <= cursor <= self.cursor

    def acknowledge(self, cursor: int) -> None:
        while self.unread and self.unread[0].cursor <= cursor:
            self.unread.popleft()


class Ingresses:
    """Sessions by the name of their ingress. lease_s is how long one without a connection is kept."""

    def __init__(self, clock: Callable[[], float], lease_s: float) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._sessions: dict[str, _Session] = {}

    def knows(self, name: str, cursor: int) -> bool:
        """Whether there is a session that can go on behind this cursor."""
        session = self._sessions.get(name)
        return session is not None and session.has(cursor)

    def connect(self, name: str, life: int, cursor: int, open_line: Callable[[], Line]) -> list[str]:
        """Connect an ingress in this life, which has everything up to `cursor`; it is sent what it lacks.

        Returns the requests whose ends are among that. Where the session is not known, one begins at cursor 0.
        The line is opened when the one before it is closed; what that raises is raised.
        """
        session = self._sessions.pop(name, None)
        if session is not None:
            session.line.close()
        if session is None or not session.has(cursor):
            session = _Session(life, open_line())
        else:
            session.life, session.line, session.ends_s = life, open_line(), None
            session.acknowledge(cursor)
        self._sessions[name] = session
        for message in session.unread:
            self._send(session, message)
        return [delta.request for message in session.unread for delta in message.deltas if delta.finish is not None]

    def current(self, name: str, life: int) -> bool:
        """Whether this is the life in which the ingress is connected now; what others say is void (invariant I5)."""
        session = self._sessions.get(name)
        return session is not None and session.life == life

    def deliver(self, name: str, deltas: tuple[Delta, ...]) -> None:
        """Send all that a round brought to one ingress, and keep it until it is acknowledged."""
        session = self._sessions.get(name)
        if session is None:
            return
        session.cursor += 1
        session.acknowledge(session.line.acknowledged)
        session.unread.append(Deltas(session.cursor, deltas))
        self._send(session, session.unread[-1])
        if len(session.unread) > MOST_UNREAD:
            session.ends_s = self._clock()

    def place(self, name: str, places: Places) -> None:
        """Tell an ingress where its requests stand. Nothing is kept: one that connects again is told anew."""
        session = self._sessions.get(name)
        if session is not None:
            self._send(session, places)

    def _send(self, session: _Session, message: Message) -> None:
        try:
            session.line.send(message)
        except ChannelError:
            self._broken(session)

    def _broken(self, session: _Session) -> None:
        if session.ends_s is None:
            session.ends_s = self._clock() + self._lease_s

    def lost(self, name: str, life: int, *, gone: bool) -> None:
        """The connection of this life is over. An ingress that is not gone is asked to connect again."""
        session = self._sessions.get(name)
        if session is None or session.life != life:
            return
        if gone:
            session.ends_s = self._clock()
            return
        self._broken(session)
        self._send(session, Reconnect())

    @property
    def deadline_s(self) -> float | None:
        """When the next broken session ends."""
        return min((each.ends_s for each in self._sessions.values() if each.ends_s is not None), default=None)

    def expired(self) -> list[str]:
        """End the sessions whose time is up; what these ingresses brought is to be cancelled."""
        now = self._clock()
        over = [name for name, each in self._sessions.items() if each.ends_s is not None and each.ends_s <= now]
        for name in over:
            self._sessions.pop(name).line.close()
        return over

    def close(self) -> None:
        """End every session without a word."""
        for session in self._sessions.values():
            session.line.close()
        self._sessions.clear()
