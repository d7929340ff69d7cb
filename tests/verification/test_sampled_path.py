"""Draft worker and verifier together, as a coordinator drives them: what comes out follows the target's law."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare
from table_backend import TableBackend
from worker_messages import Part, opened, plan, verify, with_drafts

from specserve.drafting import _chains, _kernels, small_model
from specserve.drafting.worker import DraftWorker
from specserve.drafting.workspace import DenseDists, SparseDists, Workspace
from specserve.sampling.dists import process
from specserve.sampling.noise import Purpose
from specserve.transport.messages import Push, Verdict
from specserve.verification.verifier import Verifier

VOCAB = 4
PROMPT = [1, 2]
CPU = torch.device("cpu")


def model(seed: int, rows: int) -> TableBackend:
    backend = TableBackend(torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)))
    backend.allocate(4 * rows, 4)
    return backend


class Pair:
    """Both workers, and the little bookkeeping that rounds need. depth(row) is the chain length asked for."""

    def __init__(self, rows: int, store, **sampling) -> None:
        self.target = model(1, rows)
        self.verifier = Verifier(self.target, vocab_size=VOCAB)
        slots = Workspace(rows * 4, store, CPU)
        speculator = small_model.SmallModel(model(2, rows), VOCAB)
        self.drafter = DraftWorker(speculator, slots, vocab_size=VOCAB)
        self.committed = [list(PROMPT) for _ in range(rows)]
        self.cached = {"draft": [0] * rows, "target": [0] * rows}
        for row in range(rows):
            for worker in (self.verifier, self.drafter):
                worker.handle(opened(row, seed=1000 + row, **sampling))

    def run(self, tokens: int, depth) -> list[tuple[int, ...]]:
        """The first tokens after the prompt, of every row."""
        while any(len(committed) < len(PROMPT) + tokens for committed in self.committed):
            self._round([r for r, c in enumerate(self.committed) if len(c) < len(PROMPT) + tokens], depth)
        return [tuple(committed[len(PROMPT) : len(PROMPT) + tokens]) for committed in self.committed]

    def _round(self, rows: list[int], depth) -> None:
        parts = [self._part("draft", r, range(4 * r, 4 * r + depth(r))) for r in rows]
        (push,) = self.drafter.handle(plan(parts))
        assert isinstance(push, Push), push
        chains = with_drafts(parts, push)
        offers = [self._part("target", r, (), chain) for r, chain in zip(rows, chains, strict=True)]
        (verdict,) = self.verifier.handle(verify(offers, push.dists))
        assert isinstance(verdict, Verdict), verdict
        for i, row in enumerate(rows):
            kept = int(verdict.kept[i])
            before = len(self.committed[row])
            self.committed[row] += [*offers[i].chain[:kept], int(verdict.next[i])]
            self.cached["draft"][row] = before + min(kept, max(0, depth(row) - 1))
            self.cached["target"][row] = before + kept

    def _part(self, role: str, row: int, slots=(), chain: Part | None = None) -> Part:
        start = self.cached[role][row]
        drafted = {} if chain is None else {"chain": chain.chain, "dist_rows": chain.dist_rows}
        table = range(4 * row, 4 * row + 4)
        return Part(row, start, self.committed[row][start:], table, slots=slots, **drafted)


def p_value(target: TableBackend, found: list[tuple[int, ...]], temperature=1.0, top_p=1.0, top_k=0) -> float:
    """The chi-square p-value of the joint law of the tokens found."""
    flat = target.logits.view(-1, VOCAB)
    n = len(flat)
    settings = (torch.full((n,), temperature), torch.full((n,), top_p), torch.full((n,), top_k))
    dists = process(flat, *settings, VOCAB).view(VOCAB, VOCAB, VOCAB).double()
    expected, counts = [], []
    for tokens in product(range(VOCAB), repeat=len(found[0])):
        history = [*PROMPT, *tokens]
        mass = 1.0
        for j in range(len(tokens)):
            mass *= float(dists[history[j], history[j + 1], history[j + 2]])
        count = found.count(tokens)
        if mass == 0:
            assert count == 0, f"{tokens} is impossible"
        else:
            expected.append(mass * len(found))
            counts.append(count)
    return float(chisquare(counts, [e * sum(counts) / sum(expected) for e in expected]).pvalue)


def stores(rows: int):
    return {
        "sparse": SparseDists(4 * rows, 64, CPU),
        "truncated": SparseDists(4 * rows, 2, CPU),
        "dense": DenseDists(4 * rows, VOCAB, CPU),
    }


ROWS = 1500


@pytest.mark.parametrize(
    ("form", "sampling"),
    [
        ("sparse", {}),
        ("truncated", {}),
        pytest.param("dense", {"temperature": 0.7}, marks=pytest.mark.full),
        ("sparse", {"top_p": 0.8}),
        pytest.param("truncated", {"top_k": 3, "temperature": 1.4}, marks=pytest.mark.full),
        pytest.param("sparse", {"rule": "exact"}, marks=pytest.mark.full),
        ("sparse", {"rule": "exact", "top_p": 0.8}),
    ],
)
def test_what_comes_out_follows_the_targets_law(form: str, sampling: dict) -> None:
    """Three tokens of many seeded requests, drafted at ragged depths, are distributed as the target says."""
    pair = Pair(ROWS, stores(ROWS)[form], **sampling)
    found = pair.run(3, lambda row: row % 4)
    filters = {name: value for name, value in sampling.items() if name != "rule"}
    assert p_value(pair.target, found, **filters) > 1e-3


def test_sharing_noise_between_proposing_and_choosing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check has teeth: with one stream for both draws, the law is wrong and the p-value vanishes."""
    monkeypatch.setattr(_kernels, "pick", lambda *_: None)  # C has the stream written in it
    monkeypatch.setattr(_chains, "Purpose", SimpleNamespace(PROPOSE=Purpose.CHOOSE))
    pair = Pair(ROWS, stores(ROWS)["sparse"])
    assert p_value(pair.target, pair.run(3, lambda _: 2)) < 1e-6


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_exact_puts_out_the_same_tokens_at_any_depth(depth: int) -> None:
    """Under `exact` a seeded answer does not depend on whether, or how far, anything was drafted."""
    plain = Pair(50, stores(50)["sparse"], rule="exact").run(8, lambda _: 0)
    assert Pair(50, stores(50)["sparse"], rule="exact").run(8, lambda _: depth) == plain


@pytest.mark.parametrize("rule", ["rejection", "exact"])
def test_greedy_tokens_do_not_depend_on_drafts(rule: str) -> None:
    """At temperature 0 the answer is the target's own greedy one at any depth."""
    answers = [
        Pair(1, stores(1)["sparse"], rule=rule, temperature=0.0).run(9, lambda _, d=depth: d) for depth in range(5)
    ]
    assert answers == [answers[0]] * 5


def test_a_repeated_run_gives_the_same_tokens() -> None:
    """Seeds fix everything: two runs agree token for token."""
    runs = [Pair(40, stores(40)["sparse"]).run(6, lambda row: row % 4) for _ in range(2)]
    assert runs[0] == runs[1]


def test_equal_models_keep_nearly_everything() -> None:
    """A draft equal to the target loses tokens only to float16 rounding."""
    pair = Pair(200, stores(200)["dense"])
    pair.drafter._speculator._backend.logits = pair.target.logits
    parts = [pair._part("draft", r, range(4 * r, 4 * r + 4)) for r in range(200)]
    (push,) = pair.drafter.handle(plan(parts))
    offers = with_drafts(parts, push)
    (verdict,) = pair.verifier.handle(verify(offers, push.dists))
    assert (verdict.kept == 4).mean() > 0.99
