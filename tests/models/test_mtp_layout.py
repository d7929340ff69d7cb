"""Multi-token-prediction heads as they are published: what is read, and what is refused, in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_heads
import tiny_mtp
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from specserve.check import report
from specserve.config import Config, parse
from specserve.errors import ConfigError
from specserve.local import LocalEngine
from specserve.models import _mtp_layout
from specserve.verification import verifier

VOCAB = 12


def config(target: Path | str, heads: Path | str | None = None, **engine) -> Config:
    shared = {"device": "cpu", "kv_blocks": 64, "context_length": 64}
    return parse(
        {
            "target": {"source": str(target), **shared},
            "draft": {"speculator": "mtp", "model": {"source": str(heads or target)}},
            "engine": {"block_tokens": 4, **engine},
        }
    )


def made(folder: Path, layout: str = "deepseek", count: int = 2) -> Path:
    return tiny_mtp.target(folder, layout, tiny_mtp.heads(count), vocab_size=VOCAB)


@pytest.mark.parametrize(("layout", "count"), [("deepseek", 2), ("qwen", 1), ("megatron", 2)])
def test_every_layout_is_the_same_heads(tmp_path: Path, layout: str, count: int) -> None:
    """Whatever their names, and however matrices are stored together: the tensors that were written come back."""
    written = tiny_mtp.heads(count)
    folder = made(tmp_path / "target", layout, count)
    description, names = _mtp_layout.find(folder, tiny_mtp.LAYERS)
    config = LlamaConfig(num_attention_heads=tiny_heads.HEADS, num_key_value_heads=tiny_heads.KV_HEADS)
    read = _mtp_layout.read(names, config)
    assert description == _mtp_layout.MtpDescription(count, pair=layout == "deepseek")
    wanted = {
        f"heads.{number}.{name if name.startswith('block.') else f'{name}.weight'}": tensor
        for number, head in enumerate(written)
        for name, tensor in head.items()
    }
    assert read.keys() == wanted.keys()
    assert all(torch.equal(read[name], wanted[name]) for name in wanted)


def test_the_experts_of_a_mixture_are_stacked(tmp_path: Path) -> None:
    """Published one by one; read as one tensor each for gate and up, and for down, in their order."""
    random = tiny_heads._random(3)
    experts = {
        f"model.layers.3.mlp.experts.{e}.{part}_proj.weight": random(*shape)
        for e in (10, 2, 1, 0, 3, 4, 5, 6, 7, 8, 9)
        for part, shape in (("gate", (6, 4)), ("up", (6, 4)), ("down", (4, 6)))
    }
    save_file(experts, tmp_path / "model.safetensors")
    _, names = _mtp_layout.find(tmp_path, 3)
    read = _mtp_layout.read(names, LlamaConfig())
    assert {name: list(tensor.shape) for name, tensor in read.items()} == {
        "heads.0.block.mlp.experts.gate_up_proj": [11, 12, 4],
        "heads.0.block.mlp.experts.down_proj": [11, 4, 6],
    }
    gate, up = (experts[f"model.layers.3.mlp.experts.10.{part}_proj.weight"] for part in ("gate", "up"))
    assert torch.equal(read["heads.0.block.mlp.experts.gate_up_proj"][10], torch.cat([gate, up]))


def test_a_target_without_heads_is_refused(tmp_path: Path) -> None:
    """At start and by `specserve check`, with the names that were looked for."""
    folder = tiny_heads.few_words(tmp_path / "target", VOCAB, layers=3)
    words = r"holds no multi-token-prediction heads \(none of model\.layers\.3\.eh_proj\.weight"
    with pytest.raises(ConfigError, match=words):
        verifier.build(config(folder))
    (problem,) = [finding for finding in report(config(folder)) if finding.problem and finding.topic == "draft"]
    assert "holds no multi-token-prediction heads" in problem.text


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (
            {"model.layers.3.eh_proj.weight": torch.zeros(64, 64)},
            r"eh_proj\.weight is \[64, 64\], but heads of a target",
        ),
        (
            {"model.layers.3.enorm.weight": torch.zeros(32)},
            r"do not fit its layers: .*size mismatch for heads\.0\.enorm",
        ),
        ({"model.layers.3.hnorm.weight": None}, r"do not fit its layers: .*Missing key.*heads\.0\.hnorm"),
        ({"model.layers.3.strange.weight": torch.zeros(3)}, r"do not fit its layers: .*Unexpected key"),
        ({"model.layers.6.hnorm.weight": torch.zeros(64)}, r"heads \[0, 1, 3\] only; is a file of it missing"),
        ({"mtp.layers.0.self_attention.linear_qkv.weight": torch.zeros(9, 64)}, r"9 rows, not a multiple"),
    ],
)
def test_heads_that_do_not_fit_are_refused(tmp_path: Path, weights: dict, words: str) -> None:
    """Whatever is missing, left over or of another shape is named, and nothing is served."""
    folder = made(tmp_path / "target")
    path = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in (load_file(path) | weights).items() if tensor is not None}
    save_file(kept, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=words):
        verifier.build(config(folder))


def test_heads_cannot_draft_ahead_of_a_verdict(tmp_path: Path) -> None:
    """Outcomes above 0 are refused at start and by `specserve check`; `auto` means 0."""
    folder = made(tmp_path / "target")
    with pytest.raises(ConfigError, match=r"set engine\.outcomes to 0 or auto"):
        LocalEngine(config(folder, outcomes=1))
    assert any("set engine.outcomes to 0 or auto" in finding.text for finding in report(config(folder, outcomes=1)))


def test_a_target_that_shows_no_states_is_refused() -> None:
    """An emulated one has none."""
    with pytest.raises(ConfigError, match="which 'emulated' does not show"):
        verifier.build(config("emulated"))
    assert any("which 'emulated' does not show" in finding.text for finding in report(config("emulated")))


def test_heads_may_be_in_a_folder_of_their_own(tmp_path: Path) -> None:
    """Under the names that they would have in the target's."""
    both, target = made(tmp_path / "both"), tiny_heads.few_words(tmp_path / "target", VOCAB, layers=3)
    with LocalEngine(config(target, both)) as running:
        answer = running.generate([[1, 2, 3]], max_tokens=8, ignore_eos=True)[0]
    assert answer.stats.drafted_tokens > 0


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"target_width": 48}, "made for a target of width 48, and this one is 32 wide"),
        ({"vocab_size": 13}, "says 13 ids, and its target 12"),
        ({"head_dim": 16, "global_head_dim": 16}, "asks with 16 numbers, and the keys of the target's layer 2 have 8"),
    ],
)
def test_an_assistant_that_does_not_fit_is_refused(tmp_path: Path, told: dict, words: str) -> None:
    """A head at a constant position belongs to one target: width, vocabulary and keys tell."""
    target = tiny_mtp.gemma(tmp_path / "target", vocab_size=VOCAB)
    head = tiny_mtp.assistant(tmp_path / "head", **{"vocab_size": VOCAB} | told)
    with pytest.raises(ConfigError, match=words):
        verifier.build(config(target, head))


def test_an_assistant_of_a_target_of_another_family_is_refused(tmp_path: Path) -> None:
    """A Llama does not say which of its layers' keys others may read."""
    target = tiny_heads.few_words(tmp_path / "target", VOCAB, layers=3)
    head = tiny_mtp.assistant(tmp_path / "head", vocab_size=VOCAB, target_width=64)
    with pytest.raises(ConfigError, match="does not say which layers share keys and values"):
        verifier.build(config(target, head))


def test_check_tells_of_heads(tmp_path: Path) -> None:
    """`specserve check` finds no problem, and says how many there are and where they live."""
    findings = list(report(config(made(tmp_path / "target"))))
    assert not [finding for finding in findings if finding.problem and finding.topic != "port"]
    told = {finding.topic: finding.text for finding in findings}
    assert "mtp beside the verifier" in told["speculator"]
    assert "2 heads at advancing positions" in told["draft"]
    target = tiny_mtp.gemma(tmp_path / "gemma", vocab_size=VOCAB)
    head = tiny_mtp.assistant(tmp_path / "head", vocab_size=VOCAB)
    told = {finding.topic: finding.text for finding in report(config(target, head))}
    assert "a head at a constant position" in told["draft"]
    assert json.loads((head / "config.json").read_text())["model_type"] == "gemma4_assistant"
