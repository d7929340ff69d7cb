"""Sources become folders, folders become models, and what cannot be loaded is told in words."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_causal import CONFIGS, SMALL
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from specserve import cache
from specserve.config import ModelConfig
from specserve.errors import ConfigError
from specserve.models import loading, paged_transformers


@pytest.fixture
def folder(tmp_path):
    """A tiny Llama saved as safetensors."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def silent(line: str) -> None:
    del line


def edit_config(folder: Path, **changes):
    path = folder / "config.json"
    described = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in described.items() if value is not None}))


def load(folder: Path, **settings):
    config = ModelConfig(source=str(folder), device="cpu", **settings)
    return loading.load_model(loading.prepare(config, silent), config)


def test_a_folder_is_loaded_in_eval_mode_with_the_configured_dtype(folder):
    """The folder is used as it is; nothing is in training mode and nothing wants gradients."""
    model = load(folder, dtype="bfloat16")
    assert not model.training
    assert model.dtype == torch.bfloat16
    assert not any(weight.requires_grad for weight in model.parameters())


def test_loading_draws_no_bars_and_leaves_the_users_own_alone(folder, capfd):
    """Progress is told by our lines; what else the user does with transformers is shown as before."""
    logging.enable_progress_bar()
    capfd.readouterr()
    load(folder)
    assert capfd.readouterr().err == ""
    assert logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        load(folder)
        assert not logging.is_progress_bar_enabled()
    finally:
        logging.enable_progress_bar()


def test_build_gives_a_backend_from_a_prepared_folder(folder):
    """`build` honours the context cap and reports the head's width."""
    backend = paged_transformers.build(ModelConfig(source=str(folder), context_length=20), folder)
    assert (backend.context_length, backend.vocab_size, backend.device.type) == (20, SMALL["vocab_size"], "cpu")


def test_a_name_that_is_no_path_is_refused_without_waiting_for_a_network():
    """A hub name fails at once with what to do instead."""
    began = time.monotonic()
    with pytest.raises(ConfigError, match="not downloaded"):
        load(Path("some-org/some-model"))
    assert time.monotonic() - began < 5


def remove_config(folder: Path):
    (folder / "config.json").unlink()


def remove_weights(folder: Path):
    (folder / "model.safetensors").unlink()


def only_pickle(folder: Path):
    torch.save({}, folder / "pytorch_model.bin")
    remove_weights(folder)


def cut_weights(folder: Path):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def drop_a_weight(folder: Path):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (remove_config, "no config.json"),
        (remove_weights, "no \\*.safetensors"),
        (only_pickle, "can run code"),
        (cut_weights, "cannot read|cannot load"),
        (drop_a_weight, "lacks 1 weights.*up_proj"),
        (lambda f: edit_config(f, architectures=None), "names no `architectures`"),
        (lambda f: edit_config(f, auto_map={"AutoModel": "code.Model"}), "brings its own Python code"),
        (lambda f: edit_config(f, model_type="no_such_model"), "no_such_model"),
        (lambda f: edit_config(f, hidden_size=40, head_dim=None), "cannot load"),
        (lambda f: (f / "config.json").write_text("{"), "cannot read"),
        (lambda f: (f / "config.json").write_text("[]"), "holds a list"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_folder_that_cannot_be_loaded_is_refused_in_words(folder, damage, said):
    """Missing, damaged, pickled, incomplete, foreign: each is a ConfigError that names what is wrong."""
    damage(folder)
    with pytest.raises(ConfigError, match=said):
        load(folder)


def test_pickled_weights_load_when_they_are_allowed(folder):
    """allow_pickle_weights reads pytorch_model.bin."""
    torch.save(dict(load(folder).state_dict()), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert load(folder, allow_pickle_weights=True).config.hidden_size == SMALL["hidden_size"]


@pytest.mark.parametrize("name", ["notes.txt", "broken.gguf"])
def test_files_that_are_not_gguf_are_refused(tmp_path, monkeypatch, name):
    """A file of another kind, and a .gguf file that is none; nothing half done stays in the cache."""
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "cache"))
    (tmp_path / name).write_bytes(b"something else")
    with pytest.raises(ConfigError, match=r"not a \.gguf|does not begin as such files do"):
        load(tmp_path / name)
    assert not [path for path in (tmp_path / "cache").glob("*") if path.is_dir()]


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(folder, device):
    """Told before weights are read."""
    with pytest.raises(ConfigError, match="device"):
        loading.load_model(folder, ModelConfig(source=str(folder), device=device))


def test_blocks_come_from_memory_or_are_refused_with_numbers():
    """kv_blocks wins; memory is divided by the block's size; fewer than one full context needs is an error."""
    model = LlamaForCausalLM(CONFIGS["llama"]()).eval()
    backend = paged_transformers.PagedTransformers(model, None)  # 64 positions: 4 blocks of 16
    each = backend.bytes_per_block(16)
    assert loading.derive_blocks(ModelConfig(kv_blocks=4), backend, 16, 8, 0) == 4
    assert loading.derive_blocks(ModelConfig(kv_memory_gib=1.0), backend, 16, 8, 0) == 2**30 // each
    with pytest.raises(ConfigError, match=r"gives 3 KV blocks of 16 positions .* needs 4"):
        loading.derive_blocks(ModelConfig(kv_blocks=3), backend, 16, 8, 0)
    assert loading.derive_blocks(ModelConfig(), backend, 16, 8, 7 * each + 1) == 7
    with pytest.raises(ConfigError, match=r"what memory is free leaves .* gives 3 KV blocks"):
        loading.derive_blocks(ModelConfig(), backend, 16, 8, 3 * each)
    with pytest.raises(ConfigError, match="kv_memory_gib 1e-06 gives 0"):
        loading.derive_blocks(ModelConfig(kv_memory_gib=1e-6), backend, 16, 8, 0)


def test_a_cached_folder_is_built_once_and_never_seen_half_done(tmp_path, monkeypatch):
    """A build that fails leaves nothing; the next one succeeds; the one after does not build."""
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path))
    built = []

    def failing(folder: Path) -> None:
        (folder / "half").touch()
        raise ConfigError("stopped")

    def working(folder: Path) -> None:
        built.append(folder)
        (folder / "whole").touch()

    with pytest.raises(ConfigError, match="stopped"):
        cache.built_once("thing", failing)
    assert not (tmp_path / "thing").exists()
    assert cache.built_once("thing", working) == cache.built_once("thing", working) == tmp_path / "thing"
    assert len(built) == 1
    assert [path.name for path in (tmp_path / "thing").iterdir() if path.name != cache.LISTED] == ["whole"]
    assert not list(tmp_path.glob("*.partial-*"))


def test_worker_environment_is_known_without_torch():
    """It must be set before torch starts its thread pools, so importing it may not load torch."""
    program = (
        "import sys; from specserve.models import threads; "
        "assert 'torch' not in sys.modules; "
        "assert threads.cpu_worker_environment(2)['OMP_NUM_THREADS'] == '2'; "
        "assert 'OMP_NUM_THREADS' not in threads.cpu_worker_environment(0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
