"""A flat buffer that is written on the host and read on the device, for one transfer each time."""

from __future__ import annotations

import torch


class Staging:
    """int64 words. On a GPU the host's side is pinned and a transfer is not waited for, but before it is written again.

    device_words and host_words are the two sides.
    """

    def __init__(self, words: int, device: torch.device) -> None:
        self.host_words = torch.zeros(words, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.device_words = torch.zeros(words, dtype=torch.int64, device=device)
        self._sent = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def free(self) -> None:
        """Wait until the host's side may be written."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, words: int) -> None:
        """Bring the first words to the device, behind what it was told to do before."""
        self.device_words[:words].copy_(self.host_words[:words], non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self.device_words.device))
