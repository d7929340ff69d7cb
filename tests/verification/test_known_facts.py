"""Facts about verification that other engines test, or got wrong, on the rules of this one."""

from __future__ import annotations

import pytest
import torch
from rule_proofs import rule_noise

from specserve.sampling.dists import draw
from specserve.verification import block, exact, rejection
from specserve.verification._draft_rows import DraftRows
from specserve.verification._tree import DraftTree, follow

RATIO_JUDGES = {"rejection": rejection.judge, "block": block.judge}


def noise(rows: int, depth: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    accept, choose = (torch.rand(rows, width, generator=generator).double() for width in (depth, depth + 1))
    return rule_noise(accept, choose)


@pytest.mark.parametrize("rule", RATIO_JUDGES)
@pytest.mark.parametrize("vocab", [100, 8193, 10_000, 151_936])
def test_what_is_left_over_is_drawn_within_the_vocabulary(rule: str, vocab: int) -> None:
    """Rows padded to a round width: a refused token is replaced by an id that is there, whatever the noise."""
    rows, width = 40, -(-vocab // 1024) * 1024
    generator = torch.Generator().manual_seed(vocab)
    target, draft = (torch.nn.functional.pad(torch.rand(vocab, generator=generator), (0, width - vocab)) for _ in "td")
    target, draft = target / target.sum(), draft / draft.sum()
    tokens = (draft - target).topk(rows).indices[:, None]
    verdict_noise = noise(rows, 1, vocab)
    verdict_noise.accept[:] = 1 - 2.0**-53
    verdict_noise.choose[:5] = 1 - 2.0**-53
    kept, following = RATIO_JUDGES[rule](
        target.expand(rows, 2, -1),
        DraftRows.whole(draft.expand(rows, 1, -1)),
        tokens,
        torch.ones(rows).long(),
        verdict_noise,
    )
    assert kept.tolist() == [0] * rows
    assert following.max() < vocab
    assert (target > draft)[following].all()


@pytest.mark.parametrize("rule", [*RATIO_JUDGES, "exact"])
def test_frequencies_come_near_the_target_and_not_near_another_dist(rule: str) -> None:
    """From 100 to 40,000 tokens the distance to the target shrinks more than tenfold; to a flat dist it stays."""
    judge = RATIO_JUDGES.get(rule, exact.judge)
    generator = torch.Generator().manual_seed(1)
    target, draft = torch.softmax(torch.randn(2, 30, generator=generator), -1)
    flat = torch.full((30,), 1 / 30)
    rows = 40_000
    tokens = draw(draft.expand(rows, -1), torch.rand(rows, generator=generator))[:, None]
    drafted = DraftRows.whole(draft.expand(rows, 1, -1))
    kept, following = judge(target.expand(rows, 2, -1), drafted, tokens, torch.ones(rows).long(), noise(rows, 1))
    first = torch.where(kept > 0, tokens[:, 0], following)

    def distance(count: int, dist: torch.Tensor) -> float:
        return float((torch.bincount(first[:count], minlength=30) / count - dist).norm())

    assert distance(100, target) / distance(rows, target) > 10
    assert distance(100, flat) / distance(rows, flat) < 2


@pytest.mark.parametrize("rule", [*RATIO_JUDGES, "exact"])
def test_a_certain_target_takes_its_own_tokens_and_draws_after_them(rule: str) -> None:
    """With all mass on 1, then on 99, drafts 1 and 99 stay whatever the noise; the bonus is any id with mass."""
    judge = RATIO_JUDGES.get(rule, exact.judge)
    rows = 200
    target = torch.zeros(rows, 3, 100)
    target[:, 0, 1] = target[:, 1, 99] = 1
    target[:, 2] = 0.01
    tokens = torch.tensor([1, 99]).expand(rows, -1)
    draft = torch.full((rows, 2, 100), 0.01)
    kept, following = judge(target, DraftRows.whole(draft), tokens, torch.full((rows,), 2), noise(rows, 2))
    assert kept.tolist() == [2] * rows
    assert len(set(following.tolist())) > 50


def test_a_row_ends_where_its_drafts_end() -> None:
    """Places past a row's length hold no token, not a special one: whatever stands there, nothing after it counts."""
    target = torch.full((4, 4, 5), 0.2)
    lengths = torch.tensor([0, 1, 2, 3])
    for filler in (0, 4):
        tokens = torch.full((4, 3), filler)
        drafted = DraftRows.whole(torch.full((4, 3, 5), 0.2))
        kept, _ = rejection.judge(target, drafted, tokens, lengths, noise(4, 3))
        assert kept.tolist() == lengths.tolist()


def test_links_of_a_drafted_tree() -> None:
    """T3: parents −1 −1 0 0 1: 2 and 3 hang on 0, 4 on 1; each leaf is reached by its own path and by no other."""
    tree = DraftTree(torch.tensor([[-1, -1, 0, 0, 1]]), torch.tensor([[10, 11, 12, 13, 12]]))
    for leaf, path in {2: (10, 12), 3: (10, 13), 4: (11, 12)}.items():
        assert walked(tree, path) == (leaf, 99)
    assert walked(tree, (10, 11)) == (0, 11)
    assert walked(tree, (12, 12)) == (-1, 12)


def test_a_parent_behind_its_child_leads_nowhere() -> None:
    """Nodes are in order: a child that stands before its parent is never kept, and the parent still is."""
    tree = DraftTree(torch.tensor([[1, -1]]), torch.tensor([[12, 10]]))
    assert walked(tree, (10, 12)) == (1, 12)


def walked(tree: DraftTree, path: tuple[int, int]) -> tuple[int, int]:
    """The last kept node and the token after it, where the target wants this path, and 99 behind it."""
    choices = torch.full((1, tree.parents.shape[1] + 1), 99)
    choices[0, 0] = path[0]
    for node, (parent, token) in enumerate(zip(tree.parents[0].tolist(), tree.tokens[0].tolist(), strict=True)):
        if (parent, token) == (-1, path[0]):
            choices[0, node + 1] = path[1]
    last, after = follow(choices, tree)
    return int(last), int(after)
