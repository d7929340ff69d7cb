"""vLLM's flag for drafting, as settings of ours."""

from __future__ import annotations

import json

import pytest

from specserve.cli import _parser
from specserve.cli.options import read_config
from specserve.errors import ConfigError
from specserve.speculative_config import settings


def configured(*arguments: str):
    return read_config(_parser().parse_args(["check", *arguments]))


@pytest.mark.parametrize(
    ("given", "speculator"),
    [
        ({"model": "some/draft"}, "small_model"),
        ({"method": "draft_model", "model": "some/draft"}, "small_model"),
        ({"method": "eagle3", "model": "some/head"}, "eagle"),
        ({"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}, "ngram"),
        ({"method": "suffix"}, "suffix"),
    ],
)
def test_what_was_pasted_becomes_the_configuration(given, speculator):
    """Speculator, draft, depth and the n-grams' lengths."""
    config = configured("--speculative-config", json.dumps(given | {"num_speculative_tokens": 7}))
    assert (config.draft.speculator, config.engine.depth) == (speculator, 7)
    assert config.draft_model.source == given.get("model", config.draft_model.source)
    assert (config.draft.ngram_max, config.draft.ngram_min) == ((4, 2) if speculator == "ngram" else (3, 1))


def test_our_own_flags_win():
    """They are more particular."""
    config = configured("--speculative-config", '{"num_speculative_tokens": 7}', "--depth", "2")
    assert config.engine.depth == 2
    assert config.draft.speculator == configured().draft.speculator


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "takes a JSON object"),
        ("[]", "takes a JSON object"),
        ("[" * 100_000, "takes a JSON object"),
        ('{"method": "medusa"}', "no method 'medusa' here; there are: draft_model"),
        ('{"method": ["ngram"]}', "no method"),
        ('{"draft_tensor_parallel_size": 2}', "no 'draft_tensor_parallel_size' here; it takes method, model"),
    ],
)
def test_what_is_not_known_here_is_refused_in_words(text, told):
    """Nothing is silently left out."""
    with pytest.raises(ConfigError, match=told):
        settings(text)


def test_a_value_of_a_wrong_type_is_told_by_our_name():
    """As everywhere else in the configuration."""
    with pytest.raises(ConfigError, match=r"engine\.depth"):
        configured("--speculative-config", '{"num_speculative_tokens": "many"}')
