"""The verifier on a table model: positions, mixed batches, faults."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from table_backend import TableBackend
from worker_messages import Part, opened, verify

from specserve.config import EngineConfig
from specserve.errors import EmulationTooSlow
from specserve.models import AtOnce
from specserve.sampling import wire
from specserve.sampling.dists import draw, process
from specserve.sampling.noise import Purpose, token_keys, uniform
from specserve.sampling.race import race
from specserve.transport.messages import Beat, Close, Failed, Verdict
from specserve.verification import judges_of
from specserve.verification.verifier import Verifier

VOCAB = 7
RULES = sorted(judges_of(EngineConfig()))


def backend(seed: int = 0) -> TableBackend:
    model = TableBackend(torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2)
    model.allocate(256, 4)
    return model


def greedy(model: TableBackend, tokens: list[int], count: int) -> list[int]:
    """The greedy continuation, straight from the table."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(model.logits[tokens[-2] if len(tokens) > 1 else 0, tokens[-1]].argmax()))
    return tokens[-count:]


def answer(worker: Verifier, message) -> Verdict:
    (reply,) = worker.handle(message)
    assert isinstance(reply, Verdict), reply
    return reply


def test_an_opened_row_is_answered_with_nothing() -> None:
    """Open and Close have no reply."""
    worker = Verifier(backend(), vocab_size=VOCAB)
    assert worker.handle(opened(1)) == []
    assert worker.handle(Close(1)) == []


class Refusing(AtOnce):
    """Hardware that refuses its first results."""

    def __init__(self, refusals: int) -> None:
        self.refusals, self.finished = refusals, 0

    def finish(self) -> None:
        self.finished += 1
        if self.finished <= self.refusals:
            raise EmulationTooSlow("a step was too slow")

    def counted(self) -> tuple[int, int, int]:
        return self.finished - self.refusals, 0, self.refusals


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_a_refused_round_is_computed_again_and_says_the_same(rule: str) -> None:
    """Two refusals, penalties and all: the verdict of a round that was never refused. A third one fails it."""
    message = verify([Part(1, 0, [1, 2, 3], [0, 1], chain=[4, 5, 6])])
    verdicts = []
    for refusals in (0, 2):
        worker = Verifier(backend(), vocab_size=VOCAB, hardware=Refusing(refusals))
        worker.handle(opened(1, rule=rule, seed=5, tokens=(1, 2, 3), prompt_length=1, presence_penalty=0.5))
        verdicts.append(answer(worker, message))
    assert [(each.kept.tolist(), each.next.tolist()) for each in verdicts[:1]] * 2 == [
        (each.kept.tolist(), each.next.tolist()) for each in verdicts
    ]
    assert verdicts[1].steps == (1, 0, 2)
    worker = Verifier(backend(), vocab_size=VOCAB, hardware=Refusing(3))
    worker.handle(opened(1, rule=rule))
    (failed,) = worker.handle(message)
    assert isinstance(failed, Failed)
    assert "too slow" in failed.reason


def test_a_prefill_chunk_yields_no_token() -> None:
    """Where nothing is due, kept is 0 and next is -1; the next chunk finds its KV."""
    model = backend()
    worker = Verifier(model, vocab_size=VOCAB)
    worker.handle(opened(1, temperature=0))
    first = answer(worker, verify([Part(1, 0, [1, 2, 3], [5, 9], due=False)]))
    assert (first.kept.tolist(), first.next.tolist()) == ([0], [-1])
    second = answer(worker, verify([Part(1, 3, [4, 5], [5, 9])]))
    assert second.next.tolist() == greedy(model, [1, 2, 3, 4, 5], 1)


@pytest.mark.parametrize("rule", RULES)
def test_a_greedy_chain_stays_as_far_as_it_is_the_targets_own(rule: str) -> None:
    """At temperature 0 every rule keeps the target's own continuation and corrects the first other token."""
    model = backend()
    worker = Verifier(model, vocab_size=VOCAB)
    worker.handle(opened(1, temperature=0, rule=rule))
    own = greedy(model, [1, 2], 4)
    for wrong in range(4):
        chain = own[:3]
        if wrong < 3:
            chain[wrong] = (chain[wrong] + 1) % VOCAB
        verdict = answer(worker, verify([Part(1, 0, [1, 2], [3, 4, 5], chain=chain)]))
        assert (verdict.kept.tolist(), verdict.next.tolist()) == ([wrong], [own[wrong]])


def test_the_host_sees_one_ragged_forward_with_logits_only_where_due() -> None:
    """Prefill and decode rows share a forward; wanted are the last feed token and the chain of due rows."""
    model = backend()
    worker = Verifier(model, vocab_size=VOCAB)
    for row in (1, 2, 3):
        worker.handle(opened(row))
    parts = [
        Part(1, 0, [1, 2, 3], [0], due=False),
        Part(2, 0, [4, 5], [1, 2], chain=[6, 0, 1]),
        Part(3, 0, [6], [3]),
    ]
    model.forwards.clear()
    answer(worker, verify(parts))
    (batch,) = model.forwards
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 6, 0, 1, 6]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0]
    assert batch.offsets.tolist() == [0, 3, 8, 9]
    assert batch.wanted.tolist() == [4, 5, 6, 7, 8]
    assert batch.tables.tolist() == [[0, 0], [1, 2], [3, 0]]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 0.8, 0), (1.3, 1.0, 3)])
def test_plain_sampling_draws_with_the_noise_of_the_absolute_position(
    rule: str, temperature: float, top_p: float, top_k: int
) -> None:
    """Without a chain the next token is the processed dist's draw, or race, keyed by seed, branch and its position."""
    model = backend()
    worker = Verifier(model, vocab_size=VOCAB)
    for seed in range(40):
        branch = seed % 3
        worker.handle(
            opened(seed, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, rule=rule, branch=branch)
        )
        verdict = answer(worker, verify([Part(seed, 0, [1, 2, 3], [7])]))
        settings = (torch.tensor([temperature]), torch.tensor([top_p]), torch.tensor([top_k]))
        dist = process(model.logits[2, 3][None], *settings, VOCAB)
        key = torch.tensor([seed]), torch.tensor([3]), torch.tensor([branch])
        if rule == "coupled":
            expected = race(dist, token_keys(*key))
        else:
            expected = draw(dist, uniform(key[0], Purpose.CHOOSE, *key[1:]))
        assert verdict.next.tolist() == expected.tolist()


def test_a_rule_that_is_not_there_fails_its_round() -> None:
    """A row that was opened with an unknown rule is refused in words."""
    worker = Verifier(backend(), vocab_size=VOCAB)
    worker.handle(opened(1, rule="synthetic"))
    (reply,) = worker.handle(verify([Part(1, 0, [1], [0])]))
    assert isinstance(reply, Failed)
    assert "synthetic" in reply.reason


def test_made_up_acceptance_counts_at_temperature_0_too() -> None:
    """Under `synthetic` a greedy row does not skip the rule: its wrong chain is kept as configured."""
    worker = Verifier(backend(), vocab_size=VOCAB, engine=EngineConfig(synthetic_acceptance=(1.0, 1.0)))
    worker.handle(opened(1, rule="synthetic", temperature=0))
    own = greedy(backend(), [1], 3)
    wrong = [(token + 1) % VOCAB for token in own]
    assert answer(worker, verify([Part(1, 0, [1], [0], chain=wrong)])).kept.tolist() == [2]


def mixed_parts(count: int) -> tuple[list, list[Part], torch.Tensor]:
    """Rows of every rule, temperature and chain length, and the draft dists that they name."""
    generator = torch.Generator().manual_seed(1)
    dist = torch.softmax(torch.randn(4 * count, VOCAB, generator=generator), -1)
    rounded = dist.half()
    opens, parts = [], []
    for r in range(count):
        length = r % 5
        opens.append(opened(r, temperature=(r % 3) * 0.7, top_p=(1.0, 0.8)[r % 2], rule=RULES[r % len(RULES)], seed=r))
        feed = torch.randint(VOCAB, (1 + r % 3,), generator=generator).tolist()
        chain = torch.randint(VOCAB, (length,), generator=generator).tolist()
        rows = [4 * r + j if (r + j) % 4 else -1 for j in range(length)]
        parts.append(Part(r, 0, feed, [2 * r, 2 * r + 1], chain=chain, dist_rows=rows, due=r % 7 != 6 or length > 0))
    return opens, parts, rounded


def test_a_mixed_batch_says_of_each_row_what_the_row_alone_gets() -> None:
    """Rules, temperatures, filters, ragged chains, prefill rows and dists of one batch do not touch each other."""
    opens, parts, rounded = mixed_parts(100)
    worker = Verifier(backend(), vocab_size=VOCAB)
    for message in opens:
        worker.handle(message)
    dists = wire.encode_sparse(*wire.sparsify(rounded.float(), VOCAB))
    together = answer(worker, verify(parts, dists))
    for r, part in enumerate(parts):
        alone = answer(worker, verify([part], dists))
        assert (alone.kept[0], alone.next[0]) == (together.kept[r], together.next[r])
    assert together.rows.tolist() == list(range(100))
    assert len(set(together.kept.tolist())) > 2


def test_sparse_and_dense_dists_give_the_same_verdicts() -> None:
    """The form in which draft dists are shipped does not matter."""
    opens, parts, rounded = mixed_parts(100)
    worker = Verifier(backend(), vocab_size=VOCAB)
    for message in opens:
        worker.handle(message)
    verdicts = [
        answer(worker, verify(parts, dists))
        for dists in (wire.encode_sparse(*wire.sparsify(rounded.float(), 64)), wire.encode_dense(rounded))
    ]
    assert verdicts[0].kept.tolist() == verdicts[1].kept.tolist()
    assert verdicts[0].next.tolist() == verdicts[1].next.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_beyond_the_shared_vocabulary_are_never_chosen(temperature: float) -> None:
    """Padding ids of the target's head are not put out, however large their logits."""
    table = torch.zeros(VOCAB, VOCAB, VOCAB)
    table[..., 5:] = 50
    model = TableBackend(table)
    model.allocate(8, 4)
    worker = Verifier(model, vocab_size=5)
    for seed in range(20):
        worker.handle(opened(seed, temperature=temperature, seed=seed))
        assert answer(worker, verify([Part(seed, 0, [1], [0], chain=[2])])).next[0] < 5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_name_their_row_alone(bad: float, temperature: float) -> None:
    """One row's broken logits are that row's fault; sent again without it, the others get their verdict."""
    model = backend()
    model.logits[2, 3, 4] = bad
    worker = Verifier(model, vocab_size=VOCAB)
    parts = [Part(1, 0, [1, 1], [0], chain=[1]), Part(2, 0, [2, 3], [1]), Part(3, 0, [1, 1, 4], [2], due=False)]
    for part in parts:
        worker.handle(opened(part.row, temperature=temperature))
    (reply,) = worker.handle(verify(parts))
    assert isinstance(reply, Failed)
    assert reply.rows.tolist() == [2]
    assert "finite" in reply.reason
    answer(worker, verify([parts[0], parts[2]], number=2))


def test_minus_infinity_in_logits_is_an_impossible_id() -> None:
    """A model may exclude ids by -inf."""
    model = backend()
    model.logits[..., 3:] = -torch.inf
    worker = Verifier(model, vocab_size=VOCAB)
    worker.handle(opened(1))
    assert answer(worker, verify([Part(1, 0, [1], [0], chain=[2, 1])])).next[0] < 3


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (Part(9, 0, [1], [1]), "not open"),
        (Part(2, 0, [1], [1], epoch=4), "epoch"),
        (Part(2, 0, [], [1]), "empty feed"),
        (Part(2, -1, [1], [1]), "position"),
        (Part(2, 0, [VOCAB], [1]), "vocabulary"),
        (Part(2, 0, [1], [1], chain=[-1]), "vocabulary"),
        (Part(2, 0, [1], [1], chain=[1], dist_rows=[0]), "dists"),
        (Part(2, 0, [1], [1], chain=[1], due=False), "due"),
    ],
)
def test_a_row_that_cannot_be_served_is_named(part: Part, reason: str) -> None:
    """Each fault of a row names that row and says why; nothing is raised, and nothing computed."""
    model = backend()
    worker = Verifier(model, vocab_size=VOCAB)
    for row in (1, 2):
        worker.handle(opened(row))
    (reply,) = worker.handle(verify([Part(1, 0, [1], [0]), part]))
    assert isinstance(reply, Failed)
    assert reply.rows.tolist() == [part.row]
    assert reason in reply.reason
    assert not model.forwards


@pytest.mark.parametrize(
    ("part", "parents", "enough"),
    [
        (Part(2, 0, [1, 2], [1], chain=[3, 4]), (), True),
        (Part(2, 0, [1, 2], [1], chain=[3, 4, 5]), (), False),
        (Part(2, 0, [1, 2, 3, 4, 5], [1, 2], due=False), (), True),
        (Part(2, 0, [1, 2, 3, 4, 5], [1], due=False), (), False),
        (Part(2, 3, [4], [1]), (), True),
        (Part(2, 3, [4], [1], chain=[5]), (), False),
        (Part(2, 0, [1], []), (), False),
        (Part(2, 0, [1, 2], [1, 2], chain=[3, 4, 5]), (-1, -1, 0), True),
        (Part(2, 0, [1, 2], [1], chain=[3, 4, 5]), (-1, -1, 0), False),
    ],
)
def test_a_table_covers_feed_and_drafted_tokens_or_its_row_is_refused_alone(
    part: Part, parents: tuple[int, ...], enough: bool
) -> None:
    """In blocks of 4; each node of a tree takes a position. Nothing is computed, and the other row can go on."""
    model = backend()
    worker = Verifier(model, vocab_size=VOCAB, engine=EngineConfig(block_tokens=4))
    for row in (1, 2):
        worker.handle(opened(row, temperature=0))
    if part.start:
        answer(worker, verify([Part(2, 0, [1, 2, 3, 4][: part.start], [1])]))
    model.forwards.clear()
    other = Part(1, 0, [1], [0])
    message = replace(verify([other, part], number=5), parents=np.array(parents, dtype=np.int32))
    (reply,) = worker.handle(message)
    assert isinstance(reply, Verdict) == enough
    if not enough:
        assert isinstance(reply, Failed)
        assert (reply.batch, reply.rows.tolist()) == (5, [2])
        assert "blocks for" in reply.reason
        assert not model.forwards
    answer(worker, verify([other], number=6))


def test_a_batch_that_raises_fails_without_naming_rows() -> None:
    """A missing history, columns that do not add up and unknown messages become Failed, never exceptions."""
    worker = Verifier(backend(), vocab_size=VOCAB)
    worker.handle(opened(1))
    hole = verify([Part(1, 3, [1], [0])], number=8)
    short = verify([Part(1, 0, [1], [0])], number=9)
    object.__setattr__(short, "feed_lengths", np.array([2], dtype=np.int32))
    for message, batch in ((hole, 8), (short, 9), (Beat(0, False), -1)):
        (reply,) = worker.handle(message)
        assert isinstance(reply, Failed)
        assert (reply.batch, reply.rows.tolist()) == (batch, [])
        assert reply.reason


def test_a_second_open_replaces_the_first_and_close_forgets() -> None:
    """Open is idempotent by row and takes the newest epoch; a closed row is unknown."""
    worker = Verifier(backend(), vocab_size=VOCAB)
    worker.handle(opened(1, epoch=0))
    worker.handle(opened(1, epoch=1, temperature=0))
    assert isinstance(worker.handle(verify([Part(1, 0, [1], [0])]))[0], Failed)
    answer(worker, verify([Part(1, 0, [1], [0], epoch=1)]))
    worker.handle(Close(1))
    assert isinstance(worker.handle(verify([Part(1, 0, [1], [0], epoch=1)]))[0], Failed)
