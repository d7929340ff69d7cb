"""T23: a prompt that is fed in chunks is followed by the first token and the first draft of one in a piece."""

from __future__ import annotations

import pytest
from harness import Pipeline
from toy_workers import ToyVerifier, reference, split

from specserve.transport.messages import Verify

PROMPT = list(range(3, 25))  # 22 tokens: three chunks of 8, six of 4
MODES = {
    "plain": {"depth": 0},
    "serial": {"depth": 4},
    "ahead": {"depth": 4, "outcomes": 2},
    "adaptive": {"depth": 4, "depth_policy": "adaptive"},
    "guesser": {"depth": 4, "draft": False},
}


class Repeater:
    """A guesser that says the last two tokens again."""

    def __init__(self):
        self.tokens = {}

    def open(self, row, tokens):
        self.tokens[row] = list(tokens)

    def extend(self, row, tokens):
        self.tokens[row] += tokens

    def guess(self, row, depth):
        return self.tokens[row][-2:][:depth]

    def close(self, row):
        self.tokens.pop(row, None)


class Noting(ToyVerifier):
    """Keeps the chain of each due row, and how many chunks were not due."""

    def __init__(self):
        super().__init__()
        self.chains, self.chunks = [], 0

    def handle(self, message):
        if isinstance(message, Verify):
            chains = split(message.chains, message.chain_lengths)
            self.chains += [chain for chain, due in zip(chains, message.due.tolist(), strict=True) if due]
            self.chunks += int((~message.due).sum())
        return super().handle(message)


def run(chunk, **mode):
    """The answer, its chains in order, and the chunks before the first of them."""
    guesser = Repeater() if mode.get("draft") is False else None
    pipeline = Pipeline(prefill_chunk=chunk, end=1000, miss=5, make_verifier=Noting, guesser=guesser, **mode)
    pipeline.submit("a", PROMPT, max_tokens=16)
    pipeline.settle()
    verifier = pipeline.verifier.worker
    return pipeline.tokens("a"), verifier.chains, verifier.chunks


@pytest.mark.parametrize("chunk", [4, 8])
@pytest.mark.parametrize("mode", MODES)
def test_chunks_change_neither_the_first_token_nor_the_first_draft(mode, chunk):
    """In every mode; the chunks are really there."""
    whole_answer, whole, none = run(64, **MODES[mode])
    answer, chains, chunks = run(chunk, **MODES[mode])
    assert (none, chunks) == (0, -(-len(PROMPT) // chunk) - 1)
    assert answer == whole_answer == reference(PROMPT, 16)
    assert [chain for chain in chains if chain][:1] == [chain for chain in whole if chain][:1]
    assert any(whole) == (mode != "plain")
    if mode != "adaptive":  # whose depths follow what rounds cost, and there are more rounds
        assert chains == whole
