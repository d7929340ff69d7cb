"""How a model's own sampling settings are read."""

from __future__ import annotations

import json

import pytest

from specserve import model_sampling
from specserve.errors import ConfigError
from specserve.types import Sampling


def settings(folder, **found):
    (folder / "generation_config.json").write_text(json.dumps(found))
    return folder


def test_the_makers_settings_are_taken(tmp_path):
    """What is not said leaves the dist as it is; a top_k of -1 is none, and other settings are not ours."""
    folder = settings(tmp_path, temperature=0.6, top_p=0.95, top_k=20, do_sample=True, eos_token_id=2, num_beams=3)
    assert model_sampling.read(folder) == Sampling(temperature=0.6, top_p=0.95, top_k=20)
    assert model_sampling.read(settings(tmp_path, top_k=-1, min_p=None)) == Sampling()
    told = Sampling(min_p=0.1, repetition_penalty=1.1)
    assert model_sampling.read(settings(tmp_path, min_p=0.1, repetition_penalty=1.1)) == told


def test_a_model_without_settings_is_left_as_it_is(tmp_path):
    """No file, or one that says nothing of sampling."""
    assert model_sampling.read(tmp_path) == Sampling()
    assert model_sampling.read(settings(tmp_path, eos_token_id=2)) == Sampling()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("temperature", "warm"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", [0.9]),
        ("top_k", 2**31),
        ("top_k", 0.5),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
    ],
)
def test_what_no_request_could_ask_for_is_refused(tmp_path, name, value):
    """The message names the file, the value and the way out."""
    with pytest.raises(ConfigError, match=rf"generation_config.json has {name} = .*correct it there"):
        model_sampling.read(settings(tmp_path, **{name: value}))


@pytest.mark.parametrize("text", ["{", "[]", "", '{"a":' * 100_000 + "1" + "}" * 100_000])
def test_a_damaged_file_is_refused(tmp_path, text):
    """In words."""
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        model_sampling.read(tmp_path)


def test_people_are_told_what_differs():
    """Only that."""
    assert model_sampling.described(Sampling(temperature=0.2, top_p=0.9)) == "temperature 0.2, top_p 0.9"
    assert model_sampling.described(Sampling()) == ""
