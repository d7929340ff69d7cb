"""What an adaptive depth is worth on a made-up machine in the long run, whatever the seed; see `pretended_rounds`."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from pretended_rounds import Kind, Machine, Phase, Pretended, against_best, against_plain

from specserve.coordinator.adaptive_depth import AdaptiveDepth, DraftTiming
from specserve.coordinator.chain import Chain
from specserve.coordinator.depth import Checked, FixedDepth
from specserve.coordinator.guess_chances import GuessChances
from specserve.coordinator.scheduler import TargetRow
from specserve.tree_shape import TreeShape
from specserve.types import RoundStats, RowId, Sampling

GREEDY = Kind(((0.45, 0.16, 0.08), (0.4, 0.14, 0.07), (0.4, 0.14, 0.07)))
SAMPLED = Kind(((0.15, 0.05, 0.03),) * 3, temperature=1.0)
SURE = Kind(((0.55,),) * 3, sure=True)
BOASTING = Kind(((0.55,),) * 3, sure=True, claimed=0.4)
SURE_AND_DRAWN = Kind(((0.55,),) * 3, sure=True, temperature=1.0)
RARELY_SURE = Kind(((0.3,),) * 3, sure=True)
HOPELESS_BUT_SURE = Kind(((0.05,), (0.05,), (0.05,)), sure=True, claimed=0.2)
HOPELESS = Kind(((0.02, 0.01, 0.01),) * 3)

CPU = Machine(  # nine positions cost a quarter more than one, and each of those beyond a thirteenth
    lambda positions: 18 * (1 + 0.035 * min(positions - 1, 8) + 0.075 * max(0, positions - 9)),
    lambda tokens: 0.65 + 0.04 * tokens,
)
TREE = TreeShape(None, 3, 6)
SEEDS = range(4)


def chats(kind, rounds, count):
    """One after the other."""
    return [Phase([kind], rounds)] * count


PAYING = {
    "one greedy chat at a time": chats(GREEDY, 40, 24),
    "short sampled answers before a long greedy one": [*chats(SAMPLED, 25, 5), *chats(GREEDY, 250, 1)] * 3,
    "sampled and greedy in turn": [*chats(SAMPLED, 40, 1), *chats(GREEDY, 40, 1)] * 12,
    "two at once": [Phase([GREEDY] * 2, 100)] * 8,
}
IN_VAIN = {
    "eight greedy ones at once": [Phase([GREEDY] * 8, 150)] * 6,
    "eight sampled ones at once": [Phase([SAMPLED] * 8, 150)] * 6,
    "one after the other whose drafts are never kept": chats(HOPELESS, 150, 6),
}


def lives(phases, **fields):
    """The accounts of the same phases in several lives."""
    return [Pretended(CPU, seed, **fields).run(phases) for seed in SEEDS]


@pytest.mark.parametrize("shape", [None, TREE], ids=["chains", "trees"])
@pytest.mark.parametrize("case", PAYING)
def test_where_drafting_pays_it_makes_nine_tenths_of_the_best_fixed_size_at_least(case, shape):
    """Of each phase's own, in hindsight, the start of its life included, where that is 1.1 times plain decoding."""
    for accounts in lives(PAYING[case], shape=shape):
        assert against_best([each for each in accounts if each.gain >= 1.1]) >= 0.9
        assert against_plain(accounts) >= 1.08


@pytest.mark.parametrize("shape", [None, TREE], ids=["chains", "trees"])
@pytest.mark.parametrize("case", IN_VAIN)
def test_where_it_does_not_pay_next_to_nothing_is_lost(case, shape):
    """Against plain decoding: 0.95 in each life, and 0.97 behind the first phase on average."""
    later = []
    for accounts in lives(IN_VAIN[case], shape=shape):
        assert against_plain(accounts) >= 0.95
        later.append(against_plain(accounts[1:]))
    assert sum(later) / len(later) >= 0.97


@pytest.mark.parametrize("kind", [HOPELESS, HOPELESS_BUT_SURE], ids=["silent", "sure"])
def test_trials_pay_for_what_the_draft_has_to_read_before_them(kind):
    """Prompts that take the draft as long as two rounds take the target: 0.97, as where there is nothing to read."""
    reading, phases = replace(CPU, unread_ms=40.0), [Phase([kind] * 8, 150)] * 6
    for seed in SEEDS:
        assert against_plain(Pretended(reading, seed, shape=TREE).run(phases)[1:]) >= 0.97


@pytest.mark.parametrize("shape", [None, TREE], ids=["chains", "trees"])
@pytest.mark.parametrize("kind", [SURE, BOASTING, SURE_AND_DRAWN], ids=["sure", "boasting", "drawn"])
def test_with_drafts_that_say_how_sure_they_are_eight_at_once_lose_nothing(kind, shape):
    """Where the best fixed size hardly makes more than plain decoding: what is checked are the surest tokens only.

    Whatever the draft claims, 0.98 in each life, and 0.99 on average: gains with many are not believed at once.
    """
    found = []
    for accounts in lives([Phase([kind] * 8, 150)] * 6, shape=shape):
        assert max(each.gain for each in accounts) < 1.12
        assert against_plain(accounts) >= 0.98
        found.append(against_plain(accounts))
    assert sum(found) / len(found) >= 0.99


def test_with_drafts_that_say_how_sure_they_are_four_at_once_gain():
    """Three of ten tokens stay: 1.05 times plain decoding on average, where taking all tokens alike makes 1.04."""
    found = [against_plain(accounts) for accounts in lives([Phase([RARELY_SURE] * 4, 100)] * 8)]
    assert min(found) >= 1.02
    assert sum(found) / len(found) >= 1.05


@pytest.mark.parametrize(("shape", "least"), [(None, 0.95), (TREE, 0.91)], ids=["chains", "trees"])
@pytest.mark.parametrize("rows", [1, 2])
def test_for_few_requests_sure_drafts_are_worth_what_others_are(rows, shape, least):
    """Most of the best fixed size, which checks everything. Trees are drafted larger than they are checked."""
    for accounts in lives([Phase([SURE] * rows, 100)] * 10, shape=shape):
        assert against_best(accounts) >= least


def test_trees_that_are_cut_where_they_are_unsure_gain_for_up_to_four_requests():
    """Twice as fast as plain decoding for one, 1.65 times for two, 1.3 times for four."""
    for rows, least in ((1, 2.0), (2, 1.65), (4, 1.3)):
        for accounts in lives([Phase([SURE] * rows, 100)] * 8, shape=TREE):
            assert against_plain(accounts) >= least


@pytest.mark.parametrize(("kind", "least"), [(Kind(((0.8,),) * 3, sure=True), 1.15), (HOPELESS_BUT_SURE, 0.95)])
def test_requests_without_drafts_hide_nobody_elses(kind, least):
    """Among four of one kind are two of another class that want none: what the four say of themselves is used."""
    plain = Kind(((0.5,),) * 3, temperature=1.0, depth=0)
    for accounts in lives([Phase([kind] * 4 + [plain] * 2, 100)] * 8):
        assert against_plain(accounts) >= least


def test_a_guess_that_nobody_waits_for_may_be_as_long_as_the_depth():
    """Whatever size the model's drafts have, as long as there are any; what of it is checked is seen to later."""
    life = Pretended(CPU, 0, shape=TREE)
    states = life.come([RARELY_SURE] * 4)
    shallow = 0
    for _ in range(200):
        life.round(states)
        sizes = [life.policy.of(state) for state in states]
        if life.policy._switch.on and life.policy._levels < 3:
            shallow += 1
            assert {life.policy.guessed(state) for state in states} <= {0, 3}
        assert all(life.policy.guessed(state) >= size for state, size in zip(states, sizes, strict=True))
    assert shallow > 20


def test_a_draft_that_is_sure_and_wrong_costs_next_to_nothing():
    for accounts in lives([Phase([HOPELESS_BUT_SURE] * 8, 150)] * 6):
        assert against_plain(accounts) >= 0.95


@pytest.mark.parametrize("timing", [DraftTiming.AHEAD, DraftTiming.FREE])
def test_drafts_that_nobody_waits_for(timing):
    """Three of four are there in time: 0.9 of the best fixed size for one request, 0.97 of plain decoding for eight."""
    for accounts in lives(chats(GREEDY, 100, 8), timing=timing):
        assert against_best(accounts) >= 0.9
    for accounts in lives([Phase([GREEDY] * 8, 150)] * 6, timing=timing):
        assert against_plain(accounts) >= 0.97


@pytest.mark.parametrize("bad", [15, 100, 300])
def test_a_bad_start_is_not_believed_for_long(bad):
    """Rounds with drafts take four times as long at first, so sizes are measured dear, then given up after a few looks.

    Behind 1,500 rounds of recovery four requests have nine tenths of the best fixed size, drafting ahead.
    """
    good = Kind(((0.85,), (0.8,), (0.75,)))
    quick = Machine(lambda positions: 4 + 0.06 * positions, lambda tokens: 0.35 + 0.004 * tokens)
    slow = Machine(lambda positions: quick.verify_ms(positions) * (4 if positions > 4 else 1), quick.step_ms)
    for seed in SEEDS:
        life = Pretended(slow, seed, timing=DraftTiming.AHEAD)
        life.phase(Phase([good] * 4, bad))
        life.machine = quick
        life.phase(Phase([good] * 4, 1500))
        assert against_best([life.phase(Phase([good] * 4, 1000))]) >= 0.9


@pytest.mark.parametrize("timing", [DraftTiming.WAITED, DraftTiming.FREE])
def test_trials_that_lose_much_are_rare_however_much_they_keep(timing):
    """Verification becomes ten times as slow with drafts that are kept: behind 600 rounds plain decoding loses 5%."""
    good = Kind(((0.9,), (0.9,), (0.9,)))
    quick = Machine(lambda positions: 4 + 0.06 * positions, lambda tokens: 0.35 + 0.004 * tokens)
    slow = Machine(lambda positions: quick.verify_ms(positions) * (10 if positions > 1 else 1), quick.step_ms)
    for seed in SEEDS:
        life = Pretended(quick, seed, timing=timing)
        life.phase(Phase([good], 300))
        life.machine = slow
        life.phase(Phase([good], 600))
        assert against_plain([life.phase(Phase([good], 1500))]) >= 0.95


def test_a_draft_that_hangs_once_over_a_prompt_is_used_again():
    """Three seconds for one prompt say nothing of the next ones: nine tenths of the best fixed size behind it."""
    for seed in SEEDS:
        life = Pretended(CPU, seed)
        life.run(chats(GREEDY, 40, 10))
        life.policy.observe(life.stats(1, 41, 40, 3.050, 3.0), [])
        accounts = life.run(chats(GREEDY, 40, 30))
        assert against_best(accounts) >= 0.9


@pytest.mark.parametrize(("sampled", "greedy"), [(6, 10), (8, 8), (3, 13)])
def test_short_answers_of_two_kinds_in_turn_each_get_what_pays_for_their_kind(sampled, greedy):
    """However the looks at what pays fall: greedy ones have drafts in nine rounds of ten, whoever came before."""
    for seed in SEEDS:
        life = Pretended(CPU, seed)
        drafted, phases = 0, 60
        for phase in range(phases):
            life.phase(Phase([SAMPLED], sampled))
            life.phase(Phase([GREEDY], greedy))
            drafted += np.count_nonzero([sum(sizes) for sizes in life.sizes[-greedy:]]) if phase >= 20 else 0
        assert drafted >= 0.9 * greedy * (phases - 20)


def test_what_comes_of_drafts_made_ahead_is_learned_while_drafting():
    """Where another outcome came than was drafted for, they are not there: the share that is follows how often."""
    quick = Machine(lambda positions: 4 + 0.06 * positions, lambda tokens: 0.35 + 0.004 * tokens)
    good = Kind(((0.85,), (0.8,), (0.75,)))
    for hit in (1.0, 0.4):
        life = Pretended(quick, 1, timing=DraftTiming.AHEAD, hit=0.9)
        life.phase(Phase([good] * 4, 300))
        life.hit = hit
        life.phase(Phase([good] * 4, 500))
        assert abs(life.policy._delivered - hit) < 0.15


def test_drafts_are_soon_made_again_for_whom_they_paid_after_many_in_vain():
    """A greedy chat behind 900 rounds of a kind of requests whose drafts are never kept: on within 25 rounds."""
    in_vain = Kind(((0.02, 0.01, 0.01),) * 3, temperature=1.0, sure=True)
    for seed in SEEDS:
        life = Pretended(CPU, seed, shape=TREE)
        life.phase(Phase([SURE], 200))
        life.phase(Phase([in_vain], 900))
        assert np.count_nonzero([sum(sizes) for sizes in life.sizes[-900:]]) < 150
        states = life.come([SURE])
        for _ in range(60):
            life.round(states)
        assert np.count_nonzero([sum(sizes) for sizes in life.sizes[-60:]]) > 30


def guesses(keep, rounds, policy, chances, draw):
    """Rounds of one request that names a source: tokens offered in each, every one of them kept with this chance."""
    request = SimpleNamespace(depth=None, source="ngram", sampling=Sampling(temperature=0.0))
    fields = {"request": request, "longest": 10**6, "tokens": [], "guessed_by": "ngram"}
    state, found = SimpleNamespace(row=RowId(1), chain=Chain(), **fields), []
    for _ in range(rounds):
        policy.plan([state])
        tokens = [1] * policy.guessed(state) if policy.of(state) else []
        state.chain = Chain(tokens, sureness=[chances.of("ngram", 5)] * len(tokens))
        row = TargetRow(state, 0, 1, len(tokens), True, None, len(tokens))
        policy.offer([row])
        offer = row.draft
        kept = next((at for at in range(len(offer)) if draw.random() >= keep), len(offer))
        chances.observe("ngram", 5, len(offer), kept)
        wall_s = 0.02 * (1 + 0.03 * len(offer)) * math.exp(draw.gauss(0, 0.03))
        stats = RoundStats(1, 1 + len(offer), 0, wall_s, 0.0, 0.0, 0.0, (), (), 0, 0, 0)
        policy.observe(stats, [Checked(state.row, len(offer), kept, len(offer), None, offer.tried(kept - 1))])
        found.append(len(offer))
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_guesses_that_no_model_stands_beside_are_learned_of(seed):
    """Whole ones where they are kept, hardly any where they are not, and whole ones again when they are kept again."""
    policy, chances, draw = AdaptiveDepth(FixedDepth(6, 10**6, None), DraftTiming.WAITED), GuessChances(), Random(seed)
    assert np.mean(guesses(0.97, 300, policy, chances, draw)[100:]) > 4.5
    assert np.mean(guesses(0.02, 1200, policy, chances, draw)[900:]) < 3
    assert np.mean(guesses(0.97, 600, policy, chances, draw)[300:]) > 4.5
