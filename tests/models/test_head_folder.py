"""Draft heads as they are published: what is read, and what is refused, in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_heads
import torch
from safetensors.torch import load_file, save_file

from specserve.check import report
from specserve.config import Config, ModelConfig, parse
from specserve.drafting import eagle, worker
from specserve.errors import ConfigError
from specserve.models import _head_folder, loading
from specserve.verification import verifier

VOCAB = 12


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_heads.few_words(tmp_path_factory.mktemp("target"), VOCAB, layers=6)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that are put together live as long as the test."""
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "cache"))


def config(target: Path | str, head: Path, speculator: str = "eagle", **model) -> Config:
    shared = {"device": "cpu", "kv_blocks": 64, "context_length": 64}
    draft = {"speculator": speculator, "model": {"source": str(head), **shared, **model}}
    return parse({"target": {"source": str(target), **shared}, "draft": draft, "engine": {"block_tokens": 4}})


def changed(folder: Path, **weights: torch.Tensor | None) -> Path:
    """The folder with other weights, None for none."""
    path = folder / "model.safetensors"
    found = {name: tensor for name, tensor in (load_file(path) | weights).items() if tensor is not None}
    save_file(found, path)
    return folder


def completed(target: Path, head: Path, **model) -> Path:
    return loading.prepare(config(target, head, **model).draft_model, lambda _: None, role="draft")


def test_a_head_shares_its_targets_parts_where_it_has_none(target: Path, tmp_path: Path) -> None:
    """EAGLE without embedding and head gets the target's; one with its own keeps them."""
    theirs = load_file(target / "model.safetensors")
    shared = load_file(completed(target, tiny_heads.eagle(tmp_path / "a", vocab_size=VOCAB)) / "model.safetensors")
    assert torch.equal(shared["embed_tokens.weight"], theirs["model.embed_tokens.weight"])
    assert torch.equal(shared["lm_head.weight"], theirs["lm_head.weight"])
    folder = tiny_heads.eagle(tmp_path / "b", vocab_size=VOCAB, own=True)
    own = load_file(completed(target, folder) / "model.safetensors")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(own[name], load_file(folder / "model.safetensors")[name])


def test_the_id_map_of_a_reduced_vocabulary_is_read(target: Path, tmp_path: Path) -> None:
    """d2t holds differences: place i of the head speaks of id i + d2t[i]."""
    folder = tiny_heads.eagle3(tmp_path / "head", vocab_size=VOCAB, read=(1, 3, 4), spoken=5)
    ids = load_file(completed(target, folder) / "model.safetensors")["ids"]
    spoken = load_file(folder / "model.safetensors")["t2d"].nonzero().flatten()
    assert ids.tolist() == spoken.tolist()


def test_names_may_have_a_prefix_and_the_layer_another_name(target: Path, tmp_path: Path) -> None:
    """`model.layers.0.` is what others call `midlayer.`: the same head."""
    folder = tiny_heads.eagle3(tmp_path / "head", vocab_size=VOCAB, read=(1, 3, 4), spoken=5)
    plain = load_file(completed(target, folder) / "model.safetensors")
    weights = load_file(folder / "model.safetensors")
    save_file(
        {f"model.{name.replace('midlayer', 'layers.0')}": tensor for name, tensor in weights.items()},
        folder / "model.safetensors",
    )
    other = load_file(completed(target, folder) / "model.safetensors")
    assert plain.keys() == other.keys()
    assert all(torch.equal(plain[name], other[name]) for name in plain)


def test_pickled_weights_need_leave(target: Path, tmp_path: Path) -> None:
    """Most published heads are .bin files under an ordinary model's name; they are read only with leave."""
    folder = tiny_heads.eagle(tmp_path / "head", vocab_size=VOCAB)
    plain = load_file(completed(target, folder) / "model.safetensors")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match="allow_pickle_weights"):
        completed(target, folder)
    pickled = load_file(completed(target, folder, allow_pickle_weights=True) / "model.safetensors")
    assert all(torch.equal(plain[name], pickled[name]) for name in plain)


def test_layers_are_read_from_both_places_of_the_configuration(target: Path, tmp_path: Path) -> None:
    """At top, within `eagle_config`, or by the published default: 2, half, and the last but two."""
    folder = tiny_heads.eagle3(tmp_path / "head", vocab_size=VOCAB, read=(1, 3, 4), spoken=5)
    assert eagle.layers_read(config(target, folder)) == (1, 3, 4)
    told = json.loads((folder / "config.json").read_text())
    ids = told.pop("eagle_config")["eagle_aux_hidden_state_layer_ids"]
    (folder / "config.json").write_text(json.dumps(told | {"eagle_aux_hidden_state_layer_ids": ids}))
    assert eagle.layers_read(config(target, folder)) == (1, 3, 4)
    (folder / "config.json").write_text(json.dumps(told))
    assert eagle.layers_read(config(target, folder)) == (2, 3, 3)
    assert eagle.layers_read(config(target, tiny_heads.eagle(tmp_path / "one", vocab_size=VOCAB))) == ()


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"fc.weight": torch.zeros(64, 96)}, "does not fit a target of width 64"),
        ({"fc.weight": None}, "no fc.weight"),
        ({"d2t": torch.arange(5) + 90}, "d2t maps 5 places to ids below 12"),
        ({"d2t": -torch.arange(5)}, "d2t maps 5 places"),
        ({"d2t": None}, "no d2t says which"),
        ({"lm_head.weight": torch.zeros(5, 32)}, "must bring its own"),
        ({"norm.weight": None}, "do not fit"),
        ({"strange.weight": torch.zeros(3)}, "do not fit"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(target: Path, tmp_path: Path, weights, words: str) -> None:
    """Whatever is missing, left over or of another shape is named, and nothing is served."""
    folder = changed(tiny_heads.eagle3(tmp_path / "head", vocab_size=VOCAB, read=(1, 3, 4), spoken=5), **weights)
    with pytest.raises(ConfigError, match=words):
        worker.build(config(target, folder))


def test_layers_that_the_target_lacks_are_refused(target: Path, tmp_path: Path) -> None:
    """Both workers say so when they start."""
    folder = tiny_heads.eagle3(tmp_path / "head", vocab_size=VOCAB, read=(1, 3, 6), spoken=5)
    for build in (worker.build, verifier.build):
        with pytest.raises(ConfigError, match="with 6; was it trained for another"):
            build(config(target, folder))


def test_heads_and_models_are_not_taken_for_each_other(target: Path, tmp_path: Path) -> None:
    """Each speculator says what the other one is for; a head is no target; an emulated target shows no states."""
    head = tiny_heads.eagle(tmp_path / "head", vocab_size=VOCAB)
    with pytest.raises(ConfigError, match=r"set draft\.speculator to eagle"):
        worker.build(config(target, head, "small_model"))
    with pytest.raises(ConfigError, match="use small_model"):
        worker.build(config(target, target))
    with pytest.raises(ConfigError, match="cannot be a target"):
        verifier.build(config(head, head))
    with pytest.raises(ConfigError, match="no draft head at"):
        verifier.build(config(target, target))
    with pytest.raises(ConfigError, match="which 'emulated' does not show"):
        verifier.build(config("emulated", head))


def test_check_looks_at_a_head_as_at_a_draft(target: Path, tmp_path: Path) -> None:
    """`specserve check` finds no problem with a head that fits."""
    findings = report(config(target, tiny_heads.eagle(tmp_path / "head", vocab_size=VOCAB)))
    topics = {finding.topic: finding for finding in findings}
    assert not [finding for finding in findings if finding.problem and finding.topic != "port"]
    assert "12 tokens in common" in topics["vocabulary"].text
    assert "eagle in a draft worker" in topics["speculator"].text


def test_an_ordinary_model_is_no_head(target: Path) -> None:
    """A folder is a head by what it holds."""
    assert not _head_folder.is_head(target, ModelConfig(source=str(target)))
    assert loading.prepare(ModelConfig(source=str(target)), lambda _: None) == target
