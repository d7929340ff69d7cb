"""A speculator from elsewhere, named by a dotted path in the configuration, and looked at before anything is served."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import tiny_heads

from specserve import drafting
from specserve.config import parse
from specserve.errors import ConfigError
from specserve.local import LocalEngine

PLUG_IN = """
    class Cycle:
        '''Says that what came `period` tokens ago comes again.'''

        KIND = "guesser"

        @staticmethod
        def build(config):
            return Cycle()

        def __init__(self):
            self.rows = {}

        def open(self, row, tokens, prompt_length=0, prediction=()):
            self.rows[row] = list(tokens)

        def extend(self, row, tokens):
            self.rows[row] += tokens

        def guess(self, row, depth):
            return self.rows[row][-depth:]

        def close(self, row):
            self.rows.pop(row, None)


    class Mute(Cycle):
        guess = None

        @staticmethod
        def build(config):
            return Mute()


    class Nothing:
        KIND = "oracle"
"""

MODEL_PLUG_IN = """
    from specserve.drafting import small_model

    KIND = "model"


    def build(config, backend, vocab_size):
        return Brief(backend, vocab_size)


    class Brief(small_model.SmallModel):
        '''Says the first token only of what it drafted.'''

        def propose(self, jobs, workspace):
            return [chain[:1] for chain in super().propose(jobs, workspace)]
"""


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that a user has installed."""
    (tmp_path / "somebodys").mkdir()
    for name, text in (("guessers", PLUG_IN), ("models", MODEL_PLUG_IN), ("broken", "import not_there_at_all")):
        (tmp_path / "somebodys" / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_heads.few_words(tmp_path_factory.mktemp("target"), 12, layers=2)


def config(target: Path, speculator: str, depth: int = 3):
    model = {"source": str(target), "device": "cpu", "kv_blocks": 64, "context_length": 64}
    return parse(
        {
            "target": model,
            "draft": {"speculator": speculator, "model": model},
            "engine": {"block_tokens": 4, "depth": depth, "max_requests": 4, "outcomes": 0},
        }
    )


@pytest.mark.parametrize("path", ["somebodys.guessers.Cycle", "somebodys.models"])
def test_a_class_or_module_by_its_path_drafts(target: Path, path: str) -> None:
    """Answers are those of plain decoding, and drafts were made and kept."""
    with LocalEngine(config(target, "none")) as plain:
        wanted = plain.generate([[1, 2, 3]], max_tokens=40, ignore_eos=True)[0]
    with LocalEngine(config(target, path)) as running:
        found = running.generate([[1, 2, 3]], max_tokens=40, ignore_eos=True)[0]
        assert running.card.speculator == path
        assert path in running.card.sources
    assert found.tokens == wanted.tokens
    assert found.stats.drafted_tokens >= found.stats.kept_tokens > 0


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("somebodys.guessers.Nothing", "needs a KIND of model or guesser"),
        ("somebodys.guessers.Missing", "is not there"),
        ("nobodys.Cycle", "is its package installed here"),
        ("somebodys.broken", "cannot be imported: No module named 'not_there_at_all'"),
        ("somebodys.guessers.Mute", "built a Mute without guess"),
        ("nothing", "no speculator called 'nothing'; there are: none, eagle"),
        ("..", "no speculator called"),
        ("../../etc", "no speculator called"),
    ],
)
def test_what_is_no_speculator_is_refused_at_start(target: Path, path: str, words: str) -> None:
    """Each in words, before anything is served."""
    with pytest.raises(ConfigError, match=words):
        LocalEngine(config(target, path))


def test_a_path_is_looked_at_without_drafts_too(target: Path) -> None:
    """A misspelt path is refused when the configuration is read, not when depth is raised one day."""
    with pytest.raises(ConfigError, match="is not there"):
        drafting.has_worker(config(target, "somebodys.guessers.Missing", depth=0).draft)


@pytest.mark.parametrize("speculator", ["prediction", "somebodys.guessers.Cycle"])
def test_lookup_goes_beside_models_only(speculator) -> None:
    """Another guesser would leave it unused, and nobody would be told."""
    draft = parse({"draft": {"speculator": speculator, "lookup": "ngram"}}).draft
    with pytest.raises(ConfigError, match="leave lookup out"):
        drafting.has_worker(draft)
