"""What a wrong configuration is told, and the table of settings in the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from specserve.config import Config, changed_settings, client_key, keyed, override, parse, setting_names, unkeyed
from specserve.errors import ConfigError

SETTINGS = Path(__file__).parents[1] / "docs" / "settings.md"


def at(tree, dotted):
    for part in dotted.split("."):
        tree = tree[part]
    return tree


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("engine.dept", 1, "unknown setting engine.dept; did you mean engine.depth?"),
        ("depth", 1, "unknown setting depth; did you mean engine.depth?"),
        ("draft.model.kv_block", 1, "did you mean draft.model.kv_blocks?"),
        ("zebra", 1, "unknown setting zebra"),
        ("engine.depth", "deep", "engine.depth: expected a whole number (found 'deep')"),
        ("engine.depth", 1.5, "engine.depth: expected a whole number (found 1.5)"),
        ("engine.depth", None, "engine.depth: expected a whole number (found nothing)"),
        ("engine.depth", True, "engine.depth: expected a number (found true)"),
        ("target.kv_memory_gib", False, "target.kv_memory_gib: expected a number (found false)"),
        ("engine.depth", -1, "engine.depth must be at least 0 (found -1)"),
        ("engine.depth", 99, "engine.depth must be at most 64 (found 99)"),
        ("engine.depth.x", 1, "engine.depth is a whole number, not a section with settings of its own (found x)"),
        ("engine", 5, "engine is a section with settings of its own, such as engine.depth (found 5)"),
        ("engine.draft_wait_s", "long", "engine.draft_wait_s: expected a number (found 'long')"),
        ("engine.draft_wait_s", 0, "engine.draft_wait_s must be above 0 (found 0)"),
        ("engine.synthetic_acceptance", 3, "expected a list (found 3)"),
        ("engine.max_requests", 600, "engine: max_batch_tokens 512 can never hold max_requests 600"),
        ("target.dtype", "f8", "target.dtype: expected one of 'float32', 'bfloat16' or 'float16' (found 'f8')"),
        ("target.source", 3, "target.source: expected text (found 3)"),
        ("target.trust_remote_code", "maybe", "expected true or false (found 'maybe')"),
    ],
)
def test_a_wrong_setting_is_told_in_words(name, value, told) -> None:
    """Its dotted name, what was expected, what was found; a near name where there is one."""
    with pytest.raises(ConfigError) as caught:
        parse(override({}, {name: value}), where="here")
    assert caught.value.message.startswith("here: 1 problem\n")
    assert told in caught.value.message
    assert ("did you mean" in caught.value.message) == ("did you mean" in told)


def test_every_problem_is_told_up_to_a_limit() -> None:
    """Ten lines, then how many more."""
    with pytest.raises(ConfigError) as caught:
        parse({f"zebra{number}": 1 for number in range(12)})
    assert caught.value.message.splitlines()[0] == "config: 12 problems"
    assert caught.value.message.splitlines()[-1] == "  and 2 more"


def test_setting_names_are_all_leaves_of_the_tree() -> None:
    """Every name leads to a value that is no section, and none is left out."""
    tree = Config().model_dump()

    def leaves(part, prefix=""):
        for name, value in part.items():
            section = isinstance(value, dict) and value  # an empty mapping is the value of a setting
            yield from leaves(value, f"{prefix}{name}.") if section else [f"{prefix}{name}"]

    assert list(setting_names()) == list(leaves(tree))


def test_the_table_of_settings_is_true() -> None:
    """Each row's name is a setting, and its default is the one in the code."""
    rows = re.findall(r"^\| `([a-z_.]+)` \| `([^`]*)` \|", SETTINGS.read_text(encoding="utf-8"), re.MULTILINE)
    tree = Config().model_dump(mode="json")
    assert len(rows) >= 20
    assert {name: yaml.safe_load(default) for name, default in rows} == {name: at(tree, name) for name, _ in rows}
    assert {name for name, _ in rows} <= set(setting_names())


def test_emulated_models_of_two_languages_are_refused() -> None:
    """A draft with another seed than its target's would silently never be right; other pairs may differ."""
    two = {"target": {"source": "emulated"}, "draft": {"model": {"source": "emulated", "emulated": {"seed": 1}}}}
    with pytest.raises(ConfigError, match="unrelated languages"):
        parse(two)
    assert parse(two | {"target": {"source": "demo"}}).draft.model.emulated.seed == 1


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_no_finite_number_is_refused(value) -> None:
    """No bound is endless by mistake."""
    with pytest.raises(ConfigError, match="hang_after_s"):
        parse({"engine": {"hang_after_s": value}})


def test_keys_come_from_the_environment_too() -> None:
    """They replace those of the file, several with commas between; without them the file's stay."""
    config = parse({"server": {"api_keys": ["file-key-1"], "admin_key": "file-admin"}})
    assert keyed(config, {}) == config
    found = keyed(config, {"SPECSERVE_API_KEY": "first-key, other-key", "SPECSERVE_ADMIN_KEY": "admin-key"}).server
    assert [key.get_secret_value() for key in found.api_keys] == ["first-key", "other-key"]
    assert found.admin_key is not None
    assert found.admin_key.get_secret_value() == "admin-key"
    with pytest.raises(ConfigError, match="8 ASCII characters"):
        keyed(config, {"SPECSERVE_API_KEY": "short"})
    assert client_key({"SPECSERVE_API_KEY": "first-key, other-key"}) == "first-key"
    assert client_key({}) is client_key({"SPECSERVE_API_KEY": ""}) is None
    assert (unkeyed(config).server.api_keys, unkeyed(config).server.admin_key) == ((), None)


@pytest.mark.parametrize("wrong", [{"api_keys": "secret-in-text"}, {"admin_key": ["secret-in-list"]}])
def test_a_wrong_key_is_not_shown(wrong) -> None:
    """The error names the setting and hides what was found."""
    with pytest.raises(ConfigError) as refused:
        parse({"server": wrong})
    assert "server." in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("server", "open_"),
    [
        ({}, False),
        ({"host": "localhost"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "api_keys": ["some-client"]}, False),
    ],
)
def test_a_server_without_keys_is_open_only_beyond_loopback(server, open_) -> None:
    """That is what the launcher warns of."""
    assert parse({"server": server}).server.open_to_others is open_


@pytest.mark.parametrize(
    ("draft", "looked_up"),
    [
        ({}, "ngram"),
        ({"speculator": "eagle"}, "ngram"),
        ({"lookup": "none"}, "none"),
        ({"lookup": "suffix"}, "suffix"),
        ({"model": {"source": "/models/mine"}}, "none"),
        ({"speculator": "suffix"}, "none"),
        ({"speculator": "none"}, "none"),
    ],
    ids=str,
)
def test_lookup_goes_beside_the_demos_drafts_unless_told_otherwise(draft: dict, looked_up: str) -> None:
    settings = parse({"draft": draft}).draft
    assert settings.looks_up == looked_up
    assert ("lookup" in settings.told_names) == (looked_up != "none")


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({}, "small_model and ngram lookup, depth 4"),
        ({"draft": {"lookup": "none"}, "engine": {"depth_policy": "adaptive"}}, "small_model, depth at most 4"),
        ({"draft": {"speculator": "eagle"}, "engine": {"depth": 0}}, "none, as engine.depth is 0"),
        ({"engine": {"depth": 0, "depth_policy": "adaptive"}}, "none, as engine.depth is 0"),
        ({"draft": {"speculator": "none"}}, "none, as draft.speculator is none"),
    ],
    ids=str,
)
def test_what_is_drafted_is_told_or_that_nothing_is(tree: dict, told: str) -> None:
    """No speculator is named where none drafts."""
    assert parse(tree).told_drafts == told


def test_changed_settings_are_told_as_set_takes_them() -> None:
    """Those that differ from their defaults, however they were given; keys are not shown."""
    assert changed_settings(Config()) == []
    given = {"engine": {"depth": 2, "tree": [2]}, "draft": {"speculator": "small_model"}, "target": {"source": "/m"}}
    changed = changed_settings(parse(given | {"server": {"api_keys": ["secret-key"]}}))
    assert changed[:3] == ["target.source=/m", "engine.depth=2", "engine.tree=[2]"]
    assert "secret" not in str(changed)
    assert "server.api_keys" in changed[3]


def test_a_fixed_tree_has_nodes_for_a_whole_path() -> None:
    """An adaptive one need not: its depth bounds lookups as well, which take no nodes."""
    tree = {"depth": 10, "tree": "dynamic", "tree_nodes": 8}
    with pytest.raises(ConfigError, match="tree_nodes 8 is below depth 10"):
        parse({"engine": tree})
    assert parse({"engine": tree | {"depth_policy": "adaptive"}}).engine.tree_shape is not None
