"""The vectorised walk down a tree of drafts agrees with a walk by hand, node by node, in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specserve.verification._tree import DraftTree, _Walk


def chain(nodes: int) -> list[int]:
    return list(range(-1, nodes - 1))


def full_binary(height: int) -> list[int]:
    """Parents of all nodes below the root of a full binary tree, level by level; -1 is the root."""
    return [(node - 2) // 2 for node in range(2 ** (height + 1) - 2)] if height else []


def walk_by_hand(
    parents: list[int], tokens: list[int], target: np.ndarray, draft: np.ndarray, accept: list[float]
) -> tuple[int, np.ndarray]:
    """The last kept node, and the weights, summing to 1, that the next token is drawn from."""
    node = -1
    while True:
        left, offer = target[node + 1].astype(np.float64), draft[node + 1].astype(np.float64)
        for child in [index for index, parent in enumerate(parents) if parent == node]:
            token = tokens[child]
            if offer[token] > 0 and accept[child] < left[token] / offer[token]:
                node = child
                break
            if offer[token] > 0:
                rest = np.maximum(left - offer, 0)
                left = rest / rest.sum() if rest.sum() > 0 else left
                offer[token] = 0
                offer = offer / offer.sum() if offer.sum() > 0 else offer
        else:
            return node, left


def without_replacement(parents: list[int], draft: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """int64 [N]: tokens of a tree whose siblings are drawn one after the other from what is left of their row."""
    taken: dict[int, list[int]] = {}
    tokens = []
    for parent in parents:
        row = draft[parent + 1].clone()
        row[taken.setdefault(parent, [])] = 0
        tokens.append(int(torch.multinomial(row, 1, generator=generator)))
        taken[parent].append(tokens[-1])
    return torch.tensor(tokens)


SHAPES = [*(f"chain {nodes}" for nodes in (3, 15, 31)), "binary 3", "binary 4"]
CASES = [
    *((32 if vocab % 2 else 64, shape, vocab) for vocab in (3, 32, 33, 64, 65) for shape in SHAPES),
    *((2, "chain 3", vocab) for vocab in (32_000, 32_001, 128_000)),
    (2, "binary 3", 32_001),
    *(pytest.param(32, shape, 32_001, marks=pytest.mark.full) for shape in SHAPES),
    pytest.param(32, "binary 3", 128_000, marks=pytest.mark.full),
]


def agrees(rows: int, shape: str, vocab: int) -> bool:
    """Whether all rows end at the same node as by hand, with the same weights there."""
    kind, size = shape.split()
    parents = chain(int(size)) if kind == "chain" else full_binary(int(size))
    generator = torch.Generator().manual_seed(vocab + len(parents))
    target, draft = (torch.rand(rows, len(parents) + 1, vocab, generator=generator) ** 4 for _ in range(2))
    target += draft  # alike enough that walks end at all depths
    target, draft = (dist / dist.sum(-1, keepdim=True) for dist in (target, draft))
    tokens = torch.stack([without_replacement(parents, draft[row], generator) for row in range(rows)])
    accept = torch.rand(rows, len(parents), generator=generator).double()
    tree = DraftTree(torch.tensor(parents).expand(rows, -1), tokens)
    walk = _Walk(target, draft)
    for node in range(len(parents)):
        walk.test(node, tree.parents[:, node], tokens[:, node], accept[:, node])
    ends = walk.at.clone()
    walk._take_away(torch.ones(rows, dtype=torch.bool))
    left = (walk._left / walk._left.sum(-1, keepdim=True)).double().numpy()
    assert rows < 32 or len(set(ends.tolist())) > 2
    by_hand = [
        walk_by_hand(parents, tokens[row].tolist(), target[row].numpy(), draft[row].numpy(), accept[row].tolist())
        for row in range(rows)
    ]
    return ends.tolist() == [node for node, _ in by_hand] and all(
        np.allclose(left[row], weights, atol=2e-6) for row, (_, weights) in enumerate(by_hand)
    )


@pytest.mark.parametrize(("rows", "shape", "vocab"), CASES)
def test_the_walk_agrees_with_a_walk_by_hand(rows: int, shape: str, vocab: int) -> None:
    """Chains and full binary trees over vocabularies round and not: the same last node, the same weights after it."""
    assert agrees(rows, shape, vocab)


def test_a_sibling_that_keeps_the_first_ones_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a refused token left in the row that the next sibling is judged against, the walks would part."""
    monkeypatch.setattr(_Walk, "_without", lambda walk, _token: walk._offer)
    assert not agrees(64, "binary 3", 32)
