"""The draft worker: plans in, drafted nodes out. It knows rows and slots; how tokens are drafted is the speculator's.

A `Plan` is answered by one message: the `Push` of all its rows, or a `Failed` that names the rows at fault, or none
when the plan as a whole could not be computed. A `PlanAhead` is answered by a `PushAhead` after every step, or
likewise. A row whose dists are not finite is no fault: its chain ends there. So do all chains at a step that the
hardware refuses to tell the results of: what was fed is cached, and what was pushed before stands.

Plans of several coordinators, each with profiles of its own, are computed in the same forwards where they come
together; see `_sharing`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar, cast

import numpy as np
import torch

from specserve import folders
from specserve.config import Config
from specserve.drafting import Branch, DraftedTree, Grown, GrowsTrees, Job, Speculator, Trunk, checked
from specserve.drafting.workspace import DenseDists, DistStore, SparseDists, Workspace
from specserve.errors import ConfigError, EmulationTooSlow, GroupLost, ProtocolError
from specserve.models import AtOnce, Backend, DraftHead, Hardware, _memory_plan
from specserve.models._ranks import RankGroup
from specserve.models._stretches import one_length, split, table_covers, tokens_in_range
from specserve.models._worker import load_backend
from specserve.models.loading import prepare
from specserve.sampling.grammar import Grammars
from specserve.sampling.profiles import Profile, Profiles
from specserve.sampling.wire import decode_hidden
from specserve.text import Tokenizer
from specserve.transport.messages import (
    Array,
    Close,
    Dists,
    Failed,
    Message,
    Open,
    Plan,
    PlanAhead,
    Push,
    PushAhead,
    empty,
)
from specserve.tree_shape import TreeShape
from specserve.types import DraftPicks, RuleName, WorkerInfo

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Part:
    """What one of several plans ahead has in the forwards that they share.

    number is the plan's place among them, first that of its first branch among all branches. steps are forwards until
    its last branch has grown.
    """

    number: int
    plan: int
    rows: list[int]
    profiles: Profiles
    trunks: list[Trunk]
    branches: list[Branch]
    first: int
    steps: int

    @property
    def drafting(self) -> list[Trunk]:
        """The trunks that have branches."""
        return [self.trunks[index] for index in dict.fromkeys(branch.trunk for branch in self.branches)]

    def note(self, grown: Grown) -> None:
        """What the slots of its share of a step hold is of this plan from now on."""
        made: dict[int, list[int]] = {}
        for number, place, _ in grown.tokens:
            branch = self.branches[number]
            made.setdefault(branch.trunk, []).append(branch.slots[place])
        for trunk, slots in made.items():
            self.profiles.drafted(self.rows[trunk], self.plan, slots)

    def of(self, grown: Grown) -> Grown:
        """Its share of what a step brought."""
        branches = range(self.first, self.first + len(self.branches))
        return Grown(
            [(branch - self.first, token) for branch, token in grown.guesses if branch in branches],
            [(branch - self.first, place, token) for branch, place, token in grown.tokens if branch in branches],
        )


class DraftWorker:
    """A `transport.Worker` that holds a speculator and its slots. `handle` raises GroupLost only.

    vocab_size bounds the tokens that may be fed; block_tokens is the size of the backend's pages. picks says for each
    rule how its drafted tokens are picked; those that are not in it are sampled. Only sampled tokens need their dists
    shipped, and only where the temperature is not 0; a push ships those of all its nodes or of none.
    grammars are needed for structured requests only. read_width is that of the hidden states that the speculator reads,
    0 for one that reads none. hardware is what results are waited for on, where reading them does not do that. shape is
    that of trees, None where chains are drafted; its speculator must be one that grows them.
    """

    def __init__(
        self,
        speculator: Speculator,
        workspace: Workspace,
        *,
        vocab_size: int,
        block_tokens: int = 16,
        picks: Mapping[RuleName, DraftPicks] | None = None,
        grammars: Grammars | None = None,
        read_width: int = 0,
        hardware: Hardware | None = None,
        shape: TreeShape | None = None,
    ) -> None:
        self._speculator = speculator
        self._grower = speculator if isinstance(speculator, GrowsTrees) else None
        self._shape = shape
        self._hardware = AtOnce() if hardware is None else hardware
        self._workspace = workspace
        self._vocab_size = vocab_size
        self._block_tokens = block_tokens
        self._picks = draft_picks() if picks is None else picks
        self._profiles = Profiles(grammars)
        self._read_width = read_width

    def handle(self, message: Message) -> Iterable[Message]:
        """Answer `Open` and `Close` with nothing, plans as the module says, anything else with `Failed`."""
        match message:
            case Open():
                self._profiles.open(message)
                return []
            case Close():
                self._profiles.close(message)
                return []
            case Plan():
                return self.plans([(self._profiles, message)])
            case PlanAhead():
                return (reply for _, reply in self.plans_ahead([(self._profiles, message)]))
        return [not_understood(message)]

    def plans(self, asked: Sequence[tuple[Profiles, Plan]]) -> list[Message]:
        """The answers to plans that came together, in order, each with the profiles that its rows are looked up in.

        What cannot be computed together is computed one by one, so that a plan fails alone. Raises GroupLost.
        """
        try:
            return self._together(asked)
        except GroupLost:
            raise  # not these plans' fault: the whole worker is of no use
        except Exception as error:  # whatever one plan provokes must not end the worker
            if len(asked) > 1:
                return [answer for each in asked for answer in self.plans([each])]
            number = asked[0][1].plan
            log.exception("plan %d failed", number)
            return [_failed(number, f"{type(error).__name__}: {error}")]

    def _together(self, asked: Sequence[tuple[Profiles, Plan]]) -> list[Message]:
        began = perf_counter()
        self._hardware.arrived()
        with torch.inference_mode():
            read = [self._read(*each) for each in asked]
            trees = iter(self._draft([job for jobs in read if not isinstance(jobs, Failed) for job in jobs]))
            drafted = [[] if isinstance(jobs, Failed) else [next(trees) for _ in jobs] for jobs in read]
            made = self._answers(asked, read, drafted)
            if not self._finished():
                nothing = _as_tree([], 0)
                made = self._answers(asked, read, [[nothing] * len(trees) for trees in drafted])
        busy_s, steps = perf_counter() - began, self._hardware.counted()
        return [each if isinstance(each, Failed) else replace(each, busy_s=busy_s, steps=steps) for each in made]

    def _answers(
        self,
        asked: Sequence[tuple[Profiles, Plan]],
        read: Sequence[list[Job] | Failed],
        drafted: Sequence[Sequence[DraftedTree]],
    ) -> list[Push | Failed]:
        return [
            jobs if isinstance(jobs, Failed) else self._push(plan, jobs, trees)
            for (_, plan), jobs, trees in zip(asked, read, drafted, strict=True)
        ]

    def _draft(self, jobs: Sequence[Job]) -> list[DraftedTree]:
        """What is drafted for each job: trees, or chains as trees of width 1."""
        if not jobs:
            return []
        if self._shape is not None and self._grower is not None:
            drafted = self._grower.grow(jobs, self._shape, self._workspace)
        else:
            chains = self._speculator.propose(jobs, self._workspace)
            drafted = [_as_tree(chain, job.depth - 1) for job, chain in zip(jobs, chains, strict=True)]
        for job, tree in zip(jobs, drafted, strict=True):
            _write(job.profile, job.first, tree.spine() if job.levels else tree.tokens)
        return drafted

    def _finished(self) -> bool:
        """Wait for the hardware; whether its results may be told."""
        try:
            self._hardware.finish()
        except EmulationTooSlow:  # counted, and told with the next message
            return False
        return True

    def _read(self, profiles: Profiles, message: Plan) -> list[Job] | Failed:
        """The jobs of a plan, or why it cannot be served."""
        try:
            return self._jobs(profiles, message)
        except Exception as error:  # whatever one plan provokes must not end the worker
            return _failed(message.plan, f"{type(error).__name__}: {error}")

    def _jobs(self, profiles: Profiles, message: Plan) -> list[Job] | Failed:
        """The jobs of a plan, or the rows that cannot be served. Raises ProtocolError when its columns disagree."""
        one_length(
            rows=message.rows,
            epochs=message.epochs,
            starts=message.starts,
            feed_lengths=message.feed_lengths,
            depths=message.depths,
            table_lengths=message.table_lengths,
        )
        feeds = split("feeds", message.feeds, message.feed_lengths)
        slots = split("slots", message.slots, message.depths)
        tables = split("tables", message.tables, message.table_lengths)
        origins, hidden = self._hidden(message, message.feed_lengths.tolist())
        none = [0] * len(message.rows)
        trees = message.levels.tolist() or none, message.nodes.tolist() or none
        columns = zip(message.starts.tolist(), feeds, slots, tables, origins, hidden, *trees, strict=True)
        return _rows(profiles, message, columns, self._job)

    def _hidden(
        self, message: Plan | PlanAhead, lengths: list[int]
    ) -> tuple[Sequence[int], Sequence[torch.Tensor | None]]:
        """The first position that may be read, and so many hidden states, of each row. Raises ProtocolError."""
        rows = len(message.rows)
        if not self._read_width:
            return [0] * rows, [None] * rows
        if len(message.origins) != rows or len(message.hidden.rows) != sum(lengths):
            raise ProtocolError(f"{len(message.hidden.rows)} hidden states for {sum(lengths)} committed tokens to feed")
        return message.origins.tolist(), torch.split(decode_hidden(message.hidden, self._read_width), lengths)

    def _job(
        self,
        profile: Profile,
        start: int,
        feed: Array,
        slots: Array,
        table: Array,
        origin: int,
        hidden: torch.Tensor | None,
        levels: int,
        nodes: int,
    ) -> Job:
        if not len(feed):
            raise ProtocolError("an empty feed; a draft continues from a fed token")
        if start < 0:
            raise ProtocolError(f"a feed that starts at position {start}")
        _check_origin(origin, start)
        # The last drafted token is never fed.
        table_covers(table, start + len(feed) + max(0, len(slots) - 1), self._block_tokens)
        self._check_tree(levels, nodes, slots)
        tokens_in_range(feed, self._vocab_size)
        _write(profile, start, feed.tolist())
        profile, shared_noise = self._picking(profile)
        return Job(start, feed, slots, table, profile, shared_noise, origin, hidden, levels, nodes)

    def _check_tree(self, levels: int, nodes: int, slots: Array) -> None:
        if self._shape is None and levels:
            raise ProtocolError(f"a tree of {levels} levels, but this worker drafts chains")
        if self._shape is not None and nodes > self._shape.nodes(levels):
            raise ProtocolError(f"a tree of {levels} levels has at most {self._shape.nodes(levels)} nodes, not {nodes}")
        if self._shape is not None and len(slots) != self._shape.within_nodes(nodes).parents(levels):
            raise ProtocolError(f"{len(slots)} slots for a tree of {levels} levels with at most {nodes} nodes")

    def _picking(self, profile: Profile) -> tuple[Profile, bool]:
        """The profile that drafted tokens are picked by, and whether they race with the target's noise."""
        picks = self._picks.get(profile.rule, "sampling")
        if picks == "argmax":
            profile = replace(profile, temperature=0.0)
        return profile, picks == "shared_noise" and profile.temperature > 0

    def _push(self, message: Plan, jobs: Sequence[Job], drafted: Sequence[DraftedTree]) -> Push:
        slots = [job.slots[tree.families].tolist() for job, tree in zip(jobs, drafted, strict=True)]
        firsts = np.array([job.first for job in jobs], dtype=np.int32)
        fed = [np.isin(np.arange(len(tree.tokens)), tree.fed).tolist() for tree in drafted]
        return Push(
            plan=message.plan,
            rows=message.rows.astype(np.int64),
            epochs=message.epochs,
            bases=firsts,
            covered=firsts,
            chain_lengths=np.array([len(tree.tokens) for tree in drafted], dtype=np.int32),
            tokens=_flat([tree.tokens for tree in drafted]),
            parents=_flat([tree.parents for tree in drafted]),
            slots=_flat(slots),
            fed=_flat(fed).astype(bool),
            sampled=np.ones(sum(map(len, slots)), dtype=bool),
            dists=self._dists([job for job in jobs if job.depth], _flat([list(dict.fromkeys(each)) for each in slots])),
            busy_s=0.0,
            sureness=self._sureness(slots, drafted),
        )

    def _sureness(self, slots: Sequence[Sequence[int]], drafted: Sequence[DraftedTree]) -> Array:
        """Of each token, where it is noted."""
        if not self._workspace.notes_sureness:
            return empty("float32")
        if self._shape is None:
            return self._workspace.sureness(_flat(slots))
        if any(len(tree.sureness) < len(tree.tokens) for tree in drafted):  # a speculator of the user's may not say
            return empty("float32")
        return np.array([chance for tree in drafted for chance in tree.sureness], dtype=np.float32)

    # ---- ahead of the verdict

    def plans_ahead(self, asked: Sequence[tuple[Profiles, PlanAhead]]) -> Iterator[tuple[int, Message]]:
        """Answers to plans that came together, as they come, each with its plan's place in `asked`.

        Where nothing was pushed yet, what cannot be computed together is computed one by one, as in `plans`. Later on
        all plans that are not over fail. Raises GroupLost.
        """
        began = perf_counter()
        self._hardware.arrived()
        parts: list[_Part] = []
        for number, (profiles, message) in enumerate(asked):
            part = self._part(number, profiles, message, sum(len(each.branches) for each in parts))
            if isinstance(part, Failed):
                yield number, part
            else:
                parts.append(part)
        pushed = 0
        try:
            for pushes in self._explored(parts, began):
                yield from pushes
                pushed += 1
        except GroupLost:
            raise  # not these plans' fault: the whole worker is of no use
        except Exception as error:  # whatever one plan provokes must not end the worker
            if len(parts) > 1 and not pushed:
                for part in parts:
                    yield from ((part.number, reply) for _, reply in self.plans_ahead([asked[part.number]]))
                return
            log.exception("plans %s failed", [part.plan for part in parts])
            for part in parts:
                if part.steps > pushed:
                    yield part.number, _failed(part.plan, f"{type(error).__name__}: {error}")

    def _part(self, number: int, profiles: Profiles, message: PlanAhead, first: int) -> _Part | Failed:
        """What a plan has in the forwards, or why it cannot be served."""
        try:
            trunks = self._trunks(profiles, message)
            if isinstance(trunks, Failed):
                return trunks
            branches = self._branches(message, trunks)
            steps = max((branch.first + len(branch.slots) for branch in branches), default=1)
            return _Part(number, message.plan, message.rows.tolist(), profiles, trunks, branches, first, steps)
        except Exception as error:  # whatever one plan provokes must not end the worker
            return _failed(message.plan, f"{type(error).__name__}: {error}")

    def _explored(self, parts: Sequence[_Part], began: float) -> Iterator[list[tuple[int, Message]]]:
        """What each step has to tell to whom. began is the `perf_counter` time at which the plans arrived."""
        trunks, branches = _joined(parts)
        growing = self._speculator.explore(trunks, branches, self._workspace)
        for step in range(max((part.steps for part in parts), default=0)):
            going = [part for part in parts if part.steps > step]
            with torch.inference_mode():
                grown = next(growing)
                shares = [part.of(grown) if len(parts) > 1 else grown for part in going]
                told = [self._told(part, share) for part, share in zip(going, shares, strict=True)]
            finished = self._finished()
            now, steps = perf_counter(), self._hardware.counted()
            if finished:
                for part, share in zip(going, shares, strict=True):
                    part.note(share)
            else:
                told = [(*_events(Grown()), Dists.none()) for _ in going]
            yield [
                (
                    part.number,
                    PushAhead(part.plan, step, not finished or step == part.steps - 1, *each, now - began, steps),
                )
                for part, each in zip(going, told, strict=True)
            ]
            if not finished:
                return
            began = now

    def _told(self, part: _Part, grown: Grown) -> tuple[Array, Array, Array, Dists]:
        slots = (part.branches[branch].slots[place] for branch, place, _ in grown.tokens)
        return *_events(grown), self._dists(part.drafting, slots)

    def _trunks(self, profiles: Profiles, message: PlanAhead) -> list[Trunk] | Failed:
        """The trunks of a plan, or the rows that cannot be served. Raises ProtocolError as `_jobs`."""
        one_length(
            rows=message.rows,
            epochs=message.epochs,
            bases=message.bases,
            text_starts=message.text_starts,
            starts=message.starts,
            next_slots=message.next_slots,
            next_plans=message.next_plans,
            branch_counts=message.branch_counts,
        )
        texts = split("texts", message.texts, message.text_lengths)
        chain_slots = split("chain_slots", message.chain_slots, message.chain_lengths)
        tables = split("tables", message.tables, message.table_lengths)
        places = zip(message.text_starts.tolist(), message.bases.tolist(), message.starts.tolist(), strict=True)
        behind = [
            slot if slot >= 0 and profiles.has_drafted(row, plan, slot) else None
            for row, plan, slot in zip(
                message.rows.tolist(), message.next_plans.tolist(), message.next_slots.tolist(), strict=True
            )
        ]
        origins, hidden = self._hidden(message, np.maximum(message.bases - message.starts, 0).tolist())
        columns = zip(texts, places, chain_slots, behind, tables, origins, hidden, strict=True)
        return _rows(profiles, message, columns, self._trunk)

    def _trunk(
        self,
        profile: Profile,
        text: Array,
        places: tuple[int, int, int],
        chain_slots: Array,
        behind: int | None,
        table: Array,
        origin: int,
        hidden: torch.Tensor | None,
    ) -> Trunk:
        text_start, base, start = places
        if not 0 <= text_start <= start < text_start + len(text):
            raise ProtocolError(f"a feed from position {start} of a text from {text_start} with {len(text)} tokens")
        if text_start > base or base + len(chain_slots) != text_start + len(text):
            raise ProtocolError(f"{base} committed tokens and a chain of {len(chain_slots)} are not the text's")
        _check_origin(origin, start)
        table_covers(table, text_start + len(text), self._block_tokens)
        tokens_in_range(text, self._vocab_size)
        _write(profile, text_start, text[: base - text_start].tolist())
        profile, shared_noise = self._picking(profile)
        chain = text[base - text_start :].tolist()
        feed = text[start - text_start :] if behind is None else text[:0]
        return Trunk(start, feed, table, profile, shared_noise, base, chain, chain_slots, behind, origin, hidden)

    def _branches(self, message: PlanAhead, trunks: Sequence[Trunk]) -> list[Branch]:
        """Raises ProtocolError for a branch that cannot grow as it is told to."""
        one_length(
            parents=message.parents,
            ranks=message.ranks,
            firsts=message.firsts,
            depths=message.depths,
            copies=message.copies,
        )
        if int(message.branch_counts.sum()) != len(message.parents):
            raise ProtocolError(f"branch counts {message.branch_counts.tolist()} for {len(message.parents)} branches")
        if not len(message.parents):
            return []
        owners = np.repeat(np.arange(len(trunks)), message.branch_counts)
        firsts = _first_steps(message, trunks, owners)
        if message.depths.min() < 1 or message.own_lengths.min(initial=1) < 1:
            raise ProtocolError("a branch without slots or blocks")
        bases = np.array([trunk.base for trunk in trunks])[owners]
        full = (bases + message.parents) // self._block_tokens
        columns = (owners, message.parents, message.ranks, firsts, message.copies, full)
        slots = split("slots", message.slots, message.depths)
        own = split("own_blocks", message.own_blocks, message.own_lengths)
        # The guess is fed, and all drafted tokens behind it but the last.
        short = (full + message.own_lengths) * self._block_tokens < bases + message.parents + message.depths
        if short.any():
            branch = int(short.argmax())
            raise ProtocolError(
                f"a branch of {message.depths[branch]} tokens with {message.own_lengths[branch]} blocks of its own"
            )
        return [
            Branch(
                owner,
                kept,
                rank,
                first,
                mine.tolist(),
                np.concatenate([trunks[owner].table[:shared], blocks]),
                None if copied < 0 else (copied, int(blocks[0])),
            )
            for owner, kept, rank, first, copied, shared, mine, blocks in zip(
                *(column.tolist() for column in columns), slots, own, strict=True
            )
        ]

    def _dists(self, rows: Sequence[Job | Trunk], slots: Iterable[int]) -> Dists:
        """The dists at these slots, or none at all when none of these rows, all of which draft, draws its tokens.

        Rows that are fed only do not count: beside them speculators may leave the slots as they are.
        """
        drawn = any(row.profile.temperature > 0 and not row.shared_noise for row in rows)
        wanted = np.array(list(slots) if drawn else (), dtype=np.int64)
        return self._workspace.ship(wanted) if len(wanted) else Dists.none()


def _rows(
    profiles: Profiles, message: Plan | PlanAhead, columns: Iterable[Sequence[Any]], make: Callable[..., T]
) -> list[T] | Failed:
    """What `make` makes of each row's profile and columns, or the rows that cannot be served."""
    made: list[T] = []
    faults: dict[int, str] = {}
    for row, epoch, fields in zip(message.rows.tolist(), message.epochs.tolist(), columns, strict=True):
        try:
            made.append(make(profiles.find(row, epoch), *fields))
        except ProtocolError as error:
            faults[row] = f"row {row}: {error.message}"
    if faults:
        return Failed(message.plan, np.array(list(faults), dtype=np.int64), "; ".join(faults.values()))
    return made


def _check_origin(origin: int, start: int) -> None:
    if not 0 <= origin <= start:
        raise ProtocolError(f"positions are read from {origin} on by a feed that starts at {start}")


def _first_steps(message: PlanAhead, trunks: Sequence[Trunk], owners: Array) -> Array:
    """int64 [B]: the step in which each branch's guess is fed. Raises ProtocolError where that is too early for it."""
    facts = [(len(trunk.chain), trunk.start - trunk.base, trunk.next_slot is not None) for trunk in trunks]
    lengths, cached, told = np.array(facts, dtype=np.int64)[owners].T
    kept = message.parents
    firsts: Array = np.where(kept == lengths, np.maximum(message.firsts, 1 - told), message.firsts)
    at_once = (told > 0) | ((kept < lengths) & (cached >= kept))
    possible = (kept >= 0) & (kept <= lengths) & (message.ranks >= 0) & (firsts <= 1) & (firsts >= ~at_once)
    if not possible.all():
        branch = int(possible.argmin())
        raise ProtocolError(
            f"a branch after {kept[branch]} of {lengths[branch]} tokens, rank {message.ranks[branch]}, step "
            f"{firsts[branch]}"
        )
    return firsts


def _joined(parts: Sequence[_Part]) -> tuple[list[Trunk], list[Branch]]:
    """The trunks and branches of all plans, as if they were of one."""
    trunks: list[Trunk] = []
    branches: list[Branch] = []
    for part in parts:
        first = len(trunks)
        branches += (
            [replace(branch, trunk=first + branch.trunk) for branch in part.branches] if first else part.branches
        )
        trunks += part.trunks
    return trunks, branches


def _events(grown: Grown) -> tuple[Array, Array, Array]:
    """Branches, places and tokens, int32 [m] each: the guesses, then the drafted tokens."""
    guesses = [(branch, -1, token) for branch, token in grown.guesses]
    branches, places, tokens = np.array(guesses + grown.tokens, dtype=np.int32).reshape(-1, 3).T.copy()
    return branches, places, tokens


def not_understood(message: Message) -> Failed:
    """The answer to what a draft worker is never sent."""
    return _failed(-1, f"a draft worker does not understand {type(message).__name__}")


def _as_tree(chain: list[int], fed: int) -> DraftedTree:
    """A chain as a tree; its first `fed` tokens, or all where it ended early, are fed."""
    numbers = list(range(len(chain)))
    return DraftedTree(chain, [number - 1 for number in numbers], numbers, numbers[: max(fed, 0)])


def _write(profile: Profile, start: int, tokens: Sequence[int]) -> None:
    """History and grammar follow what is fed and drafted, as the KV does, whether or not a speculator looks."""
    profile.wrote(start, tokens)
    if profile.constraint is not None:
        profile.constraint.write(start, tokens)


def _flat(rows: Sequence[Sequence[int]]) -> Array:
    return np.array([value for row in rows for value in row], dtype=np.int32)


def _failed(batch: int, reason: str) -> Failed:
    return Failed(batch, np.empty(0, dtype=np.int64), reason)


def build(config: Config, ranks: RankGroup | None = None, *, pipelines: int = 1) -> tuple[DraftWorker, WorkerInfo]:
    """Load the draft that the configuration names, with blocks and slots for so many pipelines together.

    Raises ConfigError for what cannot be loaded or does not fit.
    """
    engine = config.engine.of_several(pipelines)
    slots = partial(_memory_plan.slot_bytes, config.draft, engine)
    backend, info = load_backend(config.draft_model, "draft", engine, slots, ranks)
    name = config.draft.speculator
    built = folders.load("drafting", name).build(config.draft, backend, info.vocab_size)
    speculator = cast(Speculator, checked(name, built, ("propose", "explore")))
    if config.engine.tree_shape is not None and not isinstance(speculator, GrowsTrees):
        raise ConfigError(f"speculator {name!r} drafts chains only; leave engine.tree out")
    head = backend if isinstance(backend, DraftHead) else None
    workspace = Workspace(
        engine.slot_count,
        _dist_store(config, engine.slot_count, info.vocab_size, backend.device),
        backend.device,
        hidden_size=0 if head is None else head.width,
        ranks=config.engine.ranks,
        notes_sureness=config.engine.depth_policy == "adaptive",
    )
    grammars = grammars_of(config)
    worker = DraftWorker(
        speculator,
        workspace,
        vocab_size=backend.vocab_size,
        block_tokens=config.engine.block_tokens,
        grammars=grammars,
        read_width=0 if head is None else head.read_width,
        hardware=backend.hardware,
        shape=config.engine.tree_shape,
    )
    return worker, replace(info, reads_hidden=head is not None)


def grammars_of(config: Config) -> Grammars:
    """The grammars over the draft's tokenizer."""
    return Grammars(Tokenizer.load(prepare(config.draft_model, log.info, role="draft")))


def beside(
    config: Config, speculator: Speculator, width: int, backend: Backend, vocab_size: int, grammars: Grammars
) -> DraftWorker:
    """A worker in the verifier's process, for a speculator on the target's own blocks; width is that of its states.

    Its slots hold what is drafted behind one verdict.
    """
    slots = config.engine.slot_count
    store = _dist_store(config, slots, vocab_size, backend.device)
    workspace = Workspace(slots, store, backend.device, hidden_size=width)
    return DraftWorker(
        speculator,
        workspace,
        vocab_size=backend.vocab_size,
        block_tokens=config.engine.block_tokens,
        grammars=grammars,
        hardware=backend.hardware,
    )


def _dist_store(config: Config, slots: int, vocab_size: int, device: torch.device) -> DistStore:
    if config.draft.dist == "dense":
        return DenseDists(slots, vocab_size, device)
    return SparseDists(slots, min(config.draft.top_k, vocab_size), device)


def draft_picks() -> dict[RuleName, DraftPicks]:
    """How drafted tokens are picked under each rule."""
    rules = {name: folders.load("verification", name) for name in folders.names_in("verification")}
    return {name: rule.DRAFT_PICKS for name, rule in rules.items()}
