"""What a process holds for good is not looked through again and again.

Modules, models and tables come to a million objects. Python's collector walks all of them whenever enough others have
piled up: 0.2 to 0.3 s in which every stream of the process stands still, and several times while they are made.

What a round makes and drops again is no reason to look either, but in a round of many requests it is more than the few
hundred objects that Python waits for.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Final

PILE: Final = 10_000
"""So many more objects than were given back make the collector run: a round of 256 requests passes Python's 700."""


@contextlib.contextmanager
def made_to_last() -> Iterator[None]:
    """While a process starts to serve: nothing is collected meanwhile, and all that is here at the end is left alone.

    A process that starts once more gives back what its first start left.
    """
    gc.disable()
    try:
        yield
    finally:
        leave_alone()
        gc.enable()


def leave_alone() -> None:
    """What is here now, rubbish aside, is not looked through again, and nothing before a `PILE` more is there."""
    gc.set_threshold(PILE)
    gc.unfreeze()
    gc.collect()
    gc.freeze()
