"""Verification of trees: exact laws, known cases, and chains as trees of width 1."""

from collections.abc import Iterator
from itertools import permutations, product

import pytest
import torch
from rule_proofs import Tree, cumulative, law_error, pieces, rule_noise

from specserve.sampling.dists import draw
from specserve.sampling.noise import token_keys
from specserve.sampling.race import race
from specserve.verification import coupled, exact, rejection
from specserve.verification._draft_rows import DraftRows
from specserve.verification._tree import ABSENT, DraftTree

INSET = 1e-14


class Drafted:
    """One drafted tree: parents and tokens in order, and the path of tokens to each place."""

    def __init__(self, parents: list[int], tokens: list[int]) -> None:
        self.parents, self.tokens = parents, tokens
        self.paths: list[tuple[int, ...]] = [()]
        for parent, token in zip(parents, tokens, strict=True):
            self.paths.append((*self.paths[parent + 1], token))

    def batch(self, count: int) -> DraftTree:
        return DraftTree(*(torch.tensor(column).expand(count, -1) for column in (self.parents, self.tokens)))

    def children(self, place: int) -> list[int]:
        return [node for node, parent in enumerate(self.parents) if parent == place - 1]


def without(row: torch.Tensor, token: int) -> torch.Tensor:
    rest = row.clone()
    rest[token] = 0
    return rest / rest.sum() if rest.sum() > 0 else rest


def sampled_trees(draft: Tree, width: int, depth: int) -> Iterator[tuple[Drafted, float]]:
    """All trees of a shape, siblings drawn without replacement, with their probabilities."""
    families = list(permutations(range(draft.vocab), width))
    places = sum(width**level for level in range(depth))
    for choice in product(families, repeat=places):
        parents, tokens = [], []
        for place, family in enumerate(choice):
            parents += [place - 1] * width
            tokens += list(family)
        tree = Drafted(parents, tokens)
        probability = 1.0
        for place in range(places):
            row = draft.dist(tree.paths[place])
            for drawn, node in enumerate(tree.children(place)):
                # Where the row has no mass left, a sibling may be any token that is none yet: it will be refused.
                spent = float(row.sum()) == 0
                probability *= 1 / (draft.vocab - drawn) if spent else float(row[tree.tokens[node]])
                row = without(row, tree.tokens[node])
        if probability > 0:
            yield tree, probability


def sibling_thresholds(
    tree: Drafted, target: torch.Tensor, draft: torch.Tensor
) -> tuple[list[list[float]], list[list[float]]]:
    """Where accept noise of each node decides, and where choose noise may, worked out node by node.

    Of choose noise only the last place's counts, so one uniform serves for all.
    """
    accept: list[list[float]] = [[] for _ in tree.parents]
    choose: list[float] = []
    for place in range(len(tree.paths)):
        left, offer = target[place], draft[place]
        for node in tree.children(place):
            token = tree.tokens[node]
            if offer[token] > 0:
                accept[node] = [float(left[token] / offer[token])]
                rest = (left - offer).clamp(min=0)
                left = rest / rest.sum() if rest.sum() > 0 else left
                offer = without(offer, token)
        choose += cumulative(left) + cumulative(target[place])
    return accept, [choose]


def tree_law(judge, tree: Drafted, accept: list[list[float]], choose: list[list[float]]):
    """The law of (path kept, next token). Places of one depth share a choose uniform, as far as there are such."""
    axes = [*map(pieces, accept), *map(pieces, choose)]
    depths = [min(len(path), len(choose) - 1) for path in tree.paths]
    cells = list(product(*axes))
    runs = []
    for side in (0, 1):
        inset = INSET if side == 0 else -INSET
        noise = torch.tensor([[piece[side] + inset for piece in cell] for cell in cells], dtype=torch.float64)
        accepts, chooses = noise.split([len(accept), len(choose)], 1)
        runs.append(torch.stack(judge(tree.batch(len(cells)), accepts, chooses[:, depths]), -1))
    assert torch.equal(*runs), "the verdict changes inside a piece"
    law: dict[tuple[tuple[int, ...], int], float] = {}
    for (node, following), cell in zip(runs[0].tolist(), cells, strict=True):
        mass = 1.0
        for a, b in cell:
            mass *= b - a
        key = (tree.paths[node + 1], following)
        law[key] = law.get(key, 0.0) + mass
    return law


def as_chain_laws(laws) -> list:
    """Path laws in the form that `law_error` takes."""
    return [
        (path, probability * mass, {(len(path), following): 1.0})
        for probability, law in laws
        for (path, following), mass in law.items()
    ]


def judged(target, draft, tree: DraftTree, accept, choose):
    """`rejection` on draft rows by place: its nodes come with their place's row, as from the wire."""
    rows = torch.arange(len(draft))[:, None]
    nodes = DraftRows.whole(draft[rows, (tree.parents + 1).clamp(min=0)])
    return rejection.judge_tree(target, nodes, tree, rule_noise(accept, choose))


def sibling_laws(target: Tree, draft: Tree, trees, judge=judged):
    for tree, probability in trees:
        rows = torch.stack([target.dist(path) for path in tree.paths])
        drafts = torch.stack([draft.dist(path) for path in tree.paths])

        def run(batch, accept, choose, rows=rows, drafts=drafts):
            count = len(accept)
            return judge(rows.expand(count, -1, -1), drafts.expand(count, -1, -1), batch, accept, choose)

        yield probability, tree_law(run, tree, *sibling_thresholds(tree, rows, drafts))


def pair(seed: int, vocab: int, depth: int) -> tuple[Tree, Tree]:
    generator = torch.Generator().manual_seed(seed)
    return Tree(vocab, depth, generator, seed % 2 == 0), Tree(vocab, depth, generator, seed % 3 == 0)


@pytest.mark.parametrize(
    ("vocab", "width", "depth", "seeds"),
    [
        (3, 2, 1, 120),
        (4, 3, 1, 40),
        (5, 2, 1, 40),
        (3, 2, 2, 2),
        pytest.param(3, 2, 2, 40, marks=pytest.mark.full),
        pytest.param(4, 4, 1, 40, marks=pytest.mark.full),
    ],
)
def test_siblings_without_replacement_have_the_targets_law(vocab: int, width: int, depth: int, seeds: int) -> None:
    """Random pairs, every tree that can be drawn: the joint law of what comes out is exactly the target's."""
    for seed in range(seeds):
        target, draft = pair(seed, vocab, depth)
        laws = as_chain_laws(sibling_laws(target, draft, sampled_trees(draft, width, depth)))
        assert law_error(target, depth, laws) < 1e-12


KNOWN_TARGET = Tree.of({(): [0.3, 0.3, 0.4]} | {(t,): [1 / 3] * 3 for t in range(3)})
KNOWN_DRAFT = Tree.of({(): [0.5, 0.3, 0.2]} | {(t,): [1 / 3] * 3 for t in range(3)})


def first_tokens(laws) -> list[float]:
    found = [0.0] * 3
    for probability, law in laws:
        for (path, following), mass in law.items():
            found[(*path, following)[0]] += probability * mass
    return found


@pytest.mark.parametrize("width", [2, 3])
def test_the_known_tree_is_exact(width: int) -> None:
    """Draft [.5 .3 .2], target [.3 .3 .4], two or three siblings without replacement: exactly the target comes out."""
    laws = sibling_laws(KNOWN_TARGET, KNOWN_DRAFT, sampled_trees(KNOWN_DRAFT, width, 1))
    assert first_tokens(laws) == pytest.approx([0.3, 0.3, 0.4], abs=1e-12)


def test_the_likeliest_two_under_a_naive_walk_are_caught() -> None:
    """Children that are simply the top two, judged against an unchanged draft row, give [.6 0 .4]: it is seen."""

    def naive(target, draft, tree, accept, choose):
        left, offer = target[:, 0].clone(), draft[:, 0]
        node = torch.full((len(target),), -1)
        for child in range(2):
            token = tree.tokens[0, child]
            open_ = node == -1
            kept = open_ & (accept[:, child] * offer[:, token] < left[:, token])
            node = torch.where(kept, child, node)
            rest = (left - offer).clamp(min=0)
            left = torch.where((open_ & ~kept)[:, None], rest / rest.sum(-1, keepdim=True), left)
        stay = target[torch.arange(len(target)), node + 1]
        return node, draw(torch.where((node == -1)[:, None], left, stay), choose[:, 0])

    laws = list(sibling_laws(KNOWN_TARGET, KNOWN_DRAFT, [(Drafted([-1, -1], [0, 1]), 1.0)], naive))
    assert first_tokens(laws) == pytest.approx([0.6, 0.0, 0.4], abs=1e-12)
    assert law_error(KNOWN_TARGET, 1, as_chain_laws(laws)) > 0.05


@pytest.mark.parametrize(("vocab", "width", "depth"), [(3, 2, 2), (4, 2, 1), (5, 3, 1)])
def test_the_target_first_walk_is_exact_for_any_tree(vocab: int, width: int, depth: int) -> None:
    """Under `exact` each single tree, however it was made, gives the target's law."""
    for seed in range(4):
        target, _ = pair(seed, vocab, depth)
        for tree, _ in list(sampled_trees(Tree(vocab, depth, torch.Generator(), False), width, depth))[:: 5 + seed]:
            rows = torch.stack([target.dist(path) for path in tree.paths])

            def run(batch, accept, choose, rows=rows):
                nothing = DraftRows.certain(batch.tokens)
                noise = rule_noise(accept, choose)
                return exact.judge_tree(rows.expand(len(accept), -1, -1), nothing, batch, noise)

            points = [
                [
                    point
                    for row, path in zip(rows, tree.paths, strict=True)
                    if len(path) == level
                    for point in cumulative(row)
                ]
                for level in range(depth + 1)
            ]
            law = tree_law(run, tree, [[] for _ in tree.parents], points)
            assert law_error(target, depth, as_chain_laws([(1.0, law)])) < 1e-12


def random_chains(rows: int, depth: int, vocab: int):
    generator = torch.Generator().manual_seed(2)
    target = torch.softmax(torch.randn(rows, depth + 1, vocab, generator=generator), -1)
    draft = torch.softmax(torch.randn(rows, depth + 1, vocab, generator=generator), -1)
    tokens = torch.stack([draw(draft[:, j], torch.rand(rows, generator=generator)) for j in range(depth)], 1)
    lengths = torch.randint(depth + 1, (rows,), generator=generator)
    accept = torch.rand(rows, depth, generator=generator).double()
    choose = torch.rand(rows, depth + 1, generator=generator).double()
    keys = torch.randint(-(2**31), 2**31, (rows, depth + 1, 4), generator=generator).int()
    return target, draft, tokens, lengths, rule_noise(accept, choose, keys)


@pytest.mark.parametrize("depth", [1, 4])
def test_a_chain_is_a_tree_of_width_one(depth: int) -> None:
    """On ragged chains each rule's tree form says exactly what its chain form says."""
    target, draft, tokens, lengths, noise = random_chains(3000, depth, 3)
    tree = DraftTree.chain(tokens, lengths)
    runs = {
        rule: rule.judge_tree(target, DraftRows.whole(draft[:, :-1]), tree, noise)
        for rule in (rejection, exact, coupled)
    }
    for rule, (node, following) in runs.items():
        kept, expected = rule.judge(target, DraftRows.whole(draft[:, :-1]), tokens, lengths, noise)
        assert torch.equal(node + 1, kept)
        assert torch.equal(following, expected)
        assert len(set(kept.tolist())) == depth + 1


def test_a_coupled_walk_puts_out_what_no_tree_would() -> None:
    """Under `coupled` the path and the token after it are the target's own picks along that path."""
    rows, vocab = 400, 4
    generator = torch.Generator().manual_seed(3)
    tree = Drafted([-1, -1, 0, 0, 1, 1], [0, 1, 2, 3, 2, 3])
    target = torch.softmax(torch.randn(rows, 7, vocab, generator=generator), -1)
    by_depth = token_keys(torch.arange(rows)[:, None], torch.arange(3))
    keys = by_depth[:, [len(path) for path in tree.paths]]
    noise = rule_noise(torch.empty(0), torch.empty(0), keys)
    batch = tree.batch(rows)
    node, following = coupled.judge_tree(target, DraftRows.certain(batch.tokens), batch, noise)
    picks = race(target.flatten(0, 1), keys.flatten(0, 1)).view(rows, 7)
    for row in range(rows):
        place, path = 0, []
        while True:
            path.append(int(picks[row, place]))
            hits = [child for child in tree.children(place) if tree.tokens[child] == path[-1]]
            if not hits:
                break
            place = hits[0] + 1
        assert [*tree.paths[int(node[row]) + 1], int(following[row])] == path
    assert len(set(node.tolist())) > 4


def test_padding_is_never_kept_and_repeated_siblings_are_refused() -> None:
    """Absent nodes are passed over; a second sibling with the first one's token has no draft mass left."""
    target = torch.tensor([[[0.2, 0.3, 0.5]] * 3] * 200)
    draft = torch.tensor([[[1.0, 0.0, 0.0]] * 3] * 200)
    accept, choose = torch.full((200, 2), 0.25).double(), (torch.arange(200).double() / 200)[:, None].expand(-1, 3)
    again = DraftTree(torch.tensor([[-1, -1]]).expand(200, -1), torch.tensor([[0, 0]]).expand(200, -1))
    node, following = judged(target, draft, again, accept, choose)
    assert set(node.tolist()) == {-1}
    assert set(following.tolist()) == {1, 2}
    absent = DraftTree(torch.full((200, 2), ABSENT), torch.zeros(200, 2).long())
    node, following = judged(target, draft, absent, accept * 0, choose)
    assert set(node.tolist()) == {-1}
    assert set(following.tolist()) == {0, 1, 2}
