"""Recurrent and hybrid models: chunked prompts, rewound verifications and mixed batches against the model alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_recurrent import SERVED, tiny

from specserve.errors import ConfigError, ProtocolError
from specserve.models import _refusals
from specserve.models._stretches import Stretch, ragged
from specserve.models.paged_transformers import PagedTransformers
from specserve.models.recurrent_transformers import RecurrentTransformers

BLOCK, BLOCKS, ROWS = 4, 40, 4
TABLES = [np.arange(10 * row, 10 * row + 10)[::-1].astype(np.int32) for row in range(4)]


def backend(family: str) -> RecurrentTransformers:
    """The model with pages full of garbage and room for four requests."""
    found = RecurrentTransformers(tiny(family), 40)
    found.allocate(BLOCKS, BLOCK)
    for pages in (found._pages.keys, found._pages.values):
        for layer in pages.values():
            layer.fill_(float("nan"))
    found.states.reserve(ROWS)
    return found


def texts() -> np.ndarray:
    """int64 [4, 24]."""
    return np.random.default_rng(1).integers(3, 97, (4, 24))


def own(family: str, tokens: np.ndarray) -> torch.Tensor:
    """The model's plain forward: [rows, tokens, vocabulary]."""
    with torch.inference_mode():
        return tiny(family)(torch.from_numpy(tokens), use_cache=False).logits.float()


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3)


def stretch(row: int, start: int, tokens: np.ndarray, wanted: int | None = None) -> Stretch:
    return Stretch(start, tokens, TABLES[row], len(tokens) if wanted is None else wanted, row)


@pytest.mark.parametrize("family", SERVED)
def test_a_verification_is_rewound_to_any_accepted_length(family):
    """A prompt in two chunks; then, for every number kept, refused drafts leave no trace in the logits that follow."""
    tokens = texts()[0]
    wanted = own(family, texts())[0]
    model = backend(family)
    for kept in range(5):
        close(model.forward(ragged([stretch(0, 0, tokens[:6])])), wanted[:6])
        close(model.forward(ragged([stretch(0, 6, tokens[6:11])])), wanted[6:11])
        drafted = tokens[11:16].copy()
        drafted[kept + 1 :] = (drafted[kept + 1 :] + 1) % 97  # the base and `kept` drafts are right
        close(model.forward(ragged([stretch(0, 11, drafted)]))[: kept + 1], wanted[11 : 12 + kept])
        close(
            model.forward(ragged([stretch(0, 12 + kept, tokens[12 + kept : 17 + kept])])), wanted[12 + kept : 17 + kept]
        )


@pytest.mark.parametrize("family", ["mamba2", "falcon_h1", "jamba"])
def test_rows_of_a_mixed_batch_do_not_touch_each_other(family):
    """A new prompt, a long chunk, a decode row and a verification share a batch; each gets its own logits."""
    tokens, wanted = texts(), own(family, texts())
    model = backend(family)
    model.forward(
        ragged([stretch(1, 0, tokens[1, :5], 0), stretch(2, 0, tokens[2, :5]), stretch(3, 0, tokens[3, :9], 1)])
    )
    wrong = np.concatenate([tokens[2, 5:7], [96, 95]])
    model.forward(ragged([stretch(2, 5, wrong), stretch(3, 9, tokens[3, 9:13])]))
    found = model.forward(
        ragged(
            [
                stretch(0, 0, tokens[0, :7], 1),
                stretch(1, 5, tokens[1, 5:16], 2),
                stretch(2, 7, tokens[2, 7:8], 1),
                stretch(3, 13, tokens[3, 13:17]),
            ]
        )
    )
    expected = [wanted[0, 6:7], wanted[1, 14:16], wanted[2, 7:8], wanted[3, 13:17]]
    close(found, torch.cat(expected))


def test_rows_of_one_length_share_a_forward():
    """Four verifications of one length are one call of the model, plus one where a part of a chain was refused."""
    model, tokens = backend("falcon_h1"), texts()
    model.forward(ragged([stretch(row, 0, tokens[row, :6], 1) for row in range(4)]))
    calls: list[tuple[int, int]] = []
    model._model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    model.forward(ragged([stretch(row, 6, tokens[row, 6:11]) for row in range(4)]))
    model.forward(ragged([stretch(row, 11 if row else 8, tokens[row, 11:16]) for row in range(4)]))
    assert calls == [(4, 5), (1, 2), (4, 5)]


def test_a_start_that_is_not_covered_is_refused_and_nothing_is_written():
    """The worker asks `states` first; a row that slips through is an error, not a wrong answer."""
    model, tokens = backend("bamba"), texts()
    model.forward(ragged([stretch(0, 0, tokens[0, :6])]))
    with pytest.raises(ProtocolError, match="cannot start at 9"):
        model.forward(ragged([stretch(0, 9, tokens[0, 9:10])]))
    close(model.forward(ragged([stretch(0, 6, tokens[0, 6:8])])), own("bamba", texts())[0, 6:8])


def test_a_state_that_is_ignored_is_found_out_at_load(monkeypatch):
    """A model whose code does not go on from the state that it is given is refused in words, never served wrongly."""

    def forgetting(self, states):
        return cache_of(self, None if states is None else [torch.zeros_like(values) for values in states])

    cache_of = RecurrentTransformers._cache
    monkeypatch.setattr(RecurrentTransformers, "_cache", forgetting)
    with pytest.raises(ConfigError, match="does not continue from a kept state"):
        RecurrentTransformers(tiny("mamba2"), 40)


def test_models_that_read_one_token_at_a_time_are_found_out_too():
    """transformers' Mamba-1 code starts chunks afresh: these are read token by token, at the price of speed."""
    assert {family: backend(family)._continues for family in ("mamba", "jamba", "mamba2", "falcon_h1")} == {
        "mamba": False,
        "jamba": False,
        "mamba2": True,
        "falcon_h1": True,
    }


def test_attention_without_a_place_of_its_own_is_refused():
    """Zamba-2's shared attention says no layer; its pages would be one another's."""
    with pytest.raises(ConfigError, match="attention layers"):
        RecurrentTransformers(tiny("zamba2"), 40)


def test_bytes_are_those_of_attention_and_states():
    """Pages for attention layers only; two moments of every recurrent layer for each request."""
    model = backend("bamba")
    assert model.bytes_per_block(16) == 16 * 1 * 2 * 8 * 2 * 4
    assert backend("mamba2").bytes_per_block(16) == 0
    assert sum(kind.bytes_per_row for kind in model.states.kinds) == 2 * (96 * 4 + 8 * 8 * 16) * 4
    held = [*model.states.before, *model.states.after]
    assert sum(states.numel() * 4 for states in held) == 2 * ROWS * 2 * (96 * 4 + 8 * 8 * 16) * 4


def test_a_context_length_must_be_named_by_somebody():
    """Mamba-2's configuration knows none."""
    with pytest.raises(ConfigError, match="set context_length"):
        RecurrentTransformers(tiny("mamba2"), None)
    assert RecurrentTransformers(tiny("bamba"), None).context_length == 128


@pytest.mark.parametrize("family", SERVED)
def test_configurations_tell_the_backend(family):
    """Layers that keep state choose this backend; the paged one refuses them."""
    config = tiny(family).config
    assert _refusals.is_recurrent(config)
    with pytest.raises(ConfigError, match="layers of type"):
        PagedTransformers(tiny(family), 40)
