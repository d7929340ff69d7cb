"""`serve_until_stopped` as a process of its own: it starts, serves, and leaves nothing when it is told to stop."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import httpx
import pytest
import torch
from pydantic import SecretStr
from safetensors.torch import save_file

import specserve.config as configs
from specserve.app import build
from specserve.cluster import launch, local_ray
from specserve.cluster.pipeline import PipelineState
from specserve.cluster.processes import descendants
from specserve.config import Config
from specserve.errors import ConfigError, Unavailable
from specserve.types import Health

_SERVE = """
import sys
from specserve import config as configs
from specserve.cluster.launch import serve_until_stopped
serve_until_stopped(configs.Config.model_validate_json(sys.argv[1]))
"""


@pytest.mark.ray
@pytest.mark.full
def test_sigterm_ends_everything(config: Config, tmp_path: Path):
    """After SIGTERM the exit is 0; no process and no file of the deployment is left; the banner was all it printed."""
    before = descendants()
    # Paths of unix sockets are short, so the temporary folder cannot be the test's own.
    command = [sys.executable, "-c", _SERVE, config.model_dump_json()]
    with (tmp_path / "err").open("w") as err, subprocess.Popen(command, stdout=-1, stderr=err, text=True) as server:
        assert server.stdout is not None
        lines = [server.stdout.readline() for _ in range(5)]
        url = lines[2].split()[1].removesuffix("/chat/completions")
        assert httpx.get(f"{url}/models", timeout=30).json()["data"][0]["id"] == "tiny"
        started = descendants() - before
        server.send_signal(signal.SIGTERM)
        rest = server.stdout.read()
        assert server.wait(60) == 0
    assert rest == ""
    said = (tmp_path / "err").read_text().splitlines()
    assert said[-3:] == [
        "stopping (Ctrl-C again to force)",
        "waiting for the workers and the HTTP endpoint to end",
        "waiting for Ray's processes to end",
    ]
    assert len(started) > 5
    assert not any(process.alive() for process in started)
    assert os.getpid() not in {process.pid for process in started}


def test_builder_refuses_unknown_keys():
    """The application builder names a wrong key instead of ignoring it."""
    with pytest.raises(ConfigError, match="engin"):
        build({"engin": {}})


def test_builder_refuses_what_does_not_exist():
    """A misspelt rule ends the deployment when it is deployed, not at the first request."""
    with pytest.raises(ConfigError, match="no rule called 'hope'"):
        build({"engine": {"rule": "hope"}})


def test_builder_takes_keys_from_the_environment(monkeypatch, caplog):
    """So that they need not stand in a file that is handed around; without any it warns."""
    monkeypatch.delenv("SPECSERVE_API_KEY", raising=False)
    build({})
    assert "no API key" in caplog.text
    caplog.clear()
    monkeypatch.setenv("SPECSERVE_API_KEY", "one-long-key,another-key")
    deployment = build({})._bound_deployment
    keys = configs.parse(deployment.init_args[0]).server.api_keys
    assert [key.get_secret_value() for key in keys] == ["one-long-key", "another-key"]
    assert caplog.text == ""


def test_builder_makes_an_application():
    """The builder needs no running Ray and binds pipeline and ingress."""
    assert type(build({})).__name__ == "Application"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target.source": "/no/such/model"}, "there is no model"),
        ({"draft.model.source": "/no/such/model"}, "there is no model"),
        ({"draft.speculator": "oracle"}, "oracle"),
        ({"engine.rule": "hope"}, "no rule called 'hope'"),
        ({"engine.rule": "verifier"}, "no rule called"),
        ({"engine.rule": "typical", "engine.tree": "dynamic"}, "'typical' cannot check drafted trees"),
        ({"target.source": __file__}, f"{__file__} is a file but not a .gguf file"),
        ({"draft.model.source": __file__}, f"{__file__} is a file but not a .gguf file"),
        ({"target.source": "demo-head"}, "cannot be a target"),
        ({"draft.model.source": "demo-head"}, "holds a draft head; set draft.speculator to eagle"),
        ({"draft.speculator": "mtp"}, "target 'demo' holds no multi-token-prediction heads"),
        ({"draft.speculator": "mtp", "target.source": "emulated"}, "which 'emulated' does not show"),
        ({"target.device": "cuda:99"}, "device 'cuda:99' is not there"),
        ({"draft.model.device": "cuda:99"}, "device 'cuda:99' is not there"),
        ({"target.source": "emulated", "target.emulated.profile": "mine"}, "device profile 'mine'"),
        ({"target.source": "emulated", "target.quantization": "int8"}, "emulated models have no weights"),
        ({"target.resources": {"elsewhere": 1}}, "can never place this pipeline"),
    ],
)
def test_what_can_be_told_at_once_is_refused_before_ray_starts(settings, said, monkeypatch):
    """What is not there, or cannot be, never reaches Ray."""
    monkeypatch.setattr(launch, "_ray", lambda *_: pytest.fail("Ray was started"))
    config = configs.parse(configs.override({}, settings | {"server.port": 0}))
    with pytest.raises(ConfigError, match=said):
        launch.serve_until_stopped(config)


@pytest.mark.parametrize(
    ("described", "settings", "said"),
    [
        ({"model_type": "t5"}, {}, "'t5' is an encoder-decoder model"),
        ({"model_type": "martian"}, {}, "transformers cannot read .*martian"),
        ({"model_type": "llama"}, {"draft.speculator": "mtp"}, "holds no multi-token-prediction heads"),
        ({"model_type": "llama"}, {"target.tensor_parallel": 3}, "tensor_parallel 3 does not divide"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused_before_ray_starts(described, settings, said, tmp_path):
    """By config.json and the headers of its weights, before anything is read that is large."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    text = json.dumps({"architectures": ["Some"]} | sizes | described)
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    save_file({"model.norm.weight": torch.zeros(8)}, tmp_path / "model.safetensors")
    config = configs.parse(configs.override({}, {"target.source": str(tmp_path)} | settings))
    with pytest.raises(ConfigError, match=said):
        launch.check_config(config, models_here=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"target.source": "/no/such/model"},
        {"target.source": __file__},
        {"target.device": "cuda:99"},
        {"target.resources": {"elsewhere": 1}},
        {"draft.speculator": "mtp"},
    ],
)
def test_models_of_a_given_cluster_may_be_elsewhere(settings):
    """With a Ray address files, devices and resources are those of its nodes."""
    launch.check_config(configs.parse(configs.override({}, settings)), models_here=False)


@pytest.mark.parametrize("text", ['{"architectures": 5, "model_type": "llama"}', "[" * 100_000, '{"hidden_size": []}'])
def test_what_nobody_expects_in_a_config_is_an_error_of_the_setting(text, tmp_path):
    """Not one of Python, and told with the folder."""
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    save_file({"model.norm.weight": torch.zeros(8)}, tmp_path / "model.safetensors")
    config = configs.parse(configs.override({}, {"target.source": str(tmp_path)}))
    with pytest.raises(ConfigError, match=tmp_path.name):
        launch.check_config(config, models_here=True)


@pytest.mark.parametrize("source", ["~no-such-user-here/model", "x" * 5000])
def test_a_name_that_no_system_takes_is_an_error_of_the_setting(source):
    """Likewise."""
    with pytest.raises(ConfigError, match=r"cannot be read|no such"):
        launch.check_config(configs.parse(configs.override({}, {"target.source": source})), models_here=True)


def test_a_draft_that_is_never_used_is_not_looked_at():
    """It need not be there."""
    unused = configs.parse(configs.override({}, {"draft.model.source": "/no/such/model", "engine.depth": 0}))
    launch.check_config(unused, models_here=True)


def test_a_ray_that_does_not_start_is_told_in_words(monkeypatch, tmp_path):
    """Ray's own error is a plain exception; nothing of the attempt is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def times_out(**_):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(local_ray.ray, "init", times_out)
    monkeypatch.setattr(local_ray.ray, "shutdown", lambda: None)  # other tests may have one that runs
    with pytest.raises(Unavailable, match=r"did not start .*timed out.*try again"), local_ray.local_ray():
        pytest.fail("it started")
    assert list(tmp_path.iterdir()) == []


def test_a_ray_that_did_not_start_in_time_is_started_once_more(monkeypatch, caplog):
    """In a folder of its own, and it is said; what the second try starts is what is used."""
    folders: list[str] = []

    def starts_late(_temp_dir, **_):
        folders.append(_temp_dir)
        if len(folders) == 1:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(local_ray.ray, "init", starts_late)
    monkeypatch.setattr(local_ray.ray, "shutdown", lambda: None)  # other tests may have one that runs
    with local_ray.local_ray() as logs:
        assert logs.is_relative_to(folders[1])
    assert len(set(folders)) == 2
    assert "trying once more" in caplog.text


def state(target: str, draft: str, keeper: str | None) -> PipelineState:
    """Of a pipeline that serves."""
    return PipelineState(True, {"target": target, "draft": draft}, None, {}, Health("ok"), keeper=keeper)


def test_a_worker_is_told_of_once_whoever_it_works_for():
    """One that pipelines share has all their numbers; others that say the same are others."""
    first, second, third = state("a", "d", "k"), state("b", "d", "k"), state("c", "d", "other")
    assert launch._progress([first]) == {"target": "a", "draft": "d"}
    told = {"target 1": "a", "draft 1+2": "d", "target 2": "b", "target 3": "c", "draft 3": "d"}
    assert launch._progress([first, second, third]) == told
    own = [state("a", "d", None), state("b", "d", None)]
    assert launch._progress(own) == {"target 1": "a", "draft 1": "d", "target 2": "b", "draft 2": "d"}


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ([[2], [0]], "draining 2 request(s), up to 10 s\n"),
        ([[None], [0]], "waiting for a pipeline that does not answer, up to 10 s\n"),
        ([[0]], ""),
    ],
)
def test_what_the_end_waits_for_is_told(monkeypatch, capfd, answers, told):
    """Once, and only where there is something to wait for."""
    left = iter(answers)
    monkeypatch.setattr(launch, "_ask_all", lambda method, timeout_s: [] if method == "drain" else next(left))
    launch.drain()
    assert capfd.readouterr().err == told


def test_told_to_stop_before_ray_nothing_is_started(config, monkeypatch, capfd):
    """A signal during the checks ends the command in order, says so, and starts no Ray."""
    monkeypatch.setattr(launch, "_ray", lambda address: pytest.fail("Ray was started"))
    monkeypatch.setattr(launch, "check_config", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    launch.serve_until_stopped(config)
    assert "stopping (Ctrl-C again to force)" in capfd.readouterr().err


def test_told_to_stop_before_serve_nothing_is_deployed(config):
    """`deployed` yields False and needs no Ray when it was told to stop before."""
    stopping = threading.Event()
    stopping.set()
    with launch.deployed(config, stopping) as up:
        assert up is False


def test_the_banner_is_a_request_with_an_end(config):
    """The printed body is JSON that asks for a bounded answer."""
    out = io.StringIO()
    launch._banner(config, Path("/somewhere/logs"), out)
    body = json.loads(out.getvalue().splitlines()[2].partition("-d '")[2].removesuffix("'"))
    assert body["max_tokens"] == 100
    assert body["model"] == "tiny"
    assert "Authorization" not in out.getvalue()
    assert out.getvalue().endswith("logs, while it runs: /somewhere/logs\n")


def test_the_banner_names_no_speculator_where_nothing_is_drafted(config):
    """Neither at depth 0 nor without a speculator."""
    for tree, told in (
        ({"engine": {"depth": 0, "depth_policy": "adaptive"}, "draft": {"speculator": "eagle"}}, "engine.depth is 0"),
        ({"draft": {"speculator": "none"}}, "draft.speculator is none"),
    ):
        out = io.StringIO()
        launch._banner(configs.parse(tree), None, out)
        assert out.getvalue().splitlines()[1] == f"drafts: none, as {told}, rule rejection"


def test_the_banners_request_has_the_key_that_the_server_asks_for(config):
    """By the name of its variable, as a shell reads the first of several; never the key itself."""
    server = config.server.model_copy(update={"api_keys": (SecretStr("topsecret"), SecretStr("other"))})
    out = io.StringIO()
    launch._banner(config.model_copy(update={"server": server}), None, out)
    curl = out.getvalue().splitlines()[2].replace("curl ", "printf '%s\\n' ", 1)
    told = subprocess.run(
        ["sh", "-c", curl], env={"SPECSERVE_API_KEY": "topsecret,other"}, capture_output=True, text=True, check=True
    )
    assert "Authorization: Bearer topsecret" in told.stdout.splitlines()
    assert "topsecret" not in out.getvalue()


def test_a_server_that_is_open_to_others_says_so(config, capfd):
    """The warning names the address and what to do; on loopback there is none."""
    launch._warn(config)
    assert capfd.readouterr().err == ""
    server = config.server.model_copy(update={"host": "0.0.0.0"})
    launch._warn(config.model_copy(update={"server": server}))
    told = capfd.readouterr().err
    assert "0.0.0.0" in told
    assert "SPECSERVE_API_KEY" in told


@pytest.mark.parametrize(
    ("address", "environment", "warned"),
    [
        (None, {}, False),
        ("auto", {"RAY_AUTH_MODE": "token"}, False),
        ("auto", {}, True),
        ("auto", {"RAY_AUTH_MODE": "disabled"}, True),
    ],
)
def test_somebody_elses_ray_without_tokens_is_warned_of(capfd, address, environment, warned):
    """A Ray of our own always has them."""
    launch._warn_of_open_ray(address, environment)
    assert ("RAY_AUTH_MODE=token" in capfd.readouterr().err) is warned


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_a_server_that_is_open_to_others_is_warned_of(capfd, host, warned):
    """Where it has no keys."""
    launch._warn(configs.parse({"server": {"host": host}}))
    assert ("SPECSERVE_API_KEY" in capfd.readouterr().err) is warned


def test_a_ray_that_is_not_there_is_told_at_once():
    """By the address, and before Ray itself begins to try; addresses without a port are Ray's to find."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot reach Ray at {address}"):
            launch._check_listening(address)
        nobody.listen()
        launch._check_listening(address)
    launch._check_listening("auto")
