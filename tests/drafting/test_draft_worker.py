"""The draft worker on a table model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from table_backend import TableBackend
from worker_messages import Part, ints, opened, plan

from specserve.drafting.small_model import SmallModel
from specserve.drafting.worker import DraftWorker
from specserve.drafting.workspace import DenseDists, SparseDists, Workspace
from specserve.errors import EmulationTooSlow
from specserve.models import AtOnce
from specserve.sampling import wire
from specserve.sampling.dists import draw, process
from specserve.sampling.noise import Purpose, uniform
from specserve.transport.messages import Close, Failed, Plan, PlanAhead, Push, PushAhead, Verify

VOCAB = 9
CPU = torch.device("cpu")


def table(seed: int = 0) -> TableBackend:
    model = TableBackend(torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2)
    model.allocate(64, 4)
    return model


def worker_on(
    model: TableBackend,
    k: int = 64,
    form: str = "sparse",
    vocab_size: int = VOCAB,
    ranks: int = 0,
    notes_sureness: bool = False,
) -> DraftWorker:
    store = SparseDists(32, k, CPU) if form == "sparse" else DenseDists(32, vocab_size, CPU)
    space = Workspace(32, store, CPU, ranks=ranks, notes_sureness=notes_sureness)
    return DraftWorker(SmallModel(model, vocab_size), space, vocab_size=VOCAB)


def pushed(worker: DraftWorker, message) -> Push:
    (reply,) = worker.handle(message)
    assert isinstance(reply, Push), reply
    return reply


def test_a_push_describes_its_nodes() -> None:
    """Ragged depths, a feed without drafts among them: every column of the push is as documented."""
    model = table()
    worker = worker_on(model)
    for row in (4, 5, 6):
        worker.handle(opened(row, epoch=2))
    parts = [
        Part(4, 0, [1, 2, 3], [0, 1], slots=[7, 8, 9], epoch=2),
        Part(5, 0, [1, 2], [2], epoch=2),
        Part(6, 0, [3], [3], slots=[1], epoch=2),
    ]
    push = pushed(worker, plan(parts, number=17))
    assert push.plan == 17
    assert push.rows.tolist() == [4, 5, 6]
    assert push.epochs.tolist() == [2, 2, 2]
    assert push.bases.tolist() == push.covered.tolist() == [3, 2, 1]
    assert push.chain_lengths.tolist() == [3, 0, 1]
    assert push.parents.tolist() == [-1, 0, 1, -1]
    assert push.slots.tolist() == [7, 8, 9, 1]
    assert push.fed.tolist() == [True, True, False, False]
    assert push.sampled.tolist() == [True] * 4
    assert push.dists.rows.shape == (4, 64 * 6)
    assert push.busy_s > 0


@pytest.mark.parametrize(("temperature", "form"), [(0.0, "sparse"), (0.7, "sparse"), (0.7, "dense"), (1.0, "sparse")])
def test_a_push_says_how_sure_the_draft_is(temperature: float, form: str) -> None:
    """Of a greedy token its probability, of a drawn one the root of the largest; the same whatever the seed draws."""
    model = table()
    found = []
    for seed in (1, 2, 3):
        worker = worker_on(model, form=form, notes_sureness=True)
        worker.handle(opened(4, temperature=temperature, seed=seed))
        push = pushed(worker, plan([Part(4, 0, [1, 2], [0, 1], slots=[7, 8])]))
        context = [1, 2, *push.tokens.tolist()]
        dists = [torch.softmax(model.logits[context[at], context[at + 1]] / (temperature or 1), -1) for at in range(2)]
        wanted = [float(dist.max()) ** (0.5 if temperature else 1) for dist in dists]
        assert push.sureness.tolist() == pytest.approx(wanted, rel=1e-3)  # as it is kept, in float16
        found.append((push.tokens.tolist(), push.sureness.tolist()))
    assert len({sureness[0] for _, sureness in found}) == 1
    assert temperature == 0 or len({tokens[0] for tokens, _ in found}) > 1


def test_nobody_who_does_not_ask_is_told_how_sure_the_draft_is() -> None:
    worker = worker_on(table())
    worker.handle(opened(4))
    assert len(pushed(worker, plan([Part(4, 0, [1, 2], [0, 1], slots=[7, 8])])).sureness) == 0


def test_drafting_is_one_ragged_forward_and_then_a_token_per_row_and_step() -> None:
    """The last drafted token of a row is never fed; rows drop out as their depth is reached."""
    model = table()
    worker = worker_on(model)
    for row in (1, 2):
        worker.handle(opened(row))
    push = pushed(worker, plan([Part(1, 0, [1, 2], [0, 1], slots=[0, 1, 2]), Part(2, 0, [5], [2], slots=[3, 4])]))
    assert [batch.positions.tolist() for batch in model.forwards] == [[0, 1, 0], [2, 1], [3]]
    assert [batch.wanted.tolist() for batch in model.forwards] == [[1, 2], [0, 1], [0]]
    tokens = push.tokens.tolist()
    assert [batch.tokens.tolist() for batch in model.forwards[1:]] == [[tokens[0], tokens[3]], [tokens[1]]]


@pytest.mark.parametrize("ranks", [0, 1, 4])
def test_greedy_chains_take_the_lowest_of_equals_whether_or_not_they_are_ranked(ranks: int) -> None:
    """Logits of whole numbers, most rows with a tie for the first place: the argmax of each, and where it is ranked."""
    model = TableBackend(torch.randint(3, (VOCAB, VOCAB, VOCAB), generator=torch.Generator().manual_seed(3)).float())
    model.allocate(64, 4)
    space = Workspace(32, SparseDists(32, 64, CPU), CPU, ranks=ranks)
    worker = DraftWorker(SmallModel(model, VOCAB), space, vocab_size=VOCAB)
    ties = 0
    for row in range(30):
        worker.handle(opened(row, temperature=0))
        push = pushed(worker, plan([Part(row, 0, [row % 9, row // 9], [0, 1], slots=[0, 1, 2])]))
        history = [row % 9, row // 9, *push.tokens.tolist()]
        for place in range(3):
            logits = model.logits[history[place], history[place + 1]]
            assert history[place + 2] == int(logits.argmax())
            ties += int((logits == logits.max()).sum()) > 1
            ranked = space.ranked(np.array([place]))[0]
            assert logits[ranked].tolist() == logits.sort(descending=True).values[:ranks].tolist()
    assert ties > 60


class Refusing(AtOnce):
    """Hardware that refuses the results with these numbers, from 0."""

    def __init__(self, *numbers: int) -> None:
        self.numbers, self.finished, self.told = numbers, 0, (0, 0, 0)

    def finish(self) -> None:
        self.finished += 1
        if self.finished - 1 in self.numbers:
            raise EmulationTooSlow("too slow")

    def counted(self) -> tuple[int, int, int]:
        return self.finished, 0, len(self.numbers)


def refusing(*numbers: int) -> DraftWorker:
    space = Workspace(32, SparseDists(32, 64, CPU), CPU, ranks=4)
    worker = DraftWorker(
        SmallModel(table(), VOCAB), space, vocab_size=VOCAB, block_tokens=4, hardware=Refusing(*numbers)
    )
    worker.handle(opened(1))
    return worker


def test_a_refused_plan_brings_no_drafts_and_feeds_its_rows() -> None:
    """Its rows are covered, its chains empty, and the refusal is counted; the next plan goes on from what was fed."""
    worker = refusing(0)
    push = pushed(worker, plan([Part(1, 0, [1, 2], [0, 1], slots=[0, 1, 2])]))
    assert (push.chain_lengths.tolist(), push.covered.tolist(), push.steps) == ([0], [2], (1, 0, 1))
    assert len(push.tokens) == len(push.slots) == len(push.dists.rows) == 0
    again = pushed(worker, plan([Part(1, 2, [3], [0, 1], slots=[0, 1, 2])], number=2))
    assert again.chain_lengths.tolist() == [3]


def ahead(number: int) -> PlanAhead:
    """One trunk of two tokens, and one branch of three after all of it."""
    return PlanAhead(
        plan=number,
        rows=np.array([1]),
        **{name: ints([value]) for name, value in ONE_BRANCH.items()},
        texts=ints([1, 2]),
        chain_slots=ints([]),
        next_slots=ints([-1]),
        next_plans=np.array([0]),
        slots=ints([4, 5, 6]),
        own_blocks=ints([2, 3]),
    )


ONE_BRANCH = {
    **{"epochs": 0, "bases": 2, "text_starts": 0, "text_lengths": 2, "starts": 0, "chain_lengths": 0},
    **{"table_lengths": 1, "tables": 0, "branch_counts": 1, "parents": 0, "ranks": 0, "firsts": 1, "depths": 3},
    **{"own_lengths": 2, "copies": 0},
}


@pytest.mark.parametrize("refused", range(4))
def test_a_plan_ahead_ends_where_a_step_is_refused(refused: int) -> None:
    """What was pushed before is what it would have been, the refused step is the last one and brings nothing."""
    whole, short = (list(worker.handle(ahead(1))) for worker in (refusing(), refusing(refused)))
    assert [push.last for push in whole] == [False] * 3 + [True]
    assert [push.last for push in short] == [False] * refused + [True]
    assert [push.tokens.tolist() for push in short[:-1]] == [push.tokens.tolist() for push in whole[:refused]]
    assert all(len(push.tokens) for push in whole)
    assert len(short[-1].tokens) == len(short[-1].branches) == len(short[-1].dists.rows) == 0
    assert short[-1].steps == (refused + 1, 0, 1)


def beside_a_trunk_without_branches(number: int) -> PlanAhead:
    """`ahead`, behind a trunk that is fed only: its row is 2."""
    fed = {"epochs": 0, "bases": 2, "text_starts": 0, "text_lengths": 2, "starts": 0, "chain_lengths": 0}
    fed |= {"table_lengths": 1, "tables": 8, "branch_counts": 0, "texts": [3, 4], "next_slots": -1, "next_plans": 0}
    message = ahead(number)
    both = {name: np.append(values, getattr(message, name)) for name, values in fed.items()}
    columns = {name: both[name].astype(getattr(message, name).dtype) for name in both}
    return replace(message, rows=np.array([2, 1]), **columns)


@pytest.mark.parametrize("rules", [("rejection", "exact"), ("exact", "rejection")])
def test_a_trunk_that_is_fed_only_decides_nothing_of_the_dists(rules: tuple[str, str]) -> None:
    """They are shipped where a trunk with branches draws, and only there: nobody else's slots need to be written."""
    worker = worker_on(table(), ranks=4)
    for row, rule in zip((2, 1), rules, strict=True):
        worker.handle(opened(row, rule=rule, tokens=(1, 2)))
    pushes = list(worker.handle(beside_a_trunk_without_branches(1)))
    drafted = sum(int((push.places >= 0).sum()) for push in pushes)
    shipped = [row for push in pushes for row in push.dists.rows]
    assert drafted == 3
    assert len(shipped) == (drafted if rules[1] == "rejection" else 0)
    assert all(row.any() for row in shipped)


@pytest.mark.parametrize("rule", ["rejection", "coupled", "exact"])
def test_a_plan_ahead_of_which_nothing_can_grow_feeds_its_rows(rule: str) -> None:
    """Only one token is allowed, so that nothing else is likely: all steps are told, without tokens, and none fails."""
    worker = refusing()
    worker.handle(opened(1, rule=rule, tokens=(1, 2), allowed_token_ids=(3,)))
    pushes = list(worker.handle(replace(ahead(1), ranks=ints([1]))))
    assert [type(push).__name__ for push in pushes] == ["PushAhead"] * 4
    assert [push.last for push in pushes] == [False] * 3 + [True]
    assert not any(len(push.tokens) for push in pushes)
    assert all(len(push.tokens) for push in worker.handle(ahead(2)))  # the likeliest one can be guessed


@pytest.mark.parametrize("form", ["sparse", "dense"])
@pytest.mark.parametrize(("temperature", "top_p", "top_k", "k"), [(1.0, 1.0, 0, 64), (0.6, 0.7, 0, 64), (1.5, 1, 4, 3)])
def test_tokens_are_drawn_from_the_shipped_dists_with_propose_noise(
    form: str, temperature: float, top_p: float, top_k: int, k: int
) -> None:
    """A node's dist is the request's own processed dist, truncated; its token is that dist's draw at its position."""
    model = table()
    worker = worker_on(model, k, form)
    for seed in range(25):
        worker.handle(opened(seed, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed))
        push = pushed(worker, plan([Part(seed, 0, [1, 2, 3], [0, 1], slots=[4, 5, 6])]))
        shipped = wire.decode(push.dists, VOCAB, CPU).dense(VOCAB)
        history = [1, 2, 3, *push.tokens.tolist()]
        for j in range(3):
            settings = (torch.tensor([temperature]), torch.tensor([float(top_p)]), torch.tensor([top_k]))
            full = process(model.logits[history[j + 1], history[j + 2]][None], *settings, VOCAB)
            kept = (
                full
                if form == "dense"
                else wire.decode(wire.encode_sparse(*wire.sparsify(full, k)), VOCAB, CPU).dense(VOCAB)
            )
            assert torch.allclose(shipped[j : j + 1], kept, atol=1e-3)
            assert shipped[j, history[3 + j]] > 0
            if form == "dense":
                noise = uniform(torch.tensor([seed]), Purpose.PROPOSE, torch.tensor([3 + j]), places=j)
                assert draw(shipped[j : j + 1], noise).tolist() == [history[3 + j]]


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"rule": "exact"}])
def test_tokens_picked_without_chance_ship_no_dists(how: dict) -> None:
    """Greedy requests, and rules whose draft is the likeliest token, draft the argmax and ship nothing else."""
    model = table()
    worker = worker_on(model)
    worker.handle(opened(1, **how))
    push = pushed(worker, plan([Part(1, 0, [1, 2], [0, 1], slots=[0, 1, 2])]))
    history = [1, 2]
    for token in push.tokens.tolist():
        assert token == int(model.logits[history[-2], history[-1]].argmax())
        history.append(token)
    assert len(push.dists.rows) == 0


def test_a_mixed_plan_ships_a_row_for_every_node() -> None:
    """Where one row draws, the nodes of greedy rows get their one-hot dists, so that rows stay in node order."""
    model = table()
    worker = worker_on(model)
    worker.handle(opened(1, temperature=0))
    worker.handle(opened(2, temperature=1))
    parts = [Part(1, 0, [1, 2], [0, 1], slots=[0, 1]), Part(2, 0, [1], [2], slots=[2])]
    push = pushed(worker, plan(parts))
    shipped = wire.decode(push.dists, VOCAB, CPU).dense(VOCAB)
    assert shipped[:2].argmax(-1).tolist() == push.tokens[:2].tolist()
    assert shipped[:2].max(-1).values.tolist() == [1, 1]
    assert (shipped[2] > 0).sum() > 1
    alone = pushed(worker, plan(parts[1:]))
    assert alone.tokens.tolist() == push.tokens[2:].tolist()


def test_a_draft_does_not_depend_on_its_batch_or_chunking() -> None:
    """Alone, in company, or fed in two parts: the same seed and position draft the same tokens."""
    model = table()
    worker = worker_on(model)
    for row in range(4):
        worker.handle(opened(row, seed=row))
    parts = [Part(r, 0, [1, 2, r], [2 * r, 2 * r + 1], slots=[4 * r, 4 * r + 1, 4 * r + 2]) for r in range(4)]
    together = pushed(worker, plan(parts)).tokens.reshape(4, 3).tolist()
    alone = [pushed(worker, plan([part])).tokens.tolist() for part in parts]
    pushed(worker, plan([Part(2, 0, [1, 2], [9, 10])]))
    fed_twice = pushed(worker, plan([Part(2, 2, [2], [9, 10], slots=[0, 1, 2])])).tokens.tolist()
    assert together == alone
    assert fed_twice == together[2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_beyond_the_shared_vocabulary_are_never_drafted(temperature: float) -> None:
    """Padding ids of the draft's head are masked."""
    model = table()
    model.logits[..., 6:] = 60
    for form in ("sparse", "dense"):
        worker = worker_on(model, form=form, vocab_size=6)
        worker.handle(opened(1, temperature=temperature))
        assert pushed(worker, plan([Part(1, 0, [1], [0, 1], slots=[0, 1, 2])])).tokens.max() < 6


@pytest.mark.parametrize("ranks", [0, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chain_ends_before_dists_that_are_not_finite(temperature: float, ranks: int) -> None:
    """A NaN of the draft costs that row the rest of its chain and nothing else, also where what is likely is kept."""
    model = table()
    clean = worker_on(table(), ranks=ranks)
    worker = worker_on(model, ranks=ranks)
    parts = [Part(1, 0, [1, 2], [0, 1], slots=[0, 1, 2]), Part(2, 0, [3], [2, 3], slots=[3, 4, 5])]
    for row in (1, 2):
        worker.handle(opened(row, temperature=temperature, seed=row))
        clean.handle(opened(row, temperature=temperature, seed=row))
    expected = pushed(clean, plan(parts)).tokens.tolist()
    model.logits[2, expected[0]] = torch.nan
    push = pushed(worker, plan(parts))
    assert push.chain_lengths.tolist() == [1, 3]
    assert push.tokens.tolist() == [expected[0], *expected[3:]]
    assert push.slots.tolist() == [0, 3, 4, 5]
    assert push.fed.tolist() == [True, True, True, False]
    assert len(push.dists.rows) in (0, 4)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (Part(9, 0, [1], [1], slots=[1]), "not open"),
        (Part(2, 0, [1], [1], slots=[1], epoch=3), "epoch"),
        (Part(2, 0, [], [1], slots=[1]), "empty feed"),
        (Part(2, -2, [1], [1], slots=[1]), "position"),
        (Part(2, 0, [VOCAB], [1], slots=[1]), "vocabulary"),
    ],
)
def test_a_row_that_cannot_be_drafted_is_named(part: Part, reason: str) -> None:
    """Each fault of a row names that row and says why."""
    worker = worker_on(table())
    for row in (1, 2):
        worker.handle(opened(row))
    (reply,) = worker.handle(plan([Part(1, 0, [1], [0], slots=[0]), part], number=5))
    assert isinstance(reply, Failed)
    assert (reply.batch, reply.rows.tolist()) == (5, [part.row])
    assert reason in reply.reason


@pytest.mark.parametrize(
    ("part", "enough"),
    [
        (Part(2, 0, [1, 2], [1], slots=[1, 2, 3]), True),
        (Part(2, 0, [1, 2], [1], slots=[1, 2, 3, 4]), False),
        (Part(2, 3, [1], [1]), True),
        (Part(2, 4, [1], [1]), False),
        (Part(2, 0, [1], []), False),
    ],
)
def test_a_table_covers_all_that_is_fed_or_its_row_is_refused(part: Part, enough: bool) -> None:
    """Feed and drafted tokens but the last, in blocks of 4: nothing is computed for a row that has fewer."""
    worker = refusing()
    for row in (1, 2):
        worker.handle(opened(row))
    model = worker._speculator._backend
    if part.start:
        worker.handle(plan([Part(2, 0, [1, 2, 3, 4][: part.start], [1])], number=4))
    model.forwards.clear()
    (reply,) = worker.handle(plan([Part(1, 0, [1], [0], slots=[0]), part], number=5))
    assert isinstance(reply, Push) == enough
    if not enough:
        assert isinstance(reply, Failed)
        assert (reply.batch, reply.rows.tolist()) == (5, [2])
        assert "blocks for" in reply.reason
        assert not model.forwards


@pytest.mark.parametrize(
    "short", [{"table_lengths": [0], "tables": []}, {"own_lengths": [1], "own_blocks": [2]}], ids=["trunk", "branch"]
)
def test_a_plan_ahead_with_too_few_blocks_is_refused(short: dict[str, list[int]]) -> None:
    """A trunk of 2 tokens needs a block of 4, a branch of 3 behind it another one."""
    worker = refusing()
    (reply,) = worker.handle(replace(ahead(1), **{name: ints(values) for name, values in short.items()}))
    assert isinstance(reply, Failed)
    assert "blocks" in reply.reason
    assert all(isinstance(each, PushAhead) for each in worker.handle(ahead(2)))


READ_WIDTH = 3


def reading() -> DraftWorker:
    """A worker whose plans bring hidden states, with two tokens of rows 1 and 2 in their pages."""
    space = Workspace(32, SparseDists(32, 64, CPU), CPU, ranks=4)
    worker = DraftWorker(SmallModel(table(), VOCAB), space, vocab_size=VOCAB, block_tokens=4, read_width=READ_WIDTH)
    for row in (1, 2):
        worker.handle(opened(row))
    fed = plan([Part(1, 0, [1, 2], [0]), Part(2, 0, [1, 2], [1])])
    assert isinstance(worker.handle(read_from(fed, [0, 0], 4))[0], Push)
    return worker


def read_from(message: Plan | PlanAhead, origins: list[int], states: int) -> Plan | PlanAhead:
    """The plan with so many hidden states, and where each row may be read from."""
    hidden = wire.encode_hidden(torch.zeros(states, READ_WIDTH))
    return replace(message, origins=ints(origins), hidden=hidden)


ORIGINS = pytest.mark.parametrize(("origin", "right"), [(-1, False), (0, True), (1, True), (2, True), (3, False)])
"""Of a feed that starts at position 2."""


@ORIGINS
def test_a_row_is_read_from_its_start_on_at_the_latest(origin: int, right: bool) -> None:
    """One that is read from behind its start, or from before position 0, is named, and nothing is computed."""
    worker = reading()
    model = worker._speculator._backend
    model.forwards.clear()
    parts = [Part(1, 2, [3], [0], slots=[0]), Part(2, 2, [3], [1], slots=[1])]
    (reply,) = worker.handle(read_from(plan(parts, number=5), [0, origin], 2))
    assert isinstance(reply, Push) == right
    if not right:
        assert isinstance(reply, Failed)
        assert (reply.batch, reply.rows.tolist()) == (5, [2])
        assert f"read from {origin} on by a feed that starts at 2" in reply.reason
        assert not model.forwards


@ORIGINS
def test_a_trunk_is_read_from_its_start_on_at_the_latest(origin: int, right: bool) -> None:
    """As a row of a plan is."""
    worker = reading()
    model = worker._speculator._backend
    model.forwards.clear()
    longer = {"bases": ints([3]), "starts": ints([2]), "texts": ints([1, 2, 3]), "text_lengths": ints([3])}
    replies = list(worker.handle(read_from(replace(ahead(5), **longer), [origin], 1)))
    assert all(isinstance(reply, PushAhead) for reply in replies) == right
    if not right:
        (reply,) = replies
        assert isinstance(reply, Failed)
        assert (reply.batch, reply.rows.tolist()) == (5, [1])
        assert f"read from {origin} on by a feed that starts at 2" in reply.reason
        assert not model.forwards


def test_a_plan_that_raises_fails_without_naming_rows() -> None:
    """Unknown slots, a missing history, contradictory columns and foreign messages never raise."""
    worker = worker_on(table())
    worker.handle(opened(1))
    broken = plan([Part(1, 0, [1], [0], slots=[0])])
    object.__setattr__(broken, "feed_lengths", np.array([4], dtype=np.int32))
    foreign = Verify(*[None] * 13)
    for message in (plan([Part(1, 0, [1], [0], slots=[32])]), plan([Part(1, 5, [1], [0, 1])]), broken, foreign):
        (reply,) = worker.handle(message)
        assert isinstance(reply, Failed)
        assert reply.rows.tolist() == []


def test_close_forgets_a_row() -> None:
    """A closed row is unknown."""
    worker = worker_on(table())
    worker.handle(opened(1))
    assert worker.handle(Close(1)) == []
    assert isinstance(worker.handle(plan([Part(1, 0, [1], [0])]))[0], Failed)


def behind_a_chain(plan_of_next: int, ranks: tuple[int, ...]) -> PlanAhead:
    """Plan 2, after the branch of plan 1 came true: its guess is committed, two of its three tokens are checked.

    Branches behind both of them, by the slot of the third one.
    """
    count = len(ranks)
    one = {"epochs": 0, "bases": 3, "text_starts": 3, "text_lengths": 2, "starts": 4, "chain_lengths": 2}
    one |= {"table_lengths": 2, "branch_counts": count, "next_slots": 6}
    many = {"parents": 2, "firsts": 0, "depths": 2, "own_lengths": 2, "copies": 3}
    return PlanAhead(
        plan=2,
        rows=np.array([1]),
        **{name: ints([value]) for name, value in one.items()},
        **{name: ints([value] * count) for name, value in many.items()},
        texts=ints(CHAIN[1:3]),
        chain_slots=ints([4, 5]),
        next_plans=np.array([plan_of_next]),
        tables=ints([2, 3]),
        ranks=ints(ranks),
        slots=ints(range(10, 10 + 2 * count)),
        own_blocks=ints(range(8, 8 + 2 * count)),
    )


CHAIN: list[int] = []
"""What plan 1 drafts: a guess and three tokens; set by the test."""


@pytest.mark.parametrize("rule", ["rejection", "coupled", "exact"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_known_token_behind_a_chain_stands_for_feeding_its_end(rule: str, temperature: float) -> None:
    """The same guesses, and the same tokens behind them, as when the chain's end is fed again; a step earlier."""
    told = []
    for made_in in (1, 7):
        model = table()
        space = Workspace(32, SparseDists(32, 64, CPU), CPU, ranks=4)
        worker = DraftWorker(SmallModel(model, VOCAB), space, vocab_size=VOCAB, block_tokens=4)
        worker.handle(opened(1, rule=rule, temperature=temperature, seed=11))
        first = [token for push in worker.handle(ahead(1)) for token in push.tokens.tolist()]
        CHAIN[:] = first
        model.forwards.clear()
        pushes = list(worker.handle(behind_a_chain(made_in, (0, 1))))
        told.append([sorted(zip(push.branches, push.places, push.tokens, strict=True)) for push in pushes])
        assert len(model.forwards) == len(pushes)
        assert (len(model.forwards[0].tokens) == 1) == (made_in == 7)  # the chain's last token, or two guesses
    known, fed = told
    assert (len(known), len(fed)) == (2, 3)
    assert sorted(event for step in known for event in step) == sorted(event for step in fed for event in step)
