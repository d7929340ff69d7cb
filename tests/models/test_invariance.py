"""Batch invariance: the logits of a position are the same bits in any company and cut in any way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_causal import BLOCK, BLOCKS, CONFIGS, SMALL, VOCABULARY, own_logits, paged, ragged, random_tokens, tiny
from tiny_models import tiny_llama
from transformers import LlamaConfig, LlamaForCausalLM

from specserve.config import ModelConfig, parse
from specserve.errors import ConfigError
from specserve.models import _invariance, _joint, _linear, _panels, paged_transformers, recurrent_transformers
from specserve.models._worker import load_backend

LENGTH = 36


@pytest.fixture(params=["our own", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where there is a compiler, and where there is none."""
    if request.param == "torch":
        monkeypatch.setattr(_panels, "kernels", lambda: None)
    return request.param


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything by torch, whose kernels know company."""
    monkeypatch.setattr(_panels, "kernels", lambda: None)


def invariant(family: str) -> paged_transformers.PagedTransformers:
    """A backend in that mode, with garbage in its pages."""
    backend = paged(family)
    backend.make_batch_invariant()
    return backend


def token_by_token(backend, tokens: np.ndarray, table: list[int]) -> torch.Tensor:
    """Logits of every position, each read in a forward of its own."""
    rows = [backend.forward(ragged([(tokens[p : p + 1], p, table)])) for p in range(len(tokens))]
    return torch.cat(rows)


def in_company(backend, texts: list[np.ndarray], seed: int) -> list[torch.Tensor]:
    """Logits of all texts, read in rounds of random rows and random pieces, in scattered blocks."""
    random = np.random.default_rng(seed)
    tables = random.permutation(BLOCKS).reshape(len(texts), -1).tolist()
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    done = [0] * len(texts)
    while any(at < len(text) for at, text in zip(done, texts, strict=True)):
        rows = [row for row in random.permutation(len(texts)).tolist() if done[row] < len(texts[row])]
        rows = rows[: int(random.integers(1, len(rows) + 1))]
        pieces = [texts[row][done[row] : done[row] + int(random.integers(1, 9))] for row in rows]
        logits = backend.forward(
            ragged([(piece, done[row], tables[row]) for row, piece in zip(rows, pieces, strict=True)])
        )
        for row, part in zip(rows, logits.split([len(piece) for piece in pieces]), strict=True):
            found[row].append(part)
            done[row] += len(part)
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("family", sorted(CONFIGS))
@pytest.mark.usefixtures("kernels")
def test_logits_are_the_same_bits_in_any_company(family: str) -> None:
    """Every family, rounds of random rows and pieces; and they are the model's own, to rounding."""
    backend = invariant(family)
    texts = [random_tokens(seed, LENGTH) for seed in range(4)]
    alone = [token_by_token(backend, text, [3, 9, 1, 30, 22, 17, 5, 8, 2]) for text in texts]
    for seed in range(2):
        for expected, found in zip(alone, in_company(backend, texts, seed), strict=True):
            assert torch.equal(expected, found)
    if family != "phi3_longrope":  # the model itself changes its factors with the length of the batch
        torch.testing.assert_close(alone[0], own_logits(tiny(family), texts[0]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_no_logits_may_be_wanted(family: str) -> None:
    """A round that only fills the cache gives none, with a head of its own and with a shared one."""
    batch = ragged([(random_tokens(1, 6), 0, [0, 1])])
    assert invariant(family).forward(replace(batch, wanted=np.empty(0, dtype=np.int64))).shape == (0, VOCABULARY)


@pytest.mark.usefixtures("no_compiler")
def test_without_the_mode_company_shows() -> None:
    """The ordinary backend moves bits, so the test above could fail; the check at start says so in words."""
    backend = paged("llama")
    texts = [random_tokens(seed, LENGTH) for seed in range(4)]
    alone = token_by_token(backend, texts[0], list(range(9)))
    assert not torch.equal(alone, in_company(backend, texts, 0)[0])
    with pytest.raises(ConfigError, match="batch_invariant cannot be had"):
        _invariance.check(backend, BLOCKS, BLOCK)
    _invariance.check(invariant("llama"), BLOCKS, BLOCK)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("broken", ["_linear", "_RowByRow", "InvariantStep"])
def test_each_part_is_needed(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Without any one of products, activations and attention made invariant, the check at start finds it.

    But where this CPU's own are the same bits in any company, as those of some without AVX-512 are for these sizes.
    """
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL | {"intermediate_size": 1520})  # long sums, and no multiple of a vector's length
    if broken == "_RowByRow":  # activations of a joint product's part go row by row as it is
        monkeypatch.setattr(_joint, "_SAME_INPUT", ())
    backend = paged_transformers.PagedTransformers(LlamaForCausalLM(config).eval(), None)
    backend.allocate(BLOCKS, BLOCK)
    if broken == "_linear":
        for module in backend._model.modules():
            if isinstance(module, _linear.PackedLinear):
                module._product.fewest_rows = 1
        monkeypatch.setattr(_invariance._linear, "make_invariant", lambda model: None)
    elif broken == "_RowByRow":
        monkeypatch.setattr(_invariance, "_ACTIVATIONS", frozenset())
    backend.make_batch_invariant()
    if broken == "InvariantStep":
        backend._invariant = False
    texts = [random_tokens(seed, LENGTH) for seed in range(4)]
    alone = [token_by_token(backend, text, list(range(9))) for text in texts]
    company = [in_company(backend, texts, seed) for seed in range(3)]
    if all(torch.equal(mine, found) for each in company for mine, found in zip(alone, each, strict=True)):
        assert broken != "InvariantStep"
        pytest.skip("nothing to be found on this CPU")
    with pytest.raises(ConfigError, match="batch_invariant cannot be had"):
        _invariance.check(backend, BLOCKS, BLOCK)


def test_the_mode_is_refused_where_it_is_not_there() -> None:
    """Another dtype, and recurrent layers, are named."""
    model = tiny("llama").to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"float32 targets on a CPU; this one is torch\.bfloat16"):
        paged_transformers.PagedTransformers(model, None).make_batch_invariant()
    with pytest.raises(ConfigError, match="recurrent"):
        recurrent_transformers.RecurrentTransformers.make_batch_invariant(object())


@pytest.mark.usefixtures("no_compiler")
def test_the_target_is_invariant_and_the_draft_is_not(tmp_path) -> None:
    """`engine.batch_invariant` reaches the target only; a draft's rounding costs nothing but acceptance."""
    tiny_llama(tmp_path, seed=1)
    engine = parse({"engine": {"batch_invariant": True}}).engine
    model = ModelConfig(source=str(tmp_path), device="cpu", kv_blocks=200)
    target, _ = load_backend(model, "target", engine)
    draft, _ = load_backend(model, "draft", engine)
    assert (target._invariant, draft._invariant) == (True, False)
