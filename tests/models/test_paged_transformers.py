"""The paged backend says what the model itself says, however its rows are cut, mixed and scattered."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_causal import BLOCK, CONFIGS, SMALL, VOCABULARY, own_logits, paged, ragged, random_tokens, tiny
from transformers import (
    BartConfig,
    BloomConfig,
    BloomForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Phi3ForCausalLM,
    Qwen3NextConfig,
    T5Config,
)

from specserve.errors import ConfigError
from specserve.models import _refusals
from specserve.models.paged_transformers import PagedTransformers

FAMILIES = sorted(CONFIGS)


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def twins(config: LlamaConfig, context_length: int | None):
    """A Llama and a backend with the same weights."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(LlamaForCausalLM(deepcopy(config)).eval())
    return models[0], PagedTransformers(models[1], context_length)


def compositions(total: int):
    """Every way to cut `total` tokens into chunks."""
    if total == 0:
        yield ()
    for first in range(1, total + 1):
        for rest in compositions(total - first):
            yield (first, *rest)


def fed_in_chunks(backend, tokens, chunks, table):
    start, logits = 0, []
    for chunk in chunks:
        logits.append(backend.forward(ragged([(tokens[start : start + chunk], start, table)])))
        start += chunk
    return torch.cat(logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_to_cut_a_sequence_gives_the_models_own_logits(family):
    """All 64 compositions of 7 tokens, in a scattered block table, over garbage."""
    tokens = random_tokens(1, 7)
    # Seven positions are below LongRoPE's original eight, so the model itself takes the short factors here.
    expected = own_logits(tiny(family), tokens)
    backend = paged(family, 7)
    for chunks in compositions(7):
        close(fed_in_chunks(backend, tokens, chunks, [9, 3]), expected)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(data=st.data())
def test_rows_of_any_lengths_in_one_batch_do_not_see_each_other(family, data):
    """Rows at random places of their sequences, prefill beside decode, in scattered blocks, give their own logits."""
    model, backend = tiny(family), paged(family)
    count = data.draw(st.integers(2, 4))
    blocks = data.draw(st.permutations(range(40)))
    rows, expected = [], []
    for row in range(count):
        length = data.draw(st.integers(9, 38))  # above LongRoPE's original length: the model's own long factors
        cut = data.draw(st.integers(0, length - 1))
        tokens, table = random_tokens(row, length), list(blocks[row * 10 : row * 10 + 10])
        if cut:
            backend.forward(ragged([(tokens[:cut], 0, table)]))
        rows.append((tokens[cut:], cut, table))
        expected.append(own_logits(model, tokens)[cut:])
    close(backend.forward(ragged(rows)), torch.cat(expected))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_rewound_row_forgets_what_it_had_written(family):
    """Tokens written past a row's end are void: rewriting from an earlier position gives the new sequence's logits."""
    backend, table = paged(family), [7, 2, 30, 11]
    old, new = random_tokens(1, 14), random_tokens(2, 12)
    new[:5] = old[:5]
    backend.forward(ragged([(old, 0, table)]))
    close(backend.forward(ragged([(new[5:8], 5, table)])), own_logits(tiny(family), new)[5:8])
    close(backend.forward(ragged([(new[8:], 8, table)])), own_logits(tiny(family), new)[8:])


def test_long_and_short_contexts_share_a_batch_in_separate_classes():
    """Rows whose contexts differ by more than a factor of two, and one long prefill, come out in batch order."""
    model, backend = twins(LlamaConfig(**SMALL | {"max_position_embeddings": 256}), None)
    backend.allocate(120, BLOCK)
    long, short, prefill = random_tokens(1, 150), random_tokens(2, 10), random_tokens(3, 50)
    tables = [list(range(0, 40))[::-1], list(range(40, 60)), list(range(60, 80))]
    backend.forward(ragged([(long[:-2], 0, tables[0]), (short[:-1], 0, tables[1])]))
    found = backend.forward(ragged([(short[-1:], 9, tables[1]), (prefill, 0, tables[2]), (long[-2:], 148, tables[0])]))
    expected = [own_logits(model, short)[-1:], own_logits(model, prefill), own_logits(model, long)[-2:]]
    close(found, torch.cat(expected))


def test_only_wanted_logits_are_returned_and_none_may_be_wanted():
    """[m, vocab_size] float32 for the wanted tokens; a batch that only fills the cache gives [0, vocab_size]."""
    backend, tokens = paged("llama"), random_tokens(1, 6)
    batch = ragged([(tokens, 0, [0, 1])])
    some = backend.forward(replace(batch, wanted=np.array([2, 5])))
    none = backend.forward(replace(batch, wanted=np.array([], dtype=np.int64)))
    assert some.shape == (2, VOCABULARY)
    assert some.dtype == torch.float32
    assert none.shape == (0, VOCABULARY)
    close(some, own_logits(tiny("llama"), tokens)[[2, 5]])


def test_longrope_factors_belong_to_the_context_and_not_to_the_batch():
    """With a context above the original length even a short row has the long factors, as in one long sequence."""
    tokens = random_tokens(1, 20)
    expected = own_logits(tiny("phi3_longrope"), tokens)  # 20 > 8 positions: the model itself takes the long factors
    backend = paged("phi3_longrope", 32)
    close(backend.forward(ragged([(tokens[:4], 0, [5])])), expected[:4])
    short = paged("phi3_longrope", 8)
    close(short.forward(ragged([(tokens[:4], 0, [5])])), own_logits(tiny("phi3_longrope"), tokens[:4]))
    assert (expected[:4] - own_logits(tiny("phi3_longrope"), tokens[:4])).abs().max() > 1e-2


def test_dynamic_ntk_factors_are_those_of_a_sequence_as_long_as_the_context():
    """A cap above the trained length is honoured up to the factor, and fixes the base for every row."""
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = LlamaConfig(**SMALL | {"max_position_embeddings": 16}, rope_parameters=parameters)
    model, backend = twins(config, 40)
    backend.allocate(20, BLOCK)
    tokens = random_tokens(1, 40)
    expected = own_logits(model, tokens)
    assert backend.context_length == 40
    close(fed_in_chunks(backend, tokens, (3, 1, 20, 16), list(range(10))), expected)


@pytest.mark.parametrize(
    ("cap", "served"), [(None, 16), (10_000, 64), (48, 48), (8, 8)], ids=["trained", "reach", "cap", "small"]
)
def test_the_context_is_the_trained_length_unless_capped_within_the_ropes_reach(cap, served):
    """Dynamic NTK with factor 4 reaches four times the trained 16 positions, only when asked to."""
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = LlamaConfig(**SMALL | {"max_position_embeddings": 16}, rope_parameters=parameters)
    assert PagedTransformers(LlamaForCausalLM(config).eval(), cap).context_length == served


def test_bytes_per_block_counts_keys_and_values_of_all_layers():
    """3 layers x 2 key heads x 8 values x (keys + values) x 4 bytes."""
    assert paged("llama").bytes_per_block(16) == 16 * 3 * 2 * 8 * 2 * 4


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (T5Config(), "encoder-decoder"),
        (BartConfig(), "encoder-decoder"),
        (Qwen3NextConfig(num_hidden_layers=4), "linear_attention"),
    ],
    ids=["t5", "bart", "hybrid"],
)
def test_configurations_of_other_kinds_are_refused_before_loading(config, said):
    """Encoder-decoder and hybrid configurations are told apart by their configuration alone."""
    with pytest.raises(ConfigError, match=said):
        _refusals.refuse_unservable(config)


def test_recurrent_models_are_refused():
    """A Mamba keeps a state that pages cannot hold; its class says so even where its configuration would not."""
    model = MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ConfigError, match="recurrent state"):
        _refusals.refuse_model_class(model)
    with pytest.raises(ConfigError, match="linear_attention"):
        PagedTransformers(model, 64)


def test_models_outside_the_attention_interface_are_refused():
    """Bloom computes its own attention."""
    with pytest.raises(ConfigError, match="attention interface"):
        PagedTransformers(BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2)), 64)


def test_attention_sinks_are_refused_by_name():
    """gpt-oss passes s_aux, which paged attention does not handle yet."""
    config = GptOssConfig(**SMALL, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(ConfigError, match="s_aux"):
        PagedTransformers(GptOssForCausalLM(config).eval(), None)


def test_a_forward_before_allocation_is_an_error():
    """Pages are made once, before the first forward."""
    backend = PagedTransformers(Phi3ForCausalLM(CONFIGS["phi3_longrope"]()).eval(), None)
    with pytest.raises(ConfigError, match="no pages yet"):
        backend.forward(ragged([(random_tokens(1, 2), 0, [0])]))
