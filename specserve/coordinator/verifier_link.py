"""The way to the verifier: one life after another, and the time between them."""

from __future__ import annotations

from collections.abc import Iterable

from specserve.coordinator.batches import open_message
from specserve.coordinator.requests import RequestState
from specserve.errors import ChannelError
from specserve.transport import Channel
from specserve.transport.messages import Close, Message


class VerifierLink:
    """The verifier's channel while it lives; nothing is sent while it does not."""

    def __init__(self, channel: Channel, life: int, rule: str) -> None:
        self._channel: Channel | None = channel
        self._rule = rule
        self.life = life
        self.broken = False  # the channel refused a message: the engine treats the verifier as lost
        self.lost_since_s: float | None = None

    @property
    def up(self) -> bool:
        """There is a verifier to send to."""
        return self._channel is not None

    def send(self, message: Message) -> None:
        """Hand a message over; a channel that refuses it marks the verifier as broken."""
        if self._channel is None:
            return
        try:
            self._channel.send(message)
        except ChannelError:
            self.broken = True

    def open(self, states: Iterable[RequestState]) -> None:
        """Tell the verifier of requests that it has not heard of in their present epoch."""
        life = self.life
        for state in states:
            if state.target_opened != (life, state.epoch):
                state.target_opened = (life, state.epoch)
                self.send(open_message(state, self._rule))

    def close(self, state: RequestState) -> None:
        """The verifier may forget the request, if it was told of it."""
        if state.target_opened is not None and state.target_opened[0] == self.life:
            state.target_opened = None
            self.send(Close(state.row))

    def lose(self, now_s: float) -> None:
        """The verifier is gone."""
        if self._channel is not None:
            self._channel.close()
        self._channel, self.lost_since_s = None, now_s

    def join(self, channel: Channel, life: int) -> None:
        """A verifier is there again; it knows nothing."""
        self._channel, self.life, self.lost_since_s = channel, life, None
