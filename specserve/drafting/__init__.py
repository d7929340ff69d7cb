"""ONE FILE PER SPECULATOR: where drafted tokens come from.

A speculator file has a constant `KIND` and a function `build`:

KIND = "model"     `build(config, backend, vocab_size)` returns a `Speculator`, which lives in the draft worker
KIND = "guesser"   `build(config)` returns a `Guesser`, which lives in the coordinator; such a file imports no torch
KIND = "beside"    `attach(config, backend, folder)` returns the loaded target with what drafts behind it, and
                   `worker(config, backend, vocab_size, grammars)` the `transport.Worker` that answers plans with it, in
                   the verifier's process and on the target's own blocks; `build` makes its `Speculator`, and
                   `describe(config, folder)` says in a line what there is, without reading weights; where it also has
                   `check_source(config)`, that refuses targets by their source alone, before one is converted

A model that goes on from the target's hidden states also has `layers_read(config)`, of the whole `Config`: the numbers
of the target's layers whose inputs it reads, none for the target's last states; its backend is a `models.DraftHead`.

A speculator from elsewhere is named by a dotted path, to a module or to a class that has the same parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, cast, get_args, runtime_checkable

from specserve import folders
from specserve.config import NO_SPECULATOR as NO_SPECULATOR
from specserve.config import DraftConfig
from specserve.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from specserve.drafting.workspace import Workspace
    from specserve.sampling.profiles import Profile
    from specserve.transport.messages import Array
    from specserve.tree_shape import TreeShape

NOT_CHOICES = frozenset({"worker", "workspace"})

Kind = Literal["model", "guesser", "beside"]


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
    temperature is 0 where drafted tokens are picked by argmax. levels: those of a tree, 0 for a chain; a tree has at
    most `nodes`, and its slots are one for each place that may have children. shared_noise: tokens are picked by a race
    with the target's noise, among the ids that the workspace keeps. For speculators that read hidden states: origin is
    the first position that may be read, and hidden [len(feed), width] the target's states at the positions before the
    feed's.
    """

    start: int
    feed: Array
    slots: Array
    table: Array
    profile: Profile
    shared_noise: bool = False
    origin: int = 0
    hidden: torch.Tensor | None = None
    levels: int = 0
    nodes: int = 0

    @property
    def depth(self) -> int:
        """Tokens to draft, or a tree's places with children; 0 feeds only."""
        return len(self.slots)

    @property
    def first(self) -> int:
        """The absolute position of the first drafted token."""
        return self.start + len(self.feed)


@dataclass(frozen=True, slots=True)
class Trunk:
    """One request of a plan ahead: its committed tokens and the chain that the target is checking, to be fed.

    feed holds the tokens from absolute position `start` on; table covers them. The first `base` tokens are committed;
    chain are those after them, the last tokens of the feed or fed before, and chain_slots [len(chain)] hold their
    dists. Nothing is fed where next_slot names the slot of a token that was drafted behind the chain: what is ranked
    beside it is what may follow. Profile and shared_noise as in `Job`, and so for speculators that read hidden states
    origin and hidden, whose rows belong to the committed tokens of the feed.
    """

    start: int
    feed: Array
    table: Array
    profile: Profile
    shared_noise: bool
    base: int
    chain: list[int]
    chain_slots: Array
    next_slot: int | None = None
    origin: int = 0
    hidden: torch.Tensor | None = None


@dataclass(slots=True)
class Branch:
    """One outcome to draft for: `kept` chain tokens, then a guess of the target's next token, then drafted ones.

    trunk is its number in the plan. rank numbers the guesses at one place, likeliest first, the chain's own token not
    among them. first is the step in which the guess is fed: 0 where all before it is cached and known, else 1.
    slots [depth] take the dists of the drafted tokens; table covers all of them but the last; copy is a pair of block
    ids, from and to, that makes the beginning of the branch's first own block, None where it has none.
    """

    trunk: int
    kept: int
    rank: int
    first: int
    slots: list[int]
    table: Array
    copy: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Grown:
    """What one step brought: guesses (branch, token), and drafted tokens (branch, place in its chain, token)."""

    guesses: list[tuple[int, int]] = field(default_factory=list)
    tokens: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DraftedTree:
    """Nodes level by level, siblings in the order in which they were picked.

    parents is −1 for those behind the feed; families number the place with children that a node belongs to, which is
    its slot's number in the job, and never falls; fed [f] are the nodes whose KV was written, in the order of their
    positions in the row's pages. sureness are the chances that nodes seem to have of being kept where those before them
    are, where that is noted.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    families: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)
    sureness: list[float] = field(default_factory=list)

    def spine(self) -> list[int]:
        """The tokens that stand where a chain's would, from the first on: only these need not be fed again."""
        tokens: list[int] = []
        before = -1
        for node in self.fed:
            if self.parents[node] != before:
                break
            tokens.append(self.tokens[node])
            before = node
        return tokens


@runtime_checkable
class GrowsTrees(Protocol):
    """A `Speculator` that drafts trees, too."""

    def grow(self, jobs: Sequence[Job], shape: TreeShape, workspace: Workspace) -> list[DraftedTree]:
        """Feed each job and grow a tree of its levels and nodes behind it, as `shape` says; in the jobs' order.

        Where jobs draw, siblings are drawn without replacement from the dist that the workspace holds at the slot of
        their family afterwards, and how many there are was decided without a look at any of them: by dists, and by
        what else was drawn. Elsewhere they are the likeliest, or the first in the race with the target's noise.
        """
        ...


class Speculator(Protocol):
    """A model that drafts."""

    def propose(self, jobs: Sequence[Job], workspace: Workspace) -> list[list[int]]:
        """Feed each job and draft its tokens, which are returned in the jobs' order.

        A chain ends early where the model's logits are not finite. A drafted token is drawn, or won a race, from the
        dist that the workspace holds at its slot afterwards; where no job that drafts draws (all their temperatures 0),
        the workspace may be left as it is. All but a job's last leased token are fed.
        """
        ...

    def explore(self, trunks: Sequence[Trunk], branches: Sequence[Branch], workspace: Workspace) -> Iterator[Grown]:
        """Feed each trunk and grow each branch; every step is one forward, and all guesses come with the first.

        Tokens are picked as in `propose`, their noise keyed by the place in the branch's chain. A branch that has no
        guess (too few ids have mass) does not grow. Beside each slot is kept, by `Workspace.rank`, what else was
        likely there.
        """
        ...


def has_worker(config: DraftConfig) -> bool:
    """Whether drafts come from a model with a worker of its own. Raises ConfigError for an unknown speculator."""
    return _kind(config) == "model"


def lives_beside(config: DraftConfig) -> bool:
    """Whether drafts are made by the verifier's own process. Raises ConfigError likewise."""
    return _kind(config) == "beside"


def guesser_of(config: DraftConfig) -> Guesser | None:
    """The model-free speculator, if that is what is configured."""
    if _kind(config) != "guesser":
        return None
    guesser = folders.load("drafting", config.speculator).build(config)
    return cast(Guesser, checked(config.speculator, guesser, ("open", "extend", "guess", "close")))


def check_model(config: DraftConfig, *, is_head: bool) -> None:
    """Raise ConfigError for a head under a speculator that wants a whole model, and the other way round."""
    # A speculator of the user's own may take whatever it likes.
    check = getattr(folders.load("drafting", config.speculator), "check_model", None)
    if check is not None:
        check(config, is_head=is_head)


def checked(name: str, made: object, methods: Sequence[str]) -> object:
    """What a speculator's `build` made. Raises ConfigError where it lacks methods."""
    if lacking := [method for method in methods if not callable(getattr(made, method, None))]:
        raise ConfigError(f"speculator {name!r} built a {type(made).__name__} without {', '.join(lacking)}")
    return made


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
    """Raises ConfigError for what is no speculator."""
    if config.speculator == NO_SPECULATOR:
        return None
    name, kinds = config.speculator, get_args(Kind)
    known = [NO_SPECULATOR, *folders.names_in("drafting")]
    if not folders.is_dotted(name) and name not in known:
        raise ConfigError(f"no speculator called {name!r}; there are: {', '.join(known)}, and dotted paths of your own")
    found = folders.load("drafting", name)
    kind = getattr(found, "KIND", None)
    parts = ("attach", "worker", "build", "describe") if kind == "beside" else ("build",)
    if kind not in kinds or not all(callable(getattr(found, part, None)) for part in parts):
        raise ConfigError(
            f"{name!r} is no speculator: it needs a KIND of {' or '.join(kinds)}, and a function {' and '.join(parts)}"
        )
    if kind == "guesser" and config.lookup not in ("auto", "none"):
        raise ConfigError(
            f"draft.lookup {config.lookup} goes beside a draft model, and {name!r} is none; leave lookup out"
        )
    return cast(Kind, kind)
