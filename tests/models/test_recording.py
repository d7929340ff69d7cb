"""Whether a worker records its steps at its start: by configuration, device and model; and what that takes."""

from __future__ import annotations

import logging

import pytest
import torch
from tiny_models import equal_pair, tiny_llama

from specserve import check
from specserve.config import EngineConfig, ModelConfig, parse
from specserve.errors import ConfigError
from specserve.local import LocalEngine, load_parts
from specserve.models import _recording
from specserve.models._step_shapes import planned
from specserve.models._worker import load_backend
from specserve.models.paged_transformers import PagedTransformers
from specserve.types import Request, RequestId, Sampling

ENGINE = EngineConfig(depth=2, max_requests=2, outcomes=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), seed=1)


def config(folder, graphs: str) -> ModelConfig:
    return ModelConfig(source=str(folder), device="cpu", kv_blocks=64, graphs=graphs)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_steps_are_recorded_where_that_is_asked_for(folder, role) -> None:
    """All that are planned; their memory is part of the plan, and told."""
    backend, info = load_backend(config(folder, "on"), role, ENGINE)
    assert backend.graphs is not None
    assert backend.graphs._recorded == planned(role, ENGINE, backend.context_length)
    assert info.memory["graphs"] == backend.step_bytes(ENGINE.block_tokens) > 0


def test_check_counts_what_workers_plan(folder) -> None:
    """From the model's files alone, as many bytes for recorded steps; none where none are recorded."""
    made = parse({"target": config(folder, "on").model_dump(), "engine": {"depth": 2, "max_requests": 2}})
    backend, _ = load_backend(made.target, "target", made.engine)
    described = check._described(folder, made.target)
    device = torch.device("cpu")
    found = check._step_bytes("target", made.target, made, device, described)
    assert found == backend.step_bytes(made.engine.block_tokens) > 0
    assert described.bytes_per_block(16) == backend.bytes_per_block(16)
    assert check._step_bytes("target", config(folder, "auto"), made, device, described) == 0


def test_a_cpu_has_nothing_to_gain(folder) -> None:
    """So `auto` records nothing there, and plans nothing for it."""
    for graphs in ("auto", "off"):
        backend, info = load_backend(config(folder, graphs), "target", ENGINE)
        assert backend.graphs is None
        assert info.memory["graphs"] == 0
        assert backend.pages.keys[0].shape[0] == 64 * ENGINE.block_tokens


def test_what_cannot_be_recorded_is_refused_with_its_reason(folder) -> None:
    """A batch-invariant target; and with auto on a GPU the same is told, and no error."""
    engine = EngineConfig(depth=2, max_requests=2, batch_invariant=True)
    with pytest.raises(ConfigError, match=r"graphs: on records the target's steps, but engine.batch_invariant needs"):
        load_backend(config(folder, "on"), "target", engine)
    with pytest.raises(ConfigError, match=r"those of EmulatedModel|those of \w+ cannot be recorded"):
        load_backend(ModelConfig(source="emulated", graphs="on"), "target", engine)


def test_a_model_that_looks_at_values_runs_eagerly_or_is_refused(folder, monkeypatch, caplog) -> None:
    """Such as a mixture of experts, whose rows are counted on the host."""
    compute = PagedTransformers._compute

    def looking(self, tokens, positions, wanted, store):
        return compute(self, tokens, positions, wanted, store) + tokens.sum().item() * 0

    monkeypatch.setattr(PagedTransformers, "_compute", looking)
    with pytest.raises(ConfigError, match="the target's steps cannot be recorded: aten::item makes"):
        load_backend(config(folder, "on"), "target", ENGINE)
    backend, _ = load_backend(config(folder, "off"), "target", ENGINE)
    backend.plan_steps(planned("target", ENGINE, 64))
    backend.allocate(8, 16)
    with caplog.at_level(logging.WARNING):
        _recording.record(backend, "target", config(folder, "auto"))
    assert "launched one by one: aten::item" in caplog.text
    assert backend.graphs is None


@pytest.mark.parametrize("outcomes", [0, 2])
def test_answers_are_those_of_eager_steps(tmp_path, outcomes) -> None:
    """Greedy, of several requests at once with prompts of their own, drafted behind verdicts and ahead of them; both
    models' steps are replayed, and behind verdicts most of them."""
    lengths, answers = (5, 33, 70, 1), {}
    requests = [
        Request(RequestId(str(at)), tuple(range(3, 3 + length)), 24, Sampling(temperature=0.0), ignore_eos=True)
        for at, length in enumerate(lengths)
    ]
    for graphs in ("off", "on"):
        pair = equal_pair(tmp_path / graphs, device="cpu", kv_blocks=200, graphs=graphs)
        made = parse(pair | {"engine": {"depth": 3, "max_requests": 4, "outcomes": outcomes}})
        parts = load_parts(made)
        with LocalEngine(made, parts=parts) as engine:
            answers[graphs] = [done.tokens for done in engine.complete(requests)]
        for backend in (parts.verifier._backend, parts.draft_worker._speculator._backend):
            assert (backend.graphs is not None) == (graphs == "on")
            if backend.graphs is not None:
                assert backend.graphs.replayed > (backend.graphs.eager if outcomes == 0 else 0)
    assert answers["on"] == answers["off"]
    assert all(len(tokens) == 24 for tokens in answers["on"])


@pytest.mark.parametrize("tree", [{"tree": (3, 2)}, {"tree": "dynamic", "tree_nodes": 7, "tree_width": 3}], ids=str)
def test_answers_in_trees_are_those_of_eager_steps(tmp_path, tree) -> None:
    """Of two models that differ, so that paths turn off; all but prompts and the rounds with them are replayed."""
    answers = {}
    requests = [
        Request(RequestId(str(at)), tuple(range(3, 3 + length)), 24, Sampling(temperature=0.0), ignore_eos=True)
        for at, length in enumerate((5, 33, 70, 1))
    ]
    source = {role: str(tiny_llama(tmp_path / role, seed=seed)) for role, seed in (("target", 1), ("draft", 2))}
    for graphs in ("off", "on"):
        model = {"device": "cpu", "kv_blocks": 200, "graphs": graphs}
        pair = {"target": model | {"source": source["target"]}, "draft": {"model": model | {"source": source["draft"]}}}
        made = parse(pair | {"engine": {"depth": 3, "max_requests": 4, "outcomes": 0, **tree}})
        parts = load_parts(made)
        with LocalEngine(made, parts=parts) as engine:
            answers[graphs] = [done.tokens for done in engine.complete(requests)]
        for backend in (parts.verifier._backend, parts.draft_worker._speculator._backend):
            assert (backend.graphs is not None) == (graphs == "on")
            if backend.graphs is not None:
                assert backend.graphs.replayed > 4 * backend.graphs.eager
    assert answers["on"] == answers["off"]
