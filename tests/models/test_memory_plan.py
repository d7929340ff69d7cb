"""Memory is planned before it is taken: sums are those of the tensors, and what cannot fit is refused in numbers."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_llama

from specserve.config import DraftConfig, EngineConfig, ModelConfig, parse
from specserve.drafting import worker as draft_workers
from specserve.errors import ConfigError
from specserve.models import _memory_plan, loading
from specserve.models._worker import load_backend

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), seed=1)


def test_the_plan_is_what_the_worker_holds(folder):
    """Weights as their parameters, KV as its pages, logits for the largest round, slots as their tensors."""
    model = {"source": str(folder), "device": "cpu", "kv_blocks": 64}
    config = parse({"target": model, "draft": {"model": model}, "engine": {"max_batch_tokens": 64}})
    backend, info = load_backend(config.target, "target", config.engine)
    plain = loading.load_model(folder, config.target)  # a backend packs some of its weights anew
    pages = backend._pages
    kv = sum(each.nbytes for store in (pages.keys, pages.values) for each in store.values())
    assert info.memory["kv"] == kv
    assert info.memory["weights"] == sum(each.nbytes for each in plain.parameters())
    assert info.memory["logits"] == 3 * 64 * backend.vocab_size * 4
    assert info.memory["slots"] == 0
    worker, draft = draft_workers.build(config)
    store = worker._workspace._dists
    dists = store._ids.nbytes + store._probs.nbytes
    assert draft.memory["slots"] == dists + 4 * config.engine.slot_count * config.engine.ranks


def test_dense_slots_are_counted_by_the_vocabulary():
    """Two bytes for each id."""
    engine = EngineConfig(slots=10, outcomes=0)
    assert _memory_plan.slot_bytes(DraftConfig(dist="dense"), engine, 1000) == 10 * 2000
    assert _memory_plan.slot_bytes(DraftConfig(top_k=64), engine, 1000) == 10 * 64 * 6


def test_kv_takes_what_is_left_of_a_gpu_and_little_of_a_cpu():
    """Most of what logits and slots leave on a GPU; at most 1 GiB, and half of that for a draft, on a CPU."""
    plan = _memory_plan.MemoryPlan(free=80 * GIB, weights=16 * GIB, logits=2 * GIB, slots=8 * GIB)
    assert plan.kv_room("target", GPU) == pytest.approx(0.7 * 70 * GIB, abs=1)
    assert plan.kv_room("draft", GPU) == pytest.approx(0.9 * 70 * GIB, abs=1)
    assert (plan.kv_room("target", CPU), plan.kv_room("draft", CPU)) == (GIB, GIB // 2)
    scarce = _memory_plan.MemoryPlan(free=2 * GIB, weights=GIB, logits=0, slots=0)
    assert scarce.kv_room("target", CPU) == GIB // 2
    assert _memory_plan.MemoryPlan(free=GIB, weights=0, logits=2 * GIB, slots=0).kv_room("target", GPU) == 0


def test_what_exceeds_the_device_is_refused_with_every_number(folder):
    """Before pages are made, and before weights are read where they alone are too much."""
    with pytest.raises(ConfigError, match=r"the target wants 1000000\.\d GiB beside its weights \(1000000.0 GiB KV"):
        load_backend(ModelConfig(source=str(folder), device="cpu", kv_memory_gib=1e6), "target", EngineConfig())
    with pytest.raises(ConfigError, match=r"the draft's weights take 1048576.0 GiB as float32, and cpu has"):
        _memory_plan.check_weights("draft", 1 << 50, ModelConfig(), CPU)


def test_weights_are_counted_in_the_configured_dtype(folder):
    """Half as many bytes in bfloat16."""
    full, half = (_memory_plan.weight_bytes(folder, ModelConfig(dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert full == 2 * half > 0


def test_a_control_group_bounds_what_is_free(tmp_path):
    """A container's limit counts, not the machine's memory; a group without one bounds nothing."""
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert _memory_plan._group_room(tmp_path) == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert _memory_plan._group_room(tmp_path) > 1 << 50
    assert 0 < _memory_plan.free_bytes(CPU) < 1 << 50


def test_the_plan_is_told_in_one_line():
    """With units for people; emulated devices have nothing to tell."""
    memory = {"weights": 16 * GIB, "kv": 40 * GIB, "logits": 100 << 20, "slots": 0, "free": 60 * GIB}
    told = _memory_plan.line(memory)
    assert (
        told == "16.0 GiB weights, 40.0 GiB kv, 100.0 MiB logits, 0.0 MiB slots; 60.0 GiB were free beside the weights"
    )
    assert "0.0 MiB slots, 1.5 GiB recorded steps; 60" in _memory_plan.line(memory | {"graphs": 3 * GIB // 2})
    assert "16.0 GiB int8 weights, 40" in _memory_plan.line(memory, "int8")
    assert "emulated" in _memory_plan.line({})
