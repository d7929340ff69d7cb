"""Penalties and bad words look back at exactly the committed tokens, whatever happened to rounds and workers before.

The machine of `test_engine_machine` on the real workers, over table models: chains are kept and refused at every
length, requests are preempted, share prompts, and workers are lost and restarted. Every answer has to be that of a
loop which applies the options token by token.
"""

from __future__ import annotations

import pytest
import torch
from harness import Pipeline
from machines import histories, hold
from table_backend import TableBackend
from test_ahead_machine import AheadMachine
from test_engine_machine import EngineMachine
from toy_workers import VOCAB

from specserve.config import EngineConfig
from specserve.coordinator.blocks import BlockPool
from specserve.drafting.small_model import SmallModel
from specserve.drafting.worker import DraftWorker
from specserve.drafting.workspace import SparseDists, Workspace
from specserve.sampling.history import History
from specserve.types import Sampling
from specserve.verification.verifier import Verifier

GENERATOR = torch.Generator().manual_seed(5)
TARGET = torch.randn(VOCAB, VOCAB, VOCAB, generator=GENERATOR)
DRAFT = TARGET + 0.2 * torch.randn(VOCAB, VOCAB, VOCAB, generator=GENERATOR)
# Few tokens are likely anywhere, so that answers repeat themselves and every option bites.
POPULAR = torch.where(torch.arange(VOCAB) < 6, 3.0, 0.0)

OPTIONS = [
    Sampling(temperature=0, frequency_penalty=1.1, presence_penalty=0.4),
    Sampling(temperature=0, repetition_penalty=1.6),
    Sampling(temperature=0, bad_words=((0, 1), (2,), (3, 3), (1, 4, 0)), presence_penalty=-0.5),
    Sampling(temperature=0),
    Sampling(temperature=0, allowed_token_ids=tuple(range(12)), frequency_penalty=2.0, logit_bias=((5, 1.5),)),
]


def backend(table):
    model = TableBackend(table + POPULAR)
    model.allocate(64, 4)
    return model


def draft_worker(shape=None):
    cpu = torch.device("cpu")
    speculator = SmallModel(backend(DRAFT), VOCAB)
    workspace = Workspace(400, SparseDists(400, VOCAB, cpu), cpu, ranks=4)
    return DraftWorker(speculator, workspace, vocab_size=VOCAB, block_tokens=4, shape=shape)


def one_by_one(prompt, count, sampling):
    """The greedy answer, each option applied as its documentation says."""
    tokens = list(prompt)
    for _ in range(count):
        before = tokens[-2] if len(tokens) > 1 else 0
        logits = (TARGET + POPULAR)[before, tokens[-1]].tolist()
        said = tokens[len(prompt) :]
        banned = set() if sampling.allowed_token_ids is None else set(range(VOCAB)) - set(sampling.allowed_token_ids)
        for *start, last in sampling.bad_words:
            if said[len(said) - len(start) :] == start:
                banned.add(last)
        for token, value in sampling.logit_bias:
            logits[token] += value
        for token in set(tokens):
            by = sampling.repetition_penalty
            logits[token] = logits[token] / by if logits[token] > 0 else logits[token] * by
        for token in set(said):
            logits[token] -= sampling.frequency_penalty * said.count(token) + sampling.presence_penalty
        tokens.append(max((t for t in range(VOCAB) if t not in banned), key=lambda t: logits[t]))
    return tokens[len(prompt) :]


class HistoryMachine(EngineMachine):
    """The real workers, every request with options that look back."""

    def pipeline_of(self, **fields):
        return Pipeline(
            make_verifier=lambda: Verifier(backend(TARGET), vocab_size=VOCAB), make_draft=draft_worker, **fields
        )

    def options(self, number):
        return OPTIONS[number % len(OPTIONS)]

    def answer(self, prompt, count, number):
        return one_by_one(prompt, count, self.options(number))


@histories(12, 50)
def test_options_look_back_at_what_is_committed(examples):
    """Whatever happened to rounds and workers before."""
    hold(HistoryMachine, examples, steps=40)


class AheadHistoryMachine(AheadMachine):
    """The same while the draft works ahead, with branches whose histories differ."""

    def pipeline_of(self, **fields):
        makers = {"make_verifier": lambda: Verifier(backend(TARGET), vocab_size=VOCAB), "make_draft": draft_worker}
        return super().pipeline_of(**makers, **fields)

    options = HistoryMachine.options
    answer = HistoryMachine.answer


@histories(12, 50)
def test_options_look_back_along_branches(examples):
    """Drafts ahead see the history of their own branch."""
    hold(AheadHistoryMachine, examples, steps=40)


def run(number, **fields):
    """One request alone at depth 3: its answer and how many drafted tokens were kept and offered."""
    pipeline = HistoryMachine().pipeline_of(depth=3, end=1000, **fields)
    pipeline.submit("a", [7, 8, 9], max_tokens=40, sampling=OPTIONS[number])
    pipeline.settle()
    deltas = pipeline.deltas["a"]
    return pipeline.tokens("a"), sum(delta.kept for delta in deltas), sum(delta.offered for delta in deltas)


@pytest.mark.parametrize("number", range(len(OPTIONS)))
def test_drafts_go_through_the_same_options(number):
    """Most drafts are kept, which they could not be if the draft did not see the options; some are refused."""
    tokens, kept, offered = run(number)
    assert tokens == one_by_one([7, 8, 9], 40, OPTIONS[number])
    assert 0.5 * offered < kept < offered


def never_void(self, start, tokens):
    """A broken `History.write` that forgets to drop what was refused."""
    new = list(tokens)[max(0, len(self) - start) :]
    self._answer += new
    self._occurrences = None
    for token in new:
        self._count(token, 1)


def never_chains(real):
    def write(self, start, tokens):
        """A broken `History.write` that hears only of feeds, and does not notice the gap."""
        real(self, min(start, len(self)), tokens[:1])

    return write


@pytest.mark.parametrize("broken", [never_void, never_chains(History.write)], ids=["refused kept", "chains unheard"])
def test_a_wrong_history_shows(monkeypatch, broken):
    """The machine's comparison can fail: two plausible mistakes give other answers."""
    monkeypatch.setattr(History, "write", broken)
    assert run(0)[0] != one_by_one([7, 8, 9], 40, OPTIONS[0])


def branches(count):
    """A family whose members have different options, and so different answers; whether each said the right thing."""
    pipeline = HistoryMachine().pipeline_of(depth=3, end=1000)
    prompt = list(range(10, 31))
    for number in range(count):
        pipeline.submit(f"b{number}", prompt, 20, sampling=OPTIONS[number], family="b", branch=number)
    pipeline.settle()
    return [pipeline.tokens(f"b{number}") == one_by_one(prompt, 20, OPTIONS[number]) for number in range(count)]


def test_branches_share_the_prompt_and_nothing_else(monkeypatch):
    """Five answers from one prompt; sharing the last, partial block as well would show."""
    assert all(branches(5))

    def fork(self, table, positions):
        shared = table[: positions // self.block_tokens + 1]
        self.retain(shared)
        return shared

    monkeypatch.setattr(BlockPool, "fork", fork)
    assert not all(branches(5))


TREES = {
    0: {},
    1: {"tree": [3], "slots": 6},
    3: {"tree": [3, 2], "slots": 12},
    6: {"tree": "dynamic", "tree_nodes": 8, "tree_width": 3, "slots": 12},
}


class TreeHistoryMachine(HistoryMachine):
    """The same with drafted trees, static, dynamic and adaptive, of which slots and blocks are often short."""

    def pipeline_of(self, **fields):
        fields |= TREES[fields["depth"]]
        trees = {name: value for name, value in fields.items() if name.startswith("tree")}
        engine = EngineConfig(depth=fields["depth"], **trees)
        return Pipeline(
            make_verifier=lambda: Verifier(backend(TARGET), vocab_size=VOCAB, engine=engine),
            make_draft=lambda: draft_worker(engine.tree_shape),
            **fields,
        )


@histories(8, 50)
def test_options_look_back_along_trees(examples):
    """A node's history is its own path."""
    hold(TreeHistoryMachine, examples, steps=40)
