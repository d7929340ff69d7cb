"""ONE FILE PER SPECULATOR: where drafted tokens come from.

A speculator file has a constant `KIND` and a function `build`:

KIND = "model"     `build(config, backend, vocab_size)` returns a `Speculator`, which lives in the draft worker
KIND = "guesser"   `build(config)` returns a `Guesser`, which lives in the coordinator; such a file imports no torch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, cast

from specserve import folders
from specserve.config import DraftConfig

if TYPE_CHECKING:
    from specserve.drafting.workspace import Workspace
    from specserve.sampling.profiles import Profile
    from specserve.transport.messages import Array

NOT_CHOICES = frozenset({"worker", "workspace"})

NO_SPECULATOR = "none"

Kind = Literal["model", "guesser"]


class Guesser(Protocol):
    """Guesses tokens from a request's own history, without a model. Calls for rows that are not open raise KeyError."""

    def open(self, row: int, tokens: Sequence[int], prompt_length: int = 0, prediction: Sequence[int] = ()) -> None:
        """Start, or start again, with the committed tokens of a row, of which the first prompt_length are the prompt.

        prediction holds the tokens that the client expects behind the prompt.
        """
        ...

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """The row has more committed tokens."""
        ...

    def guess(self, row: int, depth: int) -> list[int]:
        """At most `depth` tokens that may follow the row's committed tokens; empty when there is nothing to say."""
        ...

    def close(self, row: int) -> None:
        """Forget the row, if it is known."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """One row of a plan: feed it, then draft `len(slots)` tokens after it.

    feed holds the tokens from absolute position `start` on, never none; slots [depth] take the dists of the drafted
    tokens in chain order; table are the block ids that cover start + feed + depth - 1 positions. The profile's
    temperature is 0 where drafted tokens are picked by argmax. shared_noise: they are picked by a race with the
    target's noise, among the ids that the workspace keeps.
    """

    start: int
    feed: Array
    slots: Array
    table: Array
    profile: Profile
    shared_noise: bool = False

    @property
    def depth(self) -> int:
        """Tokens to draft; 0 feeds only."""
        return len(self.slots)

    @property
    def first(self) -> int:
        """The absolute position of the first drafted token."""
        return self.start + len(self.feed)


class Speculator(Protocol):
    """A model that drafts."""

    def propose(self, jobs: Sequence[Job], workspace: Workspace) -> list[list[int]]:
        """Feed each job and draft its tokens, which are returned in the jobs' order.

        A chain ends early where the model's logits are not finite. A drafted token is drawn, or won a race, from the
        dist that the workspace holds at its slot afterwards; where no job draws (all temperatures 0), the workspace may
        be left as it is. All but a job's last leased token are fed.
        """
        ...


def has_worker(config: DraftConfig) -> bool:
    """Whether drafts come from a model with a worker of its own. Raises ConfigError for an unknown speculator."""
    return _kind(config) == "model"


def guesser_of(config: DraftConfig) -> Guesser | None:
    """The model-free speculator, if that is what is configured."""
    if _kind(config) != "guesser":
        return None
    return cast(Guesser, folders.load("drafting", config.speculator).build(config))


def guessers_of(config: DraftConfig) -> dict[str, Guesser]:
    """Every model-free speculator by its name, for requests that ask for one. They cost nothing until one does."""
    loaded = {name: folders.load("drafting", name) for name in folders.names_in("drafting")}
    return {name: module.build(config) for name, module in loaded.items() if module.KIND == "guesser"}


def sources_of(config: DraftConfig, depth: int) -> tuple[str, ...]:
    """The speculators that a request may ask for where chains are at most `depth` tokens long."""
    if depth == 0:
        return ()
    configured = set() if config.speculator == NO_SPECULATOR else {config.speculator}
    return tuple(sorted(configured | guessers_of(config).keys()))


def _kind(config: DraftConfig) -> Kind | None:
    if config.speculator == NO_SPECULATOR:
        return None
    return cast(Kind, folders.load("drafting", config.speculator).KIND)
