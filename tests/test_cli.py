"""The command line: what it explains, and what it refuses before anything is loaded."""

from __future__ import annotations

import io

import pytest

from specserve import drafting
from specserve.bench import compare as compares
from specserve.bench.report import write_json
from specserve.cli import main
from specserve.config import Config, DraftConfig
from specserve.errors import ConfigError


def said(capsys, *arguments):
    """Exit status, output and errors of a command that argparse may end."""
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_help_is_for_users(capsys) -> None:
    """The first page names the verbs, and nothing of how the program is made."""
    status, out, _ = said(capsys, "--help")
    assert status == 0
    assert all(verb in out for verb in ("serve", "chat", "check", "bench", "speculation"))
    assert "room" not in out


def test_no_verb_at_all_asks_for_one_with_the_first_page(capsys) -> None:
    status, out, err = said(capsys)
    assert (status, out) == (2, "")
    assert err == said(capsys, "--help")[1]


def test_help_of_a_bench_tells_choices_and_defaults(capsys) -> None:
    """Of the flags that take lists."""
    _, out, _ = said(capsys, "bench", "compare", "--help")
    words = " ".join(out.split())
    for told in ("transformers,local,ray", "small_model,ngram", "default: 0,4", "default: 1,8", "default: 32"):
        assert told in words


@pytest.mark.parametrize(
    "command",
    [*([verb] for verb in ("serve", "chat", "check", "top", "dashboards")), ["bench", "compare"], ["bench", "rules"]],
    ids=" ".join,
)
def test_an_unknown_flag_is_told_with_the_usage_of_its_command(capsys, command) -> None:
    """Not with that of the whole program, which names no flag of the command."""
    status, _, err = said(capsys, *command, "--bogus")
    assert status == 2
    assert err.startswith(f"usage: specserve {' '.join(command)} [-h]")
    assert f"specserve {' '.join(command)}: error: unrecognized arguments: --bogus" in err


def test_an_unknown_flag_before_the_verb_is_the_program_s(capsys) -> None:
    """There its own usage is the right one."""
    status, _, err = said(capsys, "--bogus", "top", "--once")
    assert status == 2
    assert err.startswith("usage: specserve [-h]")
    assert "unrecognized arguments: --bogus" in err


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["compare", "--depth", "0,x"], "--depth"),
        (["compare", "--concurrency", ""], "--concurrency"),
        (["acceptance", "--temperature", "warm"], "--temperature"),
        (["rules", "--vocab", "1.5"], "--vocab"),
    ],
)
def test_what_is_no_number_is_told_with_an_example(capsys, arguments, flag) -> None:
    """The flag, the form and the value; wrong usage ends with 2."""
    status, _, err = said(capsys, "bench", *arguments)
    assert status == 2
    assert f"{flag}: takes numbers such as 0," in err
    assert repr(arguments[-1]) in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--speculator", "guess"],
        ["bench", "compare", "--speculator", "guess"],
        ["bench", "compare", "--speculators", "ngram,guess"],
        ["bench", "acceptance", "--speculator", "guess"],
        ["bench", "ties", "--speculator", "worker"],
    ],
)
def test_an_unknown_speculator_is_refused_before_the_model_is_looked_for(capsys, arguments) -> None:
    """The model does not exist either, and is not what is told."""
    status, _, err = said(capsys, *arguments, "--target", "/no/model")
    assert status == 1
    assert "no speculator called" in err
    assert "ngram, prediction, small_model, suffix" in err


def test_every_speculator_that_is_listed_can_be_chosen(capsys) -> None:
    """What is told where a name is wrong, and what help tells, are the same names, and none of them is refused."""
    _, _, err = said(capsys, "serve", "--speculator", "guess", "--target", "/no/model")
    listed = err.split("there are: ")[1].split(", and dotted paths")[0].split(", ")
    for name in listed:
        drafting.has_worker(DraftConfig(speculator=name))
    _, out, _ = said(capsys, "serve", "--help")
    helped = " ".join(out.split()).split("--speculator SPECULATOR ")[1].split(", or a dotted path")[0].split(", ")
    assert sorted(helped) == sorted(listed)


@pytest.mark.parametrize("bench", [["compare"], ["acceptance"], ["ties"]])
def test_json_is_refused_before_measuring_where_its_folder_is_missing(capsys, tmp_path, bench) -> None:
    """No folder is made on the way."""
    path = tmp_path / "nowhere" / "rows.json"
    status, _, err = said(capsys, "bench", *bench, "--target", "/no/model", "--json", str(path))
    assert status == 1
    assert f"there is no folder {path.parent}" in err
    with pytest.raises(ConfigError, match="cannot write"):
        write_json(path, {}, [])
    assert not path.parent.exists()
    assert "is a folder" in said(capsys, "bench", *bench, "--target", "/no/model", "--json", str(tmp_path))[2]


def test_concurrency_above_the_prompts_is_warned_of(capsys) -> None:
    """Before anything is loaded; none where it fits."""
    for concurrency, warned in (("1,8", False), ("1,16", True)):
        _, _, err = said(capsys, "bench", "compare", "--concurrency", concurrency, "--target", "/no/model")
        assert ("warning: concurrency 16 exceeds the 8 prompts" in err) is warned
        assert "there is no model" in err


def test_options_of_compare_are_refused_with_the_choices() -> None:
    """Systems and empty lists."""
    for wrong, told in (
        ({"systems": ("vllm",)}, "no system called vllm; there are: transformers, local, ray"),
        ({"systems": ()}, "at least one name"),
        ({"speculators": ()}, "at least one name"),
    ):
        with pytest.raises(ConfigError, match=told):
            compares.compare(Config(), compares.Options(**wrong), io.StringIO().write)


def test_set_takes_dotted_names(capsys) -> None:
    """What is misspelt or nested too deep is told in words."""
    for item, told in (
        ("engine.dept=1", "did you mean engine.depth?"),
        ("engine.depth.x=1", "engine.depth is a whole number, not a section"),
        ("engine.depth", "--set takes NAME=VALUE"),
        ("engine.depth=[", "not valid YAML"),
    ):
        status, _, err = said(capsys, "check", "--set", item)
        assert status == 1
        assert told in err


@pytest.mark.parametrize(("typo", "meant"), [("--dept", "--depth"), ("--speculater=ngram", "--speculator")])
def test_a_mistyped_flag_is_answered_with_the_one_that_was_meant(capsys, typo, meant) -> None:
    """One like nothing is only refused."""
    assert f"{typo}; did you mean {meant}?" in said(capsys, "check", typo)[2]
    for unlike in ("--zzz", "--model", "--api-key"):
        assert "did you mean" not in said(capsys, "check", unlike)[2]


@pytest.mark.parametrize(("typo", "meant"), [(("serv",), "serve"), (("bench", "pipline"), "pipeline")])
def test_a_mistyped_verb_is_answered_with_the_one_that_was_meant(capsys, typo, meant) -> None:
    """One like nothing is told which there are."""
    assert f"did you mean {meant}?" in said(capsys, *typo)[2]
    refused = said(capsys, *typo[:-1], "zzz")[2]
    assert "did you mean" not in refused
    assert f" {meant}" in refused


@pytest.mark.parametrize("flag", ["--dept", "--specul"])
def test_a_part_of_a_flags_name_is_refused(capsys, flag) -> None:
    """It would be taken for the whole name, and a typo would go unnoticed."""
    with pytest.raises(SystemExit) as ended:
        main(["check", flag, "2"])
    assert ended.value.code == 2
    assert f"unrecognized arguments: {flag}" in capsys.readouterr().err
