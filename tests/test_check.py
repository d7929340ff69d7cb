"""`specserve check` on tiny models: what it computes is what the workers would find, and each problem is told once."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_llama

from specserve.check import report
from specserve.cli import main
from specserve.config import Config, parse
from specserve.models import _panels, loading
from specserve.models._float8 import Float8Product
from specserve.models._worker import load_backend


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [str(tiny_llama(tmp_path_factory.mktemp(name), seed=seed)) for name, seed in (("target", 1), ("draft", 2))]


def config_of(folders, target=(), draft=(), engine=(), **draft_section):
    target, draft = (
        {"source": s, "device": "cpu"} | dict(own) for s, own in zip(folders, (target, draft), strict=True)
    )
    tree = {"target": target, "draft": {"model": draft} | draft_section, "engine": dict(engine), "server": {"port": 0}}
    return parse(tree)


def lines(config, topic=""):
    return [str(finding) for finding in report(config) if finding.topic.startswith(topic)]


def problems(config):
    return [str(finding) for finding in report(config) if finding.problem]


def test_blocks_are_those_that_the_worker_allocates(folders) -> None:
    """The arithmetic from config.json equals that of the loaded backend."""
    config = config_of(folders, target={"kv_memory_gib": 0.01})
    _, info = load_backend(config.target, "target", config.engine)
    told = lines(config, "target")
    assert f"{info.blocks} KV blocks" in told[1]
    assert "MiB on disk, as float32" in told[0]
    assert problems(config) == []


def test_kv_that_cannot_hold_one_context_is_a_problem(folders) -> None:
    """The same words as at start, for target and draft, each once."""
    config = config_of(folders, target={"kv_blocks": 3}, draft={"kv_memory_gib": 0.0001})
    found = problems(config)
    assert [line.split()[1] for line in found] == ["target", "draft"]
    assert "kv_blocks gives 3 KV blocks" in found[0]
    assert problems(config_of(folders, target={"kv_blocks": 3, "context_length": 48})) == []


def test_two_ranks_share_weights_and_have_half_of_the_kv_each(folders) -> None:
    """On a CPU both count; what they cannot share out is a problem in the words of the start."""
    one, two = (
        lines(config_of(folders, target={"kv_blocks": 64, "tensor_parallel": ranks}), "target")[1] for ranks in (1, 2)
    )
    kv_of_one, kv_of_two = (float(line.split("KV blocks, ")[1].split()[0]) for line in (one, two))
    assert kv_of_two == pytest.approx(kv_of_one / 2, abs=0.06)
    assert "for each of 2 ranks" in two
    totals = [lines(config_of(folders, target={"kv_blocks": 64, "tensor_parallel": n}), "memory")[0] for n in (1, 2)]
    assert totals[0] == totals[1]
    assert "tensor_parallel 3 does not divide" in problems(config_of(folders, target={"tensor_parallel": 3}))[0]


def test_memory_counts_weights_in_their_dtype_and_both_kvs(folders) -> None:
    """bfloat16 halves the weights; more than the machine has is a problem."""
    full = lines(config_of(folders), "memory")[0]
    half = lines(config_of(folders, target={"dtype": "bfloat16"}, draft={"dtype": "bfloat16"}), "memory")[0]
    size = float(full.split("target ")[1].split()[0])
    assert float(half.split("target ")[1].split()[0]) == pytest.approx(size / 2, abs=0.1)
    assert full.count("1.0 GiB KV") == full.count("0.5 GiB KV") == 1
    (found,) = problems(config_of(folders, target={"kv_memory_gib": 1_000_000}))
    assert "1000000.5 GiB wanted" in found


@pytest.mark.skipif(_panels.kernels() is None, reason="needs a C compiler with OpenMP")
def test_int8_weights_are_told_and_counted(folders) -> None:
    """Where our kernels read them; where they are written out, check says that nothing is won."""
    (model, *_) = lines(config_of(folders, target={"quantization": "int8", "device": "cpu"}), "target")
    assert "as float32 with int8 weights (" in model
    plain = lines(config_of(folders), "memory")[0]
    told = lines(config_of(folders, target={"quantization": "int8", "device": "cpu"}), "memory")[0]
    size, rounded = (float(line.split("target ")[1].split()[0]) for line in (plain, told))
    assert rounded < size
    half = {"quantization": "int8", "dtype": "bfloat16", "device": "cpu"}
    assert "rounded to int8 but written out" in lines(config_of(folders, target=half), "target")[0]


def test_fp8_weights_are_told(folders, monkeypatch) -> None:
    """Written out on a CPU, which wins nothing; as what they are where a device multiplies their bytes."""
    target = {"quantization": "fp8", "dtype": "bfloat16", "device": "cpu"}
    assert (
        "as bfloat16 with weights rounded to fp8 but written out"
        in lines(config_of(folders, target=target), "target")[0]
    )
    monkeypatch.setattr(Float8Product, "serves", staticmethod(lambda dtype, device: dtype == torch.bfloat16))
    assert "as bfloat16 with fp8 weights (" in lines(config_of(folders, target=target), "target")[0]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"quantization": "fp8", "tensor_parallel": 2}, "set tensor_parallel 2 to 1"),
        ({"quantization": "fp8", "source": "emulated"}, "emulated models have no weights"),
        ({"quantization": "int8", "tensor_parallel": 2}, "set tensor_parallel 2 to 1"),
        ({"quantization": "int8", "source": "emulated"}, "emulated models have no weights"),
    ],
)
def test_rounding_is_refused_where_it_cannot_be_had(folders, target: dict, words: str) -> None:
    """As the worker would when it starts."""
    assert any(words in problem for problem in problems(config_of(folders, target=target)))


def test_memory_counts_the_workers_of_all_pipelines(folders) -> None:
    """Two pipelines have two targets, and two drafts unless they share one."""
    apart = config_of(folders, target={"kv_memory_gib": 10_000})
    apart = apart.model_copy(update={"cluster": apart.cluster.model_copy(update={"pipelines": 2})})
    together = apart.cluster.model_copy(update={"pipelines_per_draft": 2})
    (found,) = problems(apart)
    assert "20001.0 GiB wanted (2 × target " in found
    assert "; 2 × draft " in found
    (found,) = problems(apart.model_copy(update={"cluster": together}))
    assert "20000.5 GiB wanted (2 × target " in found
    assert "; draft " in found


def test_a_missing_model_is_told_once_and_never_under_the_other_role(folders) -> None:
    """The draft is still looked at, and tokenizers that cannot be compared are no second problem."""
    (found,) = problems(config_of(["/no/target", folders[1]]))
    assert found.startswith("✗ target ")
    assert len(lines(config_of(["/no/target", folders[1]]), "draft")) == 2
    (found,) = problems(config_of([folders[0], "/no/draft"]))
    assert found.startswith("✗ draft ")


def test_a_speculator_that_cannot_use_the_draft_is_a_problem(folders) -> None:
    """What `serve` would refuse after loading the model, `check` refuses, too."""
    (problem,) = problems(config_of(folders, speculator="eagle"))
    assert "holds no draft head; use small_model" in problem


def test_what_was_found_is_told_before_the_next_is_looked_at(folders) -> None:
    """Who mistyped a model is not kept waiting for the rest."""
    looked: list[str] = []
    for finding in report(config_of(["/no/target", folders[1]]), looked.append):
        if finding.problem:
            break
    assert looked == ["target: looking at /no/target"]


@pytest.mark.parametrize("depth", [0, 4])
def test_an_unknown_speculator_is_told_once(folders, depth) -> None:
    """At depth 0 too, where the server would refuse it as well."""
    (found,) = problems(config_of(folders, speculator="guess", engine={"depth": depth}))
    assert found.startswith("✗ speculator")


def test_rules_are_those_of_the_verifier(folders) -> None:
    """A file of the room that is no rule is refused, lossy rules say so."""
    for wrong in ("bookkeeping", "verifier", "guess"):
        (found,) = problems(config_of(folders, engine={"rule": wrong}))
        assert found.startswith("✗ rule")
        assert "rejection" in found
    assert "lossy" in lines(config_of(folders, engine={"rule": "typical"}), "rule")[0]
    assert "(lossless)" in lines(config_of(folders), "rule")[0]


def test_a_rule_without_its_configuration_is_a_problem(folders) -> None:
    """A configuration that was built in code, past the parser, is checked too."""
    config = config_of(folders)
    engine = config.engine.model_copy(update={"rule": "synthetic"})
    (found,) = problems(config.model_copy(update={"engine": engine}))
    assert found.startswith("✗ rule")


@pytest.mark.parametrize("tree", [{"speculator": "none"}, {"engine": {"depth": 0}}])
def test_plain_decoding_has_no_draft_and_no_slots(folders, tree) -> None:
    """Neither with no speculator nor at depth 0."""
    config = config_of(folders, **tree)
    assert "plain decoding" in lines(config, "speculator")[0]
    assert "no draft slots" in lines(config, "limits")[0]
    assert lines(config, "draft") == []


def test_the_command_fails_when_something_cannot_work(folders, capsys) -> None:
    """Exit status 1 and a ✗; 0 without."""
    models = ["--target", folders[0], "--draft", folders[1], "--set", "server.port=0"]
    assert main(["check", *models]) == 0
    assert "✗" not in capsys.readouterr().out
    assert main(["check", *models, "--set", "target.kv_blocks=1"]) == 1
    assert capsys.readouterr().out.count("✗") == 1


def test_what_is_looked_at_is_told_first(folders) -> None:
    """By the settings that differ, wherever they come from; where none does, how to look at another server."""
    config = config_of(folders, speculator="ngram", engine={"depth": 2})
    first = next(iter(report(config)))
    assert first.topic == "settings"
    assert "draft.speculator=ngram" in first.text
    assert "engine.depth=2" in first.text
    assert first.text.endswith("; all others by default")
    assert "`make check-serve`" in next(iter(report(Config()))).text


def test_who_waits_for_check_is_told_what_for(folders, tmp_path, monkeypatch, capsys) -> None:
    """Line by line on stderr, as `serve` does, conversions too; what was found stands alone on stdout."""
    models = ["--draft", folders[1], "--set", "server.port=0"]
    assert main(["check", "--target", folders[0], *models]) == 0
    out, err = capsys.readouterr()
    told = [f"target: looking at {folders[0]}", f"draft: looking at {folders[1]}", "vocabulary: comparing tokenizers"]
    assert [line for line in err.splitlines() if line in told] == told
    assert all(line.startswith("✓") for line in out.splitlines())
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "cache"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    assert main(["check", "--target", str(broken), *models]) == 1
    assert "target: converting broken.gguf (once; cached in " in capsys.readouterr().err


def test_keys_of_the_environment_are_judged_as_by_serve(monkeypatch, capsys) -> None:
    """One that is too short is refused by both."""
    monkeypatch.setenv("SPECSERVE_API_KEY", "short")
    assert main(["check", "--profile", "llama-8b-1b-h100"]) == 1
    assert "api_keys" in capsys.readouterr().err


def test_a_damaged_weights_file_is_a_problem(folders, tmp_path) -> None:
    """One that no header can be read from."""
    folder = tiny_llama(tmp_path / "damaged", seed=3)
    next(folder.glob("*.safetensors")).write_bytes(b"\xff" * 64)
    (found,) = problems(config_of([str(folder), folders[1]]))
    assert "cannot read" in found


def test_emulated_devices_are_told_from_models(capsys) -> None:
    """Which devices, and no memory or vocabulary of models that are not there; flags go over the profile."""
    arguments = ["check", "--profile", "llama-70b-1b-h100", "--set", "server.port=0", "--set", "target.kv_blocks=9000"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "emulated" in out
    assert "Llama-3.1-70B, bf16, tensor parallel on 8 H100 80GB takes; 9000 KV blocks" in out
    assert "vocabulary" not in out
    assert main(["check", "--profile", "no-such-pair"]) == 1
    assert "qwen3-32b-0.6b-h100" in capsys.readouterr().err


def test_where_spans_go_is_told_and_tried(folders, tmp_path) -> None:
    """A file that cannot be written is a problem; without tracing nothing is said of it."""
    config = config_of(folders)
    assert lines(config, "tracing") == []
    for path, found in ((tmp_path / "spans", False), (tmp_path / "no" / "spans", True)):
        tracing = config.observe.tracing.model_copy(update={"exporter": "file", "path": str(path)})
        asked = config.model_copy(update={"observe": config.observe.model_copy(update={"tracing": tracing})})
        (finding,) = [finding for finding in report(asked) if finding.topic == "tracing"]
        assert str(path) in finding.text
        assert finding.problem == found


def test_a_shared_draft_worker_is_told_with_its_shares(folders) -> None:
    """How many there are and for whom; a speculator without a worker is a problem."""
    asked = config_of(folders)
    shared = {"pipelines": 3, "pipelines_per_draft": 2}
    asked = asked.model_copy(update={"cluster": asked.cluster.model_copy(update=shared)})
    told = lines(asked, "placement")
    assert told[0].endswith("coordinator on CPU, target on CPU, draft on CPU")
    assert "2 draft worker(s), each for 2 of at most 3 pipelines" in told[1]
    guesser = asked.model_copy(update={"draft": asked.draft.model_copy(update={"speculator": "ngram"})})
    assert any("ngram has no draft worker that pipelines could share" in line for line in problems(guesser))


def test_each_share_of_a_draft_worker_holds_one_context(folders) -> None:
    """Blocks enough for the worker are too few for each of two pipelines; in the words of the start."""
    asked = config_of(folders, target={"context_length": 512}, draft={"context_length": 512, "kv_blocks": 60})
    assert problems(asked) == []
    shared = asked.cluster.model_copy(update={"pipelines": 2, "pipelines_per_draft": 2})
    (found,) = problems(asked.model_copy(update={"cluster": shared}))
    assert found.startswith("✗ draft ")
    assert "each of 2 pipelines has (cluster.pipelines_per_draft) holds 30 blocks × 16 = 480 positions" in found
    assert "2 × 32 blocks are enough" in found


@pytest.mark.parametrize("blocks", [600, 1024])
def test_shares_of_emulated_drafts_are_judged_too(blocks) -> None:
    """Their blocks are numbers only, but a request has to fit all the same."""
    cluster = {"pipelines": 2, "pipelines_per_draft": 2}
    models = {"source": "emulated", "context_length": 8192, "kv_blocks": 512}
    tree = {"target": models, "draft": {"model": models | {"kv_blocks": blocks}}, "server": {"port": 0}}
    found = problems(parse(tree | {"cluster": cluster}))
    assert [line.split()[1] for line in found] == ([] if blocks == 1024 else ["draft"])


def test_each_folder_is_prepared_once(folders, monkeypatch) -> None:
    """Preparing hashes files, and may convert them."""
    prepared = []
    prepare = loading.prepare

    def counted(model, *more, **named):
        prepared.append(model.source)
        return prepare(model, *more, **named)

    monkeypatch.setattr(loading, "prepare", counted)
    list(report(config_of(folders)))
    assert sorted(prepared) == sorted(folders)
