"""What rules say in single cases."""

import pytest
import torch

from specserve import folders
from specserve.sampling.dists import one_hot
from specserve.verification import RuleNoise, exact, rejection
from specserve.verification._chain import judge_greedy

DRAFT = torch.tensor([[[0.5, 0.3, 0.2], [0.6, 0.2, 0.2]]])
TARGET = torch.tensor([[[0.3, 0.3, 0.4], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]])


def say(accept: list[float], choose: float, *, target=TARGET, draft=DRAFT, tokens=(0, 0), length=2) -> tuple[int, int]:
    depth = len(tokens)
    noise = RuleNoise(
        torch.tensor([accept], dtype=torch.float64), torch.full((1, depth + 1), choose, dtype=torch.float64)
    )
    kept, following = rejection.judge(target, draft, torch.tensor([tokens]), torch.tensor([length]), noise)
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


def test_equal_dists_always_accept() -> None:
    """Where draft and target are one dist, the largest possible noise still accepts."""
    dist = torch.softmax(torch.randn(1, 2, 50), -1)
    largest = 1 - 2.0**-53
    assert say([largest], largest, target=dist, draft=dist[:, :1], tokens=(7,), length=1)[0] == 1


def test_a_token_impossible_to_both_is_refused() -> None:
    """target 0 and draft 0 refuse, even with noise 0, and nothing impossible comes out instead."""
    dist = torch.tensor([[[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]])
    for choose in (0.0, 0.6, 1 - 2.0**-53):
        kept, following = say([0.0], choose, target=dist, draft=dist[:, :1], tokens=(2,), length=1)
        assert kept == 0
        assert following in (0, 1)


def test_an_empty_chain_is_plain_sampling() -> None:
    """K = 0: nothing is kept and the next token is the target's."""
    assert say([], 0.5, target=TARGET[:, :1], draft=DRAFT[:, :0], tokens=(), length=0) == (0, 1)


@pytest.mark.parametrize("name", folders.names_in("verification"))
def test_what_stands_past_a_rows_length_has_no_influence(name: str) -> None:
    """A ragged batch says of each row what the row alone would get."""
    judge = folders.load("verification", name).judge
    generator = torch.Generator().manual_seed(3)
    rows, depth, vocab = 64, 4, 6
    target = torch.softmax(torch.randn(rows, depth + 1, vocab, generator=generator), -1)
    draft = torch.softmax(torch.randn(rows, depth, vocab, generator=generator), -1)
    tokens = torch.randint(vocab, (rows, depth), generator=generator)
    lengths = torch.randint(depth + 1, (rows,), generator=generator)
    noise = RuleNoise(
        torch.rand(rows, depth, generator=generator).double(), torch.rand(rows, depth + 1, generator=generator).double()
    )
    kept, following = judge(target, draft, tokens, lengths, noise)
    for r, length in enumerate(lengths.tolist()):
        alone = judge(
            target[r : r + 1, : length + 1],
            draft[r : r + 1, :length],
            tokens[r : r + 1, :length],
            lengths[r : r + 1],
            RuleNoise(noise.accept[r : r + 1, :length], noise.choose[r : r + 1, : length + 1]),
        )
        assert (int(kept[r]), int(following[r])) == (int(alone[0]), int(alone[1]))


@pytest.mark.parametrize("name", folders.names_in("verification"))
def test_every_rule_on_a_one_hot_target_is_the_greedy_walk(name: str) -> None:
    """Greedy rows may skip their dists: each rule says the same of a one-hot target as `judge_greedy`."""
    judge = folders.load("verification", name).judge
    generator = torch.Generator().manual_seed(4)
    rows, depth, vocab = 400, 3, 3
    choices = torch.randint(vocab, (rows, depth + 1), generator=generator)
    tokens = torch.randint(vocab, (rows, depth), generator=generator)
    lengths = torch.randint(depth + 1, (rows,), generator=generator)
    draft = torch.softmax(torch.randn(rows, depth, vocab, generator=generator), -1)
    noise = RuleNoise(
        torch.rand(rows, depth, generator=generator).double(), torch.rand(rows, depth + 1, generator=generator).double()
    )
    target = one_hot(choices.flatten(), vocab).view(rows, depth + 1, vocab)
    expected = judge_greedy(choices, tokens, lengths)
    for shipped in (draft, one_hot(tokens.flatten(), vocab).view(rows, depth, vocab)):
        kept, following = judge(target, shipped, tokens, lengths, noise)
        assert torch.equal(kept, expected[0])
        assert torch.equal(following, expected[1])


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


def test_exact_depends_on_the_target_alone() -> None:
    """The same noise and target dists give the same tokens, whatever was drafted."""
    generator = torch.Generator().manual_seed(5)
    target = torch.softmax(torch.randn(1, 1, 4, generator=generator), -1).expand(1, 4, 4)
    choose = torch.rand(1, 4, generator=generator).double()
    no_noise = torch.zeros(1, 0).double()
    plain = exact.judge(
        target[:, :1], target[:, :0], torch.empty(1, 0).long(), torch.tensor([0]), RuleNoise(no_noise, choose[:, :1])
    )[1]
    for tokens in ([0, 0, 0], [int(plain), 1, 2], [3, 3, 3]):
        kept, following = exact.judge(
            target, target[:, :0], torch.tensor([tokens]), torch.tensor([3]), RuleNoise(no_noise, choose)
        )
        assert [*tokens[: int(kept)], int(following)][0] == int(plain)
