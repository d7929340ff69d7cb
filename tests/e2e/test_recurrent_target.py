"""Recurrent and hybrid targets through the whole engine: greedy text is the model's own at every depth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_llama
from tiny_recurrent import SERVED, tiny
from tiny_tokenizer import byte_level, write_folder

from specserve.config import ModelConfig, parse
from specserve.drafting import worker as draft_workers
from specserve.errors import ConfigError
from specserve.local import LocalEngine, load_parts
from specserve.models import loading
from specserve.text import Tokenizer
from specserve.transport import PeerLost
from specserve.transport.local import LocalChannel
from specserve.transport.messages import Cannot, Verify
from specserve.verification import verifier

TOKENS = 20
PROMPTS = ["the quick brown fox jumps over the lazy dog. the quick", "0123 0123 0123 0", "stop", "é, ü; " * 6]
FAMILIES = ["mamba2", "falcon_h1"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders by family, made when they are asked for, and the draft that shares their tokenizer."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            core = byte_level()
            write_folder(made[family], core)
            if family == "draft":
                tiny_llama(made[family], seed=3)
            else:
                tiny(family, core.get_vocab_size(with_added_tokens=True)).save_pretrained(made[family])
        return made[family]

    return folder


def settings(models, family: str, depth: int, speculator: str, *, kv_blocks: int = 200, **engine):
    target = {"source": str(models(family)), "device": "cpu", "context_length": 100, "kv_blocks": kv_blocks}
    draft = {"source": str(models("draft")), "device": "cpu", "kv_blocks": 200}
    limits = {"depth": depth, "block_tokens": 4, "max_requests": 4, "prefill_chunk": 16, "max_batch_tokens": 40}
    return parse({"target": target, "draft": {"speculator": speculator, "model": draft}, "engine": limits | engine})


@pytest.fixture(scope="module")
def own(models):
    """What each family's own generate says to the prompts, as (prompt, answer)."""
    said: dict[str, list[tuple[list[int], tuple[int, ...]]]] = {}

    def texts(family: str):
        if family not in said:
            tokenizer = Tokenizer.load(models(family))
            config = ModelConfig(source=str(models(family)), device="cpu")
            model = loading.load_model(models(family), config, "eager")
            model.generation_config.eos_token_id = None
            prompts = [tokenizer.encode(text, special=True) for text in PROMPTS]
            said[family] = [(prompt, continued(model, prompt)) for prompt in prompts]
        return said[family]

    return texts


def continued(model, prompt: list[int]) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
    return tuple(written[0, len(prompt) :].tolist())


class Oracle:
    """A guesser that knows the answers, and errs at every fifth position: runs of every length are kept."""

    def __init__(self, texts) -> None:
        self.texts, self.known = [[*prompt, *answer] for prompt, answer in texts], {}

    def open(self, row, tokens):
        self.known[row] = list(tokens)

    def extend(self, row, tokens):
        self.known[row] += tokens

    def guess(self, row, depth):
        done = self.known[row]
        text = next(text for text in self.texts if text[: len(done)] == done)
        return [token if at % 5 else (token + 1) % 300 for at, token in enumerate(text[len(done) :][:depth], len(done))]

    def close(self, row):
        self.known.pop(row, None)


def check_answers(engine: LocalEngine, texts) -> None:
    """All requests at once; each gets its own model's text, and nothing is held afterwards."""
    found = engine.generate([prompt for prompt, _ in texts], max_tokens=TOKENS, ignore_eos=True)
    assert [completion.tokens for completion in found] == [answer for _, answer in texts]
    levels = engine.levels()
    assert levels.target_blocks_held == levels.draft_blocks_held == levels.slots_held == 0


def counted(engine: LocalEngine, name: str) -> float:
    lines = [line for line in engine.metrics_text().splitlines() if line.startswith(f"specserve_{name}")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


OTHERS = [pytest.param(family, marks=pytest.mark.full) for family in SERVED if family not in FAMILIES]


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_greedy_text_is_the_models_own_at_every_depth_and_with_every_speculator(models, own, family):
    """Four requests at once, prompts longer than a chunk: depth 0, 1 and 4, prompt lookup and a draft model."""
    assert max(len(prompt) for prompt, _ in own(family)) > 32
    for depth, speculator in ((0, "none"), (1, "ngram"), (4, "ngram"), (1, "small_model"), (4, "small_model")):
        with LocalEngine(settings(models, family, depth, speculator)) as engine:
            check_answers(engine, own(family))
            assert speculator != "small_model" or counted(engine, "spec_decode_num_draft_tokens_total") > 0


def oracle_parts(config, texts, **changes):
    return replace(load_parts(config), guesser=Oracle(texts), **changes)


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_text_is_the_models_own_when_chains_are_kept_in_part(models, own, family):
    """Right drafts with an error at every fifth position: states are adopted, read again, and restored."""
    config = settings(models, family, 4, "ngram")
    with LocalEngine(config, parts=oracle_parts(config, own(family))) as engine:
        check_answers(engine, own(family))
        assert counted(engine, "spec_decode_num_accepted_tokens_total{") > 30
        assert counted(engine, "spec_decode_wasted_draft_tokens_total{") >= 10


@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_requests_are_refilled_from_nothing(models, own, family):
    """Blocks for one and a half requests: the youngest loses its state, and goes on where it was."""
    config = settings(models, family, 4, "ngram", kv_blocks=26)
    with LocalEngine(config, parts=oracle_parts(config, own(family))) as engine:
        check_answers(engine, own(family))
        assert counted(engine, "preemptions_total{") > 0
        assert counted(engine, "refills_total{") == 0


class Forgetful:
    """A verifier that loses every request's state before each `often`-th round."""

    def __init__(self, inner: verifier.Verifier, often: int) -> None:
        self.inner, self.often, self.rounds, self.refusals = inner, often, 0, 0

    def handle(self, message):
        if isinstance(message, Verify):
            self.rounds += 1
            if self.rounds % self.often == 0:
                for row in message.rows.tolist():
                    self.inner._backend.states.forget(row)
        replies = self.inner.handle(message)
        self.refusals += sum(isinstance(reply, Cannot) for reply in replies)
        return replies


@pytest.mark.parametrize("family", FAMILIES)
def test_state_that_is_lost_is_refilled_from_zero(models, own, family):
    """The real verifier answers `Cannot`; rows are fed again, and the text is the same."""
    config = settings(models, family, 4, "ngram")
    parts = oracle_parts(config, own(family))
    worker = Forgetful(parts.verifier, 6)
    with LocalEngine(config, parts=replace(parts, verifier=worker)) as engine:
        check_answers(engine, own(family))
        assert worker.refusals > 1
        assert counted(engine, "refills_total{") >= worker.refusals


@pytest.mark.parametrize("family", FAMILIES)
def test_a_restarted_verifier_is_refilled(models, own, family):
    """The worker is lost in the middle of an answer; its successor knows nothing and is fed what was committed."""
    config = settings(models, family, 4, "ngram")
    with LocalEngine(config, parts=oracle_parts(config, own(family))) as engine:
        core, loop, sink = engine._engine, engine._loop, engine._engine._sink
        rounds = iter(range(1000))

        def restart() -> None:
            fresh, info = verifier.build(config)
            core.receive(PeerLost("target", 0, "killed"))
            assert core.health().status == "starting"
            core.attach("target", LocalChannel(fresh, engine._mailbox, "target", 1), 1, info)

        def watched(owner, deltas):
            if next(rounds) == 5:
                loop.call(restart)
            sink(owner, deltas)

        core._sink = watched
        check_answers(engine, own(family))
        assert core._verifier.life == 1


def test_a_recurrent_draft_is_refused_in_words(models):
    """Only targets may keep recurrent state."""
    config = settings(models, "mamba2", 4, "small_model")
    draft = {"source": str(models("mamba2")), "device": "cpu", "context_length": 100}
    config = config.model_copy(update={"draft": config.draft.model_copy(update={"model": ModelConfig(**draft)})})
    with pytest.raises(ConfigError, match="recurrent state, which a draft model may not"):
        draft_workers.build(config)


def test_a_model_without_pages_has_blocks_for_every_request(models):
    """Pure recurrent models keep nothing per position: blocks are bookkeeping, enough for full contexts."""
    config = settings(models, "mamba2", 0, "none")
    target = config.target.model_copy(update={"kv_blocks": None})
    _, info = verifier.build(config.model_copy(update={"target": target}))
    assert (info.blocks, info.context_length) == (25 * 4, 100)
