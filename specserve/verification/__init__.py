"""ONE FILE PER RULE: how the target decides which drafted tokens stay and which token comes next.

A rule file holds constants that the workers read when they start, and a function:

DRAFT_PICKS    "sampling": drafted tokens are drawn from the draft dist; "argmax": they are its likeliest tokens;
               "shared_noise": they win the race that the target will run, by the draft's dist
NEEDS_DISTS    whether the target must know the dists that drafted tokens were drawn from
LOSSLESS       whether what comes out has exactly the target's law; the tests prove it by enumeration
GREEDY_WALK    whether, at temperature 0, it keeps exactly the target's own choices; such rows skip their dists
build(engine)  returns the rule's `Judge`; raises ConfigError where the configuration lacks what the rule needs

Rules that can check several drafted continuations at once also hold a `TreeJudge` called judge_tree (see `_tree`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from specserve import folders
from specserve.config import EngineConfig
from specserve.errors import ConfigError
from specserve.types import DraftPicks, RuleName

if TYPE_CHECKING:
    import torch

    from specserve.verification._draft_rows import DraftRows
    from specserve.verification._tree import DraftTree

NOT_CHOICES = frozenset({"bookkeeping", "verifier"})


class RuleNoise(Protocol):
    """Noise by chain position j, keyed by the absolute position of the token in question, accept also by j itself.

    Uniforms in [0, 1): accept float64 [B, K] tests drafted token j; choose float64 [B, K + 1] picks the target's own
    token j. keys int32 [B, K + 1, 4] are those of the noise per token id of token j.
    """

    @property
    def accept(self) -> torch.Tensor:
        """Tests of drafted tokens."""
        ...

    @property
    def choose(self) -> torch.Tensor:
        """The target's own picks."""
        ...

    @property
    def keys(self) -> torch.Tensor:
        """Of the noise per token id."""
        ...


@dataclass(frozen=True, slots=True)
class FixedNoise:
    """`RuleNoise` that is there already."""

    accept: torch.Tensor
    choose: torch.Tensor
    keys: torch.Tensor


class Judge(Protocol):
    """The decision of a rule: pure, and computed in the dtype of its dists (never less)."""

    def __call__(
        self, target: torch.Tensor, draft: DraftRows, tokens: torch.Tensor, lengths: torch.Tensor, noise: RuleNoise
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """How many drafted tokens each row keeps, int64 [B], and the token after them, int64 [B].

        target [B, K + 1, V]: row j is the target dist of token j, given the drafted tokens before it. draft: for each
        drafted token [B, K] the dist that it was drawn from, certain where it was chosen without chance. tokens int64
        [B, K]; lengths int64 [B], at most K. Whatever stands past a row's length has no influence.
        """
        ...


class TreeJudge(Protocol):
    """The decision of a rule about trees, which on a tree of width 1 says what its `Judge` says of that chain."""

    def __call__(
        self, target: torch.Tensor, draft: DraftRows, tree: DraftTree, noise: RuleNoise
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The last kept node of each row, −1 for none, and the token after it, int64 [B] each.

        target [B, N + 1, V] by place: row 0 is the target dist of the first token, row n + 1 that of the token after
        node n. draft [B, N]: for each node the dist that its first sibling was drawn from. Noise by node and by place.
        """
        ...


class Rule(Protocol):
    """What `folders.load("verification", name)` returns."""

    DRAFT_PICKS: DraftPicks
    NEEDS_DISTS: bool
    LOSSLESS: bool
    GREEDY_WALK: bool

    def build(self, engine: EngineConfig) -> Judge:
        """The decision, under this configuration. Raises ConfigError."""
        ...


def all_rules() -> Mapping[RuleName, Rule]:
    """Every rule by its name."""
    return {name: cast(Rule, folders.load("verification", name)) for name in folders.names_in("verification")}


def judges_of(engine: EngineConfig) -> Mapping[RuleName, Judge]:
    """The judges of all rules that this configuration can build, of those that judge trees where trees are drafted.

    Raises ConfigError when engine.rule is not one.
    """
    judges = {}
    for name, rule in all_rules().items():
        try:
            judges[name] = rule.build(engine)
        except ConfigError:
            if name == engine.rule:
                raise
    if engine.rule not in judges:
        raise ConfigError(f"no rule called {engine.rule!r}; there are: {', '.join(judges)}")
    if engine.tree_shape is None:
        return judges
    able = {name: judge for name, judge in judges.items() if name in tree_judges()}
    if engine.rule not in able:
        raise ConfigError(
            f"rule {engine.rule!r} cannot check drafted trees; set engine.rule to one of {', '.join(able)}, "
            f"or leave engine.tree out"
        )
    return able


def tree_judges() -> Mapping[RuleName, TreeJudge]:
    """The judges of trees, by rule."""
    found = {name: getattr(rule, "judge_tree", None) for name, rule in all_rules().items()}
    return {name: cast(TreeJudge, judge) for name, judge in found.items() if judge is not None}
