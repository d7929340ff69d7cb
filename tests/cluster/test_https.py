"""The endpoint over TLS: with a certificate it speaks HTTPS and nothing else, and a wrong one starts nothing."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from deployment import WAIT_S, body, served

from specserve import config as configs
from specserve.app import build
from specserve.check import report
from specserve.cli.options import read_config
from specserve.cluster import launch
from specserve.cluster.https import check_certificate, http_options
from specserve.config import Config
from specserve.errors import ConfigError

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="openssl, which makes the certificate, is not installed")


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> dict[str, str]:
    """A certificate of our own making for this machine's loopback address, and its key."""
    return made(tmp_path_factory.mktemp("tls"))


def made(folder: Path, *options: str) -> dict[str, str]:
    paths = {"ssl_certfile": str(folder / "cert.pem"), "ssl_keyfile": str(folder / "key.pem")}
    command = [str(OPENSSL), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    command += ["-keyout", paths["ssl_keyfile"], "-out", paths["ssl_certfile"], "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, *names, *(options or ("-nodes",))], check=True, capture_output=True, timeout=60)
    return paths


def with_server(config: Config, **settings: object) -> Config:
    return config.model_copy(update={"server": config.server.model_copy(update=settings)})


def trusting(pair: dict[str, str]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=pair["ssl_certfile"])


def only_speaks_https(url: str, pair: dict[str, str]) -> None:
    """Who trusts the certificate gets an answer; who does not, or asks in the clear, gets none."""
    assert url.startswith("https://")
    health = httpx.get(f"{url}/-/healthz", verify=trusting(pair), timeout=WAIT_S)
    assert health.status_code in (200, 503)  # the latter while nothing is deployed
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{url}/-/healthz", timeout=WAIT_S, verify=ssl.create_default_context())
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"http{url.removeprefix('https')}/-/healthz", timeout=WAIT_S)


@pytest.mark.ray
def test_serves_proxy_takes_the_certificate(config, pair, ray_here) -> None:
    """Ray Serve started with our options, and nothing deployed: its proxy speaks HTTPS only."""
    from ray import serve

    server = launch.with_port(with_server(config, **pair)).server
    serve.start(http_options=http_options(server), logging_config={"enable_access_log": False})
    try:
        url = f"{server.scheme}://{server.host}:{server.port}"
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                httpx.get(f"{url}/-/healthz", verify=trusting(pair), timeout=WAIT_S)
                break
            except httpx.ConnectError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        only_speaks_https(url, pair)
    finally:
        serve.shutdown()


@pytest.mark.ray
@pytest.mark.full
def test_a_whole_deployment_answers_over_https(config, pair, ray_here, expected_text) -> None:
    """The text of one process, whole and as a stream, over an encrypted connection."""
    with served(with_server(config, **pair)) as address:
        url = f"https{address.removeprefix('http')}"
        with httpx.Client(base_url=url, verify=trusting(pair), timeout=WAIT_S) as client:
            answer = client.post("/v1/completions", json=body())
            assert answer.json()["choices"][0]["text"] == expected_text
            streamed = client.post("/v1/completions", json=body(stream=True))
            assert streamed.text.count("data: ") > 2
            assert streamed.text.endswith("data: [DONE]\n\n")
        only_speaks_https(url, pair)


def test_a_certificate_goes_with_its_key() -> None:
    """One without the other is a mistake that is told."""
    for name in ("ssl_certfile", "ssl_keyfile"):
        with pytest.raises(ConfigError, match="ssl_certfile and ssl_keyfile go together"):
            configs.parse({"server": {name: "some.pem"}})


@pytest.mark.parametrize("mistake", ["missing", "folder", "another key", "no certificate", "password"])
def test_files_that_cannot_serve_start_nothing(mistake, pair, tmp_path, monkeypatch) -> None:
    """Not there, not readable, of another pair, not PEM, with a password: refused by name before Ray starts."""
    wrong, told = dict(pair), "ssl_keyfile"
    if mistake == "missing":
        wrong["ssl_keyfile"], told = str(tmp_path / "none.pem"), r"cannot read server\.ssl_keyfile .*none\.pem: No such"
    elif mistake == "folder":
        wrong["ssl_certfile"], told = str(tmp_path), r"cannot read server\.ssl_certfile .*: Is a directory"
    elif mistake == "another key":
        wrong["ssl_keyfile"], told = made(tmp_path)["ssl_keyfile"], "the private key that belongs to it"
    elif mistake == "no certificate":
        (tmp_path / "text.pem").write_text("hello")
        wrong["ssl_certfile"], told = str(tmp_path / "text.pem"), "give a PEM certificate chain"
    else:
        wrong, told = made(tmp_path, "-passout", "pass:secret"), "the key needs a password"
    monkeypatch.setattr(launch, "_ray", lambda *_: pytest.fail("Ray was started"))
    config = configs.parse({"server": wrong | {"port": 0}, "target": {"source": "demo"}})
    with pytest.raises(ConfigError, match=told):
        launch.serve_until_stopped(config)


def test_check_tells_what_is_wrong_with_a_certificate_and_the_address(config, pair, tmp_path) -> None:
    """The address begins with https; a file that is missing is a problem."""
    (port,) = [str(each) for each in report(with_server(config, **pair)) if each.topic == "port"]
    assert "https://127.0.0.1:" in port
    missing = with_server(config, **pair | {"ssl_certfile": str(tmp_path / "none.pem")})
    assert any("none.pem" in str(each) for each in report(missing) if each.problem)


def test_flags_and_paths_reach_serve_and_bench_servers_have_none(config, pair, tmp_path, monkeypatch) -> None:
    """Proxies get absolute paths; a server that only its own process asks speaks plain HTTP."""
    from argparse import Namespace

    empty = dict.fromkeys(("config", "profile", "speculative_config"))
    read = read_config(Namespace(**empty, set=[], **pair))
    assert (read.server.ssl_certfile, read.server.ssl_keyfile) == (pair["ssl_certfile"], pair["ssl_keyfile"])
    monkeypatch.chdir(Path(pair["ssl_certfile"]).parent)
    server = with_server(config, ssl_certfile="cert.pem", ssl_keyfile="key.pem").server
    check_certificate(server)
    assert http_options(server) == {"host": server.host, "port": server.port} | pair
    assert http_options(config.server) == {"host": server.host, "port": server.port}
    assert configs.unkeyed(read).server.scheme == "http"


def test_a_certificate_in_the_args_of_a_serve_file_is_refused(pair) -> None:
    """Serve runs already and would not use it: silence would leave the endpoint in the clear."""
    with pytest.raises(ConfigError, match="http_options"):
        build({"server": pair})
