"""The forward in one call of C says what the model's own modules say, whatever shapes a model and a batch have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_heads
import torch
from tiny_causal import SMALL
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specserve.config import ModelConfig
from specserve.errors import ConfigError
from specserve.models import RaggedBatch, TokenTree, _panels, eagle, loading
from specserve.models._reduced_head import ReducedHead
from specserve.models._stretches import Stretch, ragged
from specserve.models.paged_transformers import PagedTransformers

pytestmark = pytest.mark.skipif(_panels.kernels() is None, reason="needs a C compiler with OpenMP")

BLOCK, BLOCKS = 8, 120
LONG = SMALL | {"max_position_embeddings": 512}
ODD = LONG | {"hidden_size": 39, "intermediate_size": 53, "num_attention_heads": 3, "num_key_value_heads": 1}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LONG)),
    "odd widths": lambda: LlamaForCausalLM(LlamaConfig(**ODD, head_dim=22)),
    "head dim 80, a head per key head": lambda: LlamaForCausalLM(
        LlamaConfig(**LONG | {"num_key_value_heads": 4}, head_dim=80)
    ),
    "head dim 128": lambda: LlamaForCausalLM(LlamaConfig(**LONG, head_dim=128)),
    "biases": lambda: LlamaForCausalLM(LlamaConfig(**ODD, head_dim=16, attention_bias=True, mlp_bias=True)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**LONG, tie_word_embeddings=True)),
    "window": lambda: MistralForCausalLM(MistralConfig(**LONG, sliding_window=70)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**LONG)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**ODD, head_dim=24)),
}


@pytest.fixture
def three_threads():
    """More than cores, too."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def backend_of(name: str, *, native: bool = True) -> PagedTransformers:
    """With weights and biases of its own, its pages full of garbage."""
    torch.manual_seed(0)
    model = MODELS[name]().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.2 * torch.randn_like(parameter))
    return backend_with(model, native=native)


def backend_with(model: torch.nn.Module, *, native: bool) -> PagedTransformers:
    backend = PagedTransformers(model, None)
    assert backend._native is not None
    if not native:
        backend._flat = backend._native = None
    backend.allocate(BLOCKS, BLOCK)
    for pages in (*backend.pages.keys.values(), *backend.pages.values.values()):
        pages.fill_(float("nan"))
    return backend


def text(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, SMALL["vocab_size"], count)


def table(seed: int) -> np.ndarray:
    """38 blocks anywhere."""
    return np.random.default_rng(seed).permutation(BLOCKS)[:38].astype(np.int32)


def rounds() -> list[RaggedBatch]:
    """A prompt in pieces, the last beside two other rows: one that shares its first blocks, and a lone token."""
    first, second = text(1, 150), text(2, 13)
    shared = np.concatenate([table(1)[:5], [t for t in table(3) if t not in table(1)][:20]]).astype(np.int32)
    apart = np.array([block for block in range(BLOCKS) if block not in table(1) and block not in shared][:3], np.int32)
    return [
        ragged([Stretch(0, first[:70], table(1), 0)]),
        ragged([Stretch(70, first[70:131], table(1), 3)]),
        ragged(
            [
                Stretch(131, first[131:], table(1), 19),
                Stretch(40, second, shared, 13),
                Stretch(0, second[:1], apart, 1),
            ]
        ),
    ]


def logits_of(backend: PagedTransformers) -> torch.Tensor:
    return torch.cat([backend.forward(batch) for batch in rounds()])


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    scale = expected[expected.isfinite()].abs().max().item()
    torch.testing.assert_close(found, expected, atol=1e-4 * scale, rtol=0)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_it_says_what_the_models_own_modules_say(name: str) -> None:
    """Prompts in pieces, shared and scattered blocks, rows in each other's company, garbage in all other pages."""
    close(logits_of(backend_of(name)), logits_of(backend_of(name, native=False)))


@pytest.mark.parametrize("count", [1, 2, 5, 12, 13, 40, 64])
def test_any_number_of_rows(count: int) -> None:
    """A token each, as in a round of plain decoding."""
    rows = [Stretch(0, text(row, 1), np.array([row], np.int32), 1) for row in range(count)]
    close(backend_of("odd widths").forward(ragged(rows)), backend_of("odd widths", native=False).forward(ragged(rows)))


@pytest.mark.parametrize("name", ["odd widths", "window"])
def test_bits_depend_on_neither_company_nor_threads(name: str, three_threads) -> None:
    """A long context read at once or by few, which share its keys out among threads, by one to three of them."""
    tokens, company = text(1, 300), text(2, 40)
    apart = np.array([block for block in range(BLOCKS) if block not in table(1)][:5], np.int32)
    found = []
    for threads in (1, 2, 3):
        three_threads(threads)
        backend = backend_of(name)
        whole = backend.forward(ragged([Stretch(0, tokens, table(1), 300), Stretch(0, company, apart, 40)]))
        alone = backend.forward(ragged([Stretch(299, tokens[299:], table(1), 1)]))
        assert torch.equal(alone[0], whole[299])
        found.append(whole)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("name", ["llama", "window"])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", [3, 60, 300])
def test_bits_do_not_depend_on_how_many_logits_are_wanted(name: str, threads: int, count: int, three_threads) -> None:
    """Behind the last attention only the tokens go on whose logits are wanted; what is written of all is the same."""
    three_threads(threads)
    tokens, company = text(1, count), text(2, 5)
    apart = np.array([block for block in range(BLOCKS) if block not in table(1)][:1], np.int32)
    found = []
    for wanted, beside in ((count, 5), (count, 1), (2, 5), (1, 1), (1, 0), (0, 0)):
        backend = backend_of(name)
        logits = backend.forward(ragged([Stretch(0, tokens, table(1), wanted), Stretch(0, company, apart, beside)]))
        found.append((logits[:wanted].flip(0), logits[wanted:].flip(0), backend.pages))
    (first, second, pages), *others = found
    for mine, theirs, written in others:
        assert torch.equal(mine, first[: len(mine)])
        assert torch.equal(theirs, second[: len(theirs)])
        for each, ours in ((written.keys, pages.keys), (written.values, pages.values)):
            assert all(torch.equal(each[layer].nan_to_num(), ours[layer].nan_to_num()) for layer in ours)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("wanted", "seen"), [(1, 5), (5, 1), (3, 3), (0, 4), (4, 0), (0, 0), (2, 59), (60, 2), (1, 60)]
)
def test_only_states_that_are_read_are_worked_out(wanted: int, seen: int, threads: int, three_threads) -> None:
    """Of another number of tokens than show logits, which are the same bits; so are the logits, and what is written."""
    three_threads(threads)
    tokens, company = text(1, 60), text(2, 5)
    apart = np.array([block for block in range(BLOCKS) if block not in table(1)][:1], np.int32)
    found = []
    for shown in (None, seen):
        backend = backend_of("llama")
        backend.observe([])
        rows = [Stretch(0, company, apart, 2, seen=0 if shown == seen else None)]
        logits = backend.forward(ragged([Stretch(0, tokens, table(1), wanted, seen=shown), *rows]))
        found.append((logits, backend.observed()[60 - seen : 60], backend.pages))
    (first, states, pages), (again, same, written) = found
    assert torch.equal(first, again)
    assert torch.equal(states, same)
    for each, ours in ((written.keys, pages.keys), (written.values, pages.values)):
        assert all(torch.equal(each[layer].nan_to_num(), ours[layer].nan_to_num()) for layer in ours)


def test_no_logits_may_be_wanted() -> None:
    """A round that only writes."""
    assert backend_of("llama").forward(ragged([Stretch(0, text(1, 9), table(1), 0)])).shape == (0, SMALL["vocab_size"])


def test_a_long_tree_within_a_window() -> None:
    """A window that ends among a tree's ancestors, before it and within it."""
    parents = np.array([-1, -1, *range(80)])
    tokens = text(4, 20 + len(parents))
    batch = ragged([Stretch(0, tokens, table(2), len(tokens), tree=TokenTree(20, parents))])
    close(backend_of("window").forward(batch), backend_of("window", native=False).forward(batch))


def test_a_head_of_some_ids_speaks_of_these_only() -> None:
    """As a trained draft's."""
    found = []
    for native in (True, False):
        torch.manual_seed(0)
        model = MODELS["llama"]().eval().requires_grad_(False)
        ids = torch.randperm(SMALL["vocab_size"])[:37]
        model.set_output_embeddings(ReducedHead(torch.randn(37, 32), ids, SMALL["vocab_size"]))
        found.append(logits_of(backend_with(model, native=native)))
    assert (found[0].isfinite().sum(-1) == 37).all()
    close(*found)


@pytest.mark.parametrize("layers", [[], [0, 2, 1]])
def test_hidden_states_come_out_of_the_same_call(layers: list[int]) -> None:
    """The last ones, or those that enter layers, of all tokens; and logits stay what they are."""
    shown = []
    for native in (True, False):
        backend = backend_of("qwen3", native=native)
        backend.observe(layers)
        logits = logits_of(backend)
        shown.append(backend.observed())
        close(logits, logits_of(backend_of("qwen3")))
    assert shown[0].shape == (33, 39 * max(1, len(layers)))
    close(*shown)


def test_states_that_nobody_observes_and_layers_that_are_not_there_are_refused() -> None:
    """As without a compiler."""
    backend = backend_of("llama")
    with pytest.raises(ConfigError, match="nobody observes"):
        backend.observed()
    with pytest.raises(ConfigError, match="has no layers"):
        backend.observe([3])


@pytest.mark.parametrize("kind", ["eagle", "two layers", "eagle3"])
def test_heads_go_on_from_states_as_their_own_modules_do(tmp_path: Path, kind: str) -> None:
    """A row with its past cut off, a tree, and a third row, read in two rounds."""
    vocabulary = 60
    target = tiny_heads.few_words(tmp_path / "target", vocabulary, layers=3)
    folder = tmp_path / "head"
    if kind == "eagle3":
        tiny_heads.eagle3(folder, vocab_size=vocabulary, read=(0, 1, 2), spoken=25)
    else:
        tiny_heads.eagle(folder, vocab_size=vocabulary, layers=1 if kind == "eagle" else 2)
    config = ModelConfig(source=str(folder), target=str(target), device="cpu")
    found = [
        torch.cat([torch.cat(each, -1) for each in _head_rounds(config, native=native)]) for native in (True, False)
    ]
    close(*found)


def _head_rounds(config: ModelConfig, *, native: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    head = eagle.build(config, loading.prepare(config, lambda _: None))
    assert head._native is not None
    if not native:
        head._native = None
    head.allocate(BLOCKS, BLOCK)
    noise = torch.Generator().manual_seed(1)
    tokens = text(1, 90) % head.vocab_size
    tree = TokenTree(11, np.array([-1, -1, 0, 0, 2, 1]))
    batches = [
        (ragged([Stretch(1, tokens[:10], table(1), 2), Stretch(30, tokens[10:80], table(2)[:14], 3)]), [1, 30]),
        (
            ragged([Stretch(11, tokens[80:86], table(1), 6, tree=tree), Stretch(100, tokens[:1], table(2)[:14], 1)]),
            [1, 35],
        ),
    ]
    return [
        head.forward_from(batch, torch.randn(len(batch.tokens), head.width, generator=noise), np.array(origins))
        for batch, origins in batches
    ]


def test_what_it_does_not_compute_takes_the_other_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another activation; and any model where there is no compiler."""
    gelu = LlamaForCausalLM(LlamaConfig(**LONG, hidden_act="gelu")).eval()
    assert PagedTransformers(gelu, None)._native is None
    monkeypatch.setattr(_panels, "kernels", lambda: None)
    assert PagedTransformers(MODELS["llama"]().eval(), None)._native is None


@pytest.mark.parametrize("broken", ["window", "scaling", "rope_scaling", "query_norm"])
def test_a_wrong_step_shows(broken: str) -> None:
    """What C reads of a model matters: the comparison above can fail."""
    name = "window" if broken == "window" else "qwen3"
    right, wrong = backend_of(name), backend_of(name)
    part = wrong._native._layers[0] if broken in ("window", "query_norm") else wrong._native._decoder
    setattr(part, broken, {"window": 0, "query_norm": None}.get(broken, 0.7))
    assert (logits_of(right) - logits_of(wrong)).abs().max() > 1e-3


def test_a_room_is_made_for_the_largest_step_and_kept() -> None:
    """A smaller step uses what is there."""
    backend = backend_of("llama")
    batch = rounds()[0]
    backend.forward(batch)
    kept = backend._native._room.data_ptr()
    backend.forward(ragged([Stretch(70, text(1, 1), table(1), 1)]))
    assert backend._native._room.data_ptr() == kept


@pytest.mark.parametrize(
    ("field", "spoilt"),
    [
        ("tokens", [4, -1, 4, 4]),
        ("tokens", [4, SMALL["vocab_size"], 4, 4]),
        ("wanted", [4]),
        ("wanted", [-1]),
        ("wanted", [3, 1]),
        ("wanted", [1, 1]),
        ("tables", [[BLOCKS, 0], [1, 0]]),
        ("tables", [[2, 0], [-1, 0]]),
        ("positions", [0, 1, 2, 2 * BLOCK]),
        ("positions", [0, 1, 2 * BLOCK - 1, 2 * BLOCK]),
        ("positions", [-1, 0, 0, 1]),
        ("offsets", [0, 2, 5]),
        ("offsets", [0, 4, 4]),
        ("offsets", [1, 2, 4]),
        ("offsets", [0, 4]),
        ("offsets", [0, -(2**63), 4]),
        ("positions", [0, 1]),
    ],
)
def test_what_points_outside_is_refused_before_c_follows_it(field, spoilt):
    """A spoilt batch raises as it does in torch, and the next one is computed as ever."""
    backend = backend_of("llama")
    parts = {
        "tokens": text(1, 4),
        "positions": np.array([0, 1, 0, 1]),
        "offsets": np.array([0, 2, 4]),
        "tables": np.array([[2, 0], [1, 0]], np.int32),
        "wanted": np.array([1, 3]),
    }
    before = backend.forward(RaggedBatch(**parts))
    spoilt_parts = parts | {field: np.array(spoilt, parts[field].dtype)}
    with pytest.raises(IndexError):
        backend.forward(RaggedBatch(**spoilt_parts))
    with pytest.raises(TypeError, match=r"without gaps, found (int64|int32)"):
        backend.forward(RaggedBatch(**parts | {field: parts[field].astype("int64" if field == "tables" else "int32")}))
    assert torch.equal(backend.forward(RaggedBatch(**parts)), before)


@pytest.mark.parametrize("seen", [[-1], [4], [-(2**63)]])
def test_states_of_tokens_that_are_not_there_are_refused(seen):
    """Before C follows it."""
    backend = backend_of("llama")
    backend.observe([])
    batch = ragged([Stretch(0, text(1, 4), table(1), 1)])
    with pytest.raises(IndexError, match="states are read"):
        backend.forward(replace(batch, seen=np.array(seen)))


def test_a_position_that_leaves_its_row_is_refused_where_its_ends_do_not():
    """Its block is named by nothing that the ends reach, and may be anywhere."""
    backend = backend_of("llama")
    wild = {"offsets": np.array([0, 3]), "tables": np.array([[2, 100_000_000]], np.int32), "wanted": np.array([2])}
    with pytest.raises(IndexError, match="follow each other"):
        backend.forward(RaggedBatch(tokens=text(1, 3), positions=np.array([0, BLOCK, 2]), **wild))


def _head(tmp_path: Path, blocks: int) -> eagle.EagleHead:
    """One with pages full of something."""
    target = tiny_heads.few_words(tmp_path / "target", 60, layers=3)
    tiny_heads.eagle(tmp_path / "head", vocab_size=60, layers=1)
    config = ModelConfig(source=str(tmp_path / "head"), target=str(target), device="cpu")
    head = eagle.build(config, loading.prepare(config, lambda _: None))
    head.allocate(blocks, BLOCK)
    noise = torch.Generator().manual_seed(2)
    for pages in (*head.pages.keys.values(), *head.pages.values.values()):
        pages.normal_(generator=noise)
    return head


@pytest.mark.parametrize("position", [255, 256, 511, 512, 513, 1024])
def test_a_head_sees_all_of_a_long_past(tmp_path: Path, position: int) -> None:
    """Each count of keys, where they fill their last span and where they begin another, from the first position on."""
    blocks = position // BLOCK + 1
    head = _head(tmp_path, blocks)
    batch = ragged([Stretch(position, np.array([7]), np.arange(blocks, dtype=np.int32), 1)])
    found = []
    for native in (head._native, None):
        head._native = native
        given = torch.randn(1, head.width, generator=torch.Generator().manual_seed(3))
        found.append(torch.cat(head.forward_from(batch, given, np.zeros(1, np.int64)), -1))
    close(*found)


@pytest.mark.parametrize("origins", [np.zeros(1, np.int32), np.zeros(2, np.int64)])
def test_origins_of_another_type_or_number_are_refused(tmp_path: Path, origins: np.ndarray) -> None:
    """C would read beyond them."""
    head = _head(tmp_path, 1)
    batch = ragged([Stretch(1, np.array([7]), np.zeros(1, np.int32), 1)])
    with pytest.raises((TypeError, IndexError), match="origins must be"):
        head.forward_from(batch, torch.randn(1, head.width), origins)
