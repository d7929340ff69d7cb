"""The coordinator's end of the way to one ingress."""

from __future__ import annotations

from dataclasses import dataclass

from specserve.transport.messages import Message
from specserve.transport.socket import Address, Endpoint, Heart
from specserve.types import ModelCard


@dataclass(frozen=True, slots=True)
class Welcome:
    """What an ingress is told when it connects.

    engine names the one that answers; after its loss it is another one. here is where the ingress may send to. open are
    its requests that need not be sent again, None where the coordinator knows nothing of this ingress: cursors begin at
    0 then.
    """

    engine: str
    here: Address
    card: ModelCard
    open: tuple[str, ...] | None


class IngressLine:
    """One connection to an ingress, with a heart so that it can tell when we are gone, or when something was lost."""

    def __init__(self, endpoint: Endpoint, name: str, there: Address, heartbeat_s: float) -> None:
        self._endpoint = endpoint
        self._name = name
        self.here = endpoint.accept(name, there.life)
        channel = endpoint.connect(there, "ingress")
        endpoint.expect(name)
        endpoint.watch_process(channel, name, there.life)
        self._channel = channel
        # On the same channel: a message that was lost shows in the number of the next beat.
        self._heart = Heart(channel, heartbeat_s, lambda: (0, False))

    @property
    def acknowledged(self) -> int:
        """See `Line`; the ingress's own beats say it."""
        progress = self._endpoint.progress(self._name)
        return 0 if progress is None else progress[0]

    def send(self, message: Message) -> None:
        """See `Line`."""
        self._channel.send(message)

    def close(self) -> None:
        """See `Line`."""
        self._heart.close()
        self._endpoint.forget(self._name)
