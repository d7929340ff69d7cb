"""What rules say in single cases."""

import pytest
import torch
from rule_proofs import rule_noise

from specserve.config import EngineConfig
from specserve.sampling.dists import one_hot
from specserve.sampling.noise import token_keys
from specserve.sampling.race import race
from specserve.verification import (
    FixedNoise,
    RuleNoise,
    all_rules,
    block,
    coupled,
    exact,
    judges_of,
    rejection,
    typical,
)
from specserve.verification._chain import judge_greedy
from specserve.verification._draft_rows import DraftRows

DRAFT = torch.tensor([[[0.5, 0.3, 0.2], [0.6, 0.2, 0.2]]])
TARGET = torch.tensor([[[0.3, 0.3, 0.4], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]])


JUDGES = judges_of(EngineConfig(synthetic_acceptance=(0.9, 0.5, 0.2)))
RATIO_JUDGES = {"rejection": rejection.judge, "block": block.judge}


def random_noise(rows: int, depth: int, generator: torch.Generator) -> RuleNoise:
    keys = torch.randint(-(2**31), 2**31, (rows, depth + 1, 4), generator=generator).int()
    accept, choose = (torch.rand(rows, count, generator=generator).double() for count in (depth, depth + 1))
    return FixedNoise(accept, choose, keys)


def say(
    accept: list[float], choose: float, *, target=TARGET, draft=DRAFT, tokens=(0, 0), length=2, judge=rejection.judge
) -> tuple[int, int]:
    depth = len(tokens)
    noise = rule_noise(
        torch.tensor([accept], dtype=torch.float64), torch.full((1, depth + 1), choose, dtype=torch.float64)
    )
    ids = torch.tensor([tokens], dtype=torch.int64)
    kept, following = judge(target, DraftRows.whole(draft), ids, torch.tensor([length]), noise)
    return int(kept), int(following)


def test_both_drafted_tokens_stay_and_the_bonus_is_the_targets() -> None:
    """With noise below both ratios the chain is kept; the bonus follows the last target row [.2 .2 .6]."""
    assert [say([0.5, 0.1], u) for u in (0.1, 0.3, 0.5)] == [(2, 0), (2, 1), (2, 2)]


def test_a_refused_first_token_is_replaced_from_what_is_left_over() -> None:
    """Noise .7 refuses the first token; the rest of the target over the draft is all on token 2."""
    assert [say([0.7, 0.1], u) for u in (0.0, 0.5, 0.999)] == [(0, 2)] * 3


def test_a_refused_second_token_is_replaced_from_its_own_row() -> None:
    """Noise .2 refuses the second token; the rest is all on token 1."""
    assert [say([0.5, 0.2], u) for u in (0.0, 0.5, 0.999)] == [(1, 1)] * 3


@pytest.mark.parametrize("judge", RATIO_JUDGES.values(), ids=RATIO_JUDGES)
def test_equal_dists_always_accept(judge) -> None:
    """Where draft and target are one dist, the largest possible noise still accepts."""
    dist = torch.softmax(torch.randn(1, 2, 50, generator=torch.Generator().manual_seed(0)), -1)
    largest = 1 - 2.0**-53
    assert say([largest], largest, target=dist, draft=dist[:, :1], tokens=(7,), length=1, judge=judge)[0] == 1


@pytest.mark.parametrize("judge", RATIO_JUDGES.values(), ids=RATIO_JUDGES)
def test_a_token_impossible_to_both_is_refused(judge) -> None:
    """target 0 and draft 0 refuse, even with noise 0, and nothing impossible comes out instead."""
    dist = torch.tensor([[[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]])
    for choose in (0.0, 0.6, 1 - 2.0**-53):
        kept, following = say([0.0], choose, target=dist, draft=dist[:, :1], tokens=(2,), length=1, judge=judge)
        assert kept == 0
        assert following in (0, 1)


@pytest.mark.parametrize("judge", RATIO_JUDGES.values(), ids=RATIO_JUDGES)
def test_an_empty_chain_is_plain_sampling(judge) -> None:
    """K = 0: nothing is kept and the next token is the target's."""
    assert say([], 0.5, target=TARGET[:, :1], draft=DRAFT[:, :0], tokens=(), length=0, judge=judge) == (0, 1)


def test_the_longest_block_that_passes_is_kept() -> None:
    """Target [.6 .3 .1], draft [.5 .4 .1], drafts (1, 0): weights .75 and .9, so .89 keeps both, .91 none."""
    target, draft = torch.tensor([[[0.6, 0.3, 0.1]] * 3]), torch.tensor([[[0.5, 0.4, 0.1]] * 2])
    cases = {0.89: 2, 0.91: 0}
    for second, kept in cases.items():
        assert say([0.99, second], 0.5, target=target, draft=draft, tokens=(1, 0), judge=block.judge)[0] == kept
    # Drafts (1, 1): weights .75 and .5625; drafts (0, 1): the first alone passes for sure, both with .75.
    assert say([0.0, 0.57], 0.5, target=target, draft=draft, tokens=(1, 1), judge=block.judge)[0] == 0
    assert say([0.999, 0.76], 0.5, target=target, draft=draft, tokens=(0, 1), judge=block.judge)[0] == 1


def random_case(rows: int, depth: int, vocab: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    target = torch.softmax(torch.randn(rows, depth + 1, vocab, generator=generator), -1)
    draft = torch.softmax(torch.randn(rows, depth, vocab, generator=generator), -1)
    tokens = torch.randint(vocab, (rows, depth), generator=generator)
    lengths = torch.randint(depth + 1, (rows,), generator=generator)
    return target, draft, tokens, lengths, random_noise(rows, depth, generator)


@pytest.mark.parametrize("name", JUDGES)
def test_what_stands_past_a_rows_length_has_no_influence(name: str) -> None:
    """A ragged batch says of each row what the row alone would get."""
    judge = JUDGES[name]
    target, draft, tokens, lengths, noise = random_case(64, 4, 6, seed=3)
    kept, following = judge(target, DraftRows.whole(draft), tokens, lengths, noise)
    for r, length in enumerate(lengths.tolist()):
        row = slice(r, r + 1)
        alone = judge(
            target[row, : length + 1],
            DraftRows.whole(draft[row, :length]),
            tokens[row, :length],
            lengths[row],
            FixedNoise(noise.accept[row, :length], noise.choose[row, : length + 1], noise.keys[row, : length + 1]),
        )
        assert (int(kept[r]), int(following[r])) == (int(alone[0]), int(alone[1]))


@pytest.mark.parametrize("name", [name for name in JUDGES if all_rules()[name].GREEDY_WALK])
def test_every_rule_on_a_one_hot_target_is_the_greedy_walk(name: str) -> None:
    """Greedy rows may skip their dists: each rule says the same of a one-hot target as `judge_greedy`."""
    rows, depth, vocab = 400, 3, 3
    _, draft, tokens, lengths, noise = random_case(rows, depth, vocab, seed=4)
    choices = torch.randint(vocab, (rows, depth + 1), generator=torch.Generator().manual_seed(4))
    target = one_hot(choices.flatten(), vocab).view(rows, depth + 1, vocab)
    expected = judge_greedy(choices, tokens, lengths)
    for shipped in (DraftRows.whole(draft), DraftRows.certain(tokens)):
        kept, following = JUDGES[name](target, shipped, tokens, lengths, noise)
        assert torch.equal(kept, expected[0])
        assert torch.equal(following, expected[1])


@pytest.mark.parametrize("name", JUDGES)
def test_sparse_and_dense_draft_rows_are_judged_alike(name: str) -> None:
    """Dists by the ids that have mass, padded and in any order, say what whole dists say."""
    target, draft, tokens, lengths, noise = random_case(300, 3, 40, seed=6)
    target, draft = ((0.05 * dists + 0.95 * dists**8) for dists in (target, target[:, :-1] + draft / 20))
    target, draft = (dists / dists.sum(-1, keepdim=True) for dists in (target, draft))
    draft = torch.where(draft >= draft.topk(5, -1).values[..., -1:], draft, 0)
    draft /= draft.sum(-1, keepdim=True)
    tokens = torch.where(tokens % 2 == 0, draft.argmax(-1), tokens)
    probs, ids = draft.topk(8, -1)
    sparse = DraftRows(torch.where(probs > 0, ids, 0), probs)
    assert sparse.probs[..., 5:].max() == 0
    verdicts = [JUDGES[name](target, rows, tokens, lengths, noise) for rows in (DraftRows.whole(draft), sparse)]
    assert torch.equal(verdicts[0][0], verdicts[1][0])
    assert torch.equal(verdicts[0][1], verdicts[1][1])
    assert len(set(verdicts[0][0].tolist())) > 1


def test_a_refused_token_of_equal_dists_falls_back_to_the_target() -> None:
    """Where rounding refuses a token and nothing is left over, the next one is drawn from the target's own dist."""
    target = torch.tensor([[[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]]])
    heavier = torch.tensor([[[0.25, 0.7500001, 0.0]]])
    found = {
        say([1 - 2.0**-53], u, target=target, draft=heavier, tokens=(1,), length=1)[1] for u in (0.0, 0.2, 0.3, 0.99)
    }
    assert found == {0, 1}


@pytest.mark.parametrize(
    ("drafts", "choices", "output"),
    [
        ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]),
        ([1, 2, 3], [1, 5, 3, 9], [1, 5]),
        ([1, 2], [1, 2, 5], [1, 2, 5]),
        ([3], [3, 4], [3, 4]),
        ([], [5], [5]),
        ([1, 2, 3], [1, 2, 7, 6], [1, 2, 7]),
        ([4, 5, 6], [4, 8, 6, 9], [4, 8]),
    ],
)
def test_the_greedy_walk_keeps_while_equal(drafts: list[int], choices: list[int], output: list[int]) -> None:
    """At temperature 0 drafted tokens stay up to the first one that is not the target's choice."""
    kept, following = judge_greedy(
        torch.tensor([choices]), torch.tensor([drafts], dtype=torch.int64), torch.tensor([len(drafts)])
    )
    assert [*drafts[: int(kept)], int(following)] == output


def test_coupled_puts_out_the_targets_own_picks() -> None:
    """Whatever is drafted, each token that comes out is the winner of the target's race at its position."""
    target, draft, tokens, lengths, noise = random_case(500, 3, 5, seed=7)
    own = race(target.flatten(0, 1), noise.keys.flatten(0, 1)).view(500, 4)
    tokens[::2] = own[::2, :3]
    kept, following = coupled.judge(target, DraftRows.whole(draft), tokens, lengths, noise)
    for r in range(500):
        out = [*tokens[r, : kept[r]].tolist(), int(following[r])]
        assert out == own[r, : len(out)].tolist()
    assert torch.equal(kept[::2], lengths[::2])


def test_coupled_drafts_agree_as_often_as_the_theory_says() -> None:
    """Picks agree with at least (1 - d) / (1 + d), d the total variation distance, and at most 1 - d."""
    rows = 20_000
    keys = token_keys(torch.arange(rows), torch.full((rows,), 9))
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        target, draft = torch.softmax(torch.randn(2, 12, generator=generator), -1)
        distance = float((target - draft).abs().sum()) / 2
        share = float((race(target.expand(rows, -1), keys) == race(draft.expand(rows, -1), keys)).double().mean())
        assert (1 - distance) / (1 + distance) - 0.01 < share < 1 - distance + 0.01


def test_typical_keeps_what_is_likely_for_an_uncertain_target() -> None:
    """A flat target of 100 ids keeps any of them; a sharp one only what is above the floor."""
    flat, sharp = torch.full((100,), 0.01), torch.tensor([0.95, 0.05] + [0.0] * 98)
    noise = random_noise(1, 1, torch.Generator().manual_seed(0))
    for dist, token, expected in ((flat, 50, 1), (sharp, 0, 1), (sharp, 1, 0), (sharp, 2, 0)):
        target, tokens = dist.expand(1, 2, 100), torch.tensor([[token]])
        kept, _ = typical.judge(target, DraftRows.certain(tokens), tokens, torch.tensor([1]), noise)
        assert int(kept) == expected


def test_synthetic_keeps_at_the_configured_rates() -> None:
    """Shares .9, .5, .2 are kept to within a hundredth, and nothing beyond them, whatever was drafted."""
    rows = 20_000
    target, draft, tokens, _, noise = random_case(rows, 4, 3, seed=8)
    kept, following = JUDGES["synthetic"](target, DraftRows.whole(draft), tokens, torch.full((rows,), 4), noise)
    shares = [float((kept > j).double().mean()) for j in range(4)]
    assert shares == pytest.approx([0.9, 0.5, 0.2, 0.0], abs=0.01)
    assert len(set(following.tolist())) == 3
    for rate, expected in ((1.0, 1), (0.0, 0)):
        judge = judges_of(EngineConfig(synthetic_acceptance=(rate,)))["synthetic"]
        kept, _ = judge(target, DraftRows.whole(draft), tokens, torch.full((rows,), 4), noise)
        assert set(kept.tolist()) == {expected}


@pytest.mark.parametrize("judge", [exact.judge, coupled.judge])
def test_the_first_token_depends_on_the_target_alone(judge) -> None:
    """The same noise and target dists give the same tokens, whatever was drafted."""
    generator = torch.Generator().manual_seed(5)
    target = torch.softmax(torch.randn(1, 1, 4, generator=generator), -1).expand(1, 4, 4)
    noise = random_noise(1, 3, generator)
    none = torch.empty(1, 0, dtype=torch.int64)
    alone = FixedNoise(noise.accept[:, :0], noise.choose[:, :1], noise.keys[:, :1])
    plain = int(judge(target[:, :1], DraftRows.certain(none), none, torch.tensor([0]), alone)[1])
    for drafted in ([0, 0, 0], [plain, 1, 2], [3, 3, 3]):
        tokens = torch.tensor([drafted])
        kept, following = judge(target, DraftRows.certain(tokens), tokens, torch.tensor([3]), noise)
        assert [*drafted[: int(kept)], int(following)][0] == plain
