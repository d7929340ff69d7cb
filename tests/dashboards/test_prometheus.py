"""A real Prometheus scrapes a running deployment under load: every panel and every alert finds its data."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml
from board_pictures import board_html
from browser import CHROMIUM, browsing
from http_server import serving
from lints import exprs, panels
from tiny_models import equal_pair

from specserve.dashboards.alerts import ALERTS
from specserve.local import LocalEngine

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
ROOT = Path(__file__).parents[2]
WORDS = ("once", "upon", "a", "time", "there", "was", "the", "sky")

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus (Debian: prometheus) is not installed"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    """A tiny pair over HTTP."""
    config = {
        **equal_pair(tmp_path_factory.mktemp("models"), kv_blocks=128, threads=1),
        "engine": {"depth": 3, "max_requests": 4},
    }
    with LocalEngine(config) as engine, serving(engine) as url:
        yield url


@pytest.fixture(scope="module")
def prometheus(server, tmp_path_factory) -> Iterator[Loaded]:
    """The shipped configuration and rules, at one scrape a second, after half a minute of load."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(ROOT / "deploy/prometheus/alerts.yml")]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.removeprefix("http://")]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with started(folder) as url:
        with under_load(server):
            time.sleep(25)
        yield Loaded(url, time.time())


@dataclass(frozen=True)
class Loaded:
    """A Prometheus, and when the load ended."""

    url: str
    until: float


@contextlib.contextmanager
def started(folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([PROMETHEUS, *arguments, f"--web.listen-address=127.0.0.1:{port}"], stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(f"{url}/-/ready")
            yield url
        finally:
            process.terminate()
            process.wait(timeout=20)


def wait_for(url: str) -> None:
    for _ in range(100):
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"{url} is not ready")


@contextlib.contextmanager
def under_load(server: str) -> Iterator[None]:
    """Mixed requests from four clients: sampled and greedy, plain and speculated, some that leave, some refused."""
    stop = threading.Event()
    threads = [threading.Thread(target=client, args=(server, stop, number)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def client(server: str, stop: threading.Event, number: int) -> None:
    for turn in itertools.count(number):
        if stop.is_set():
            return
        body = {"prompt": " ".join(WORDS[turn % 8 :] * (1 + turn % 3)), "max_tokens": 16 + turn % 9, "ignore_eos": True}
        body |= {"temperature": turn % 2, "seed": turn}
        if turn % 5 == 0:
            body |= {"speculation": {"enabled": False}}
        if turn % 7 == 0:
            leave(server, body)
        else:
            httpx.post(f"{server}/v1/completions", json=body, timeout=60)
        if turn % 6 == 0:
            httpx.post(f"{server}/v1/completions", json={"prompt": 5, "frobnicate": 1}, timeout=60)


def leave(server: str, body: dict[str, object]) -> None:
    with httpx.stream("POST", f"{server}/v1/completions", json=body | {"stream": True}, timeout=60) as answer:
        next(answer.iter_lines())


def query(prometheus: Loaded, expr: str) -> list[dict]:
    """The series of an expression over the last ten seconds of the load, as a panel asks for them."""
    expr = expr.replace("$__rate_interval", "8s").replace("$model_name", ".*")
    asked = {"query": expr, "start": prometheus.until - 10, "end": prometheus.until, "step": 1}
    answer = httpx.get(f"{prometheus.url}/api/v1/query_range", params=asked).json()
    assert answer["status"] == "success", (expr, answer)
    return answer["data"]["result"]


def found(prometheus: Loaded, expr: str) -> str | None:
    """What is wrong with the data of an expression."""
    result = query(prometheus, expr)
    values = [float(value) for series in result for _, value in series["values"]]
    if not values:
        return f"empty: {expr}"
    return f"not a number: {expr}" if any(math.isnan(value) for value in values) else None


@pytest.mark.parametrize("name", [path.stem for path in sorted((ROOT / "dashboards").glob("*.json"))])
def test_every_panel_shows_data(prometheus, name):
    """No expression of the board is empty or yields NaN while there is load."""
    board = json.loads((ROOT / "dashboards" / f"{name}.json").read_text(encoding="utf-8"))
    wrong = [f"{p['title']}: {what}" for p in panels(board) for e in exprs(p) if (what := found(prometheus, e))]
    assert wrong == []


def test_every_alert_reads_data(prometheus):
    """Without its threshold each condition has values: silence means that all is well, not blindness."""
    for alert in ALERTS:
        expr = alert.expr.rpartition(" < ")[0] or alert.expr.rpartition(" > ")[0] or alert.expr.partition(" == ")[0]
        expr = expr.replace("[5m]", "[8s]").replace("[15m]", "[8s]").replace("> 1)", "> 0)").replace("> 0.1)", "> 0)")
        expr = expr.replace("> 0.05)", "> 0)").replace('code=~"5.."', 'code=~"4.."')
        assert found(prometheus, expr) is None, alert.name


def test_prometheus_took_rules_and_scrapes(prometheus):
    """All rules are loaded and healthy, and no scrape failed."""
    (group,) = httpx.get(f"{prometheus.url}/api/v1/rules").json()["data"]["groups"]
    assert {rule["name"] for rule in group["rules"]} == {alert.name for alert in ALERTS}
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    (target,) = httpx.get(f"{prometheus.url}/api/v1/targets").json()["data"]["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")


def test_promtool_finds_nothing_in_the_metrics(server):
    """Names, units, help texts and types, once the names with a colon are left out, which are not ours."""
    text = httpx.get(f"{server}/metrics").text
    own = "".join(f"{line}\n" for line in text.splitlines() if "vllm:" not in line)
    done = subprocess.run([PROMTOOL, "check", "metrics"], check=False, input=own, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.skipif(CHROMIUM is None, reason="chromium (Debian: chromium) is not installed")
@pytest.mark.parametrize("name", [path.stem for path in sorted((ROOT / "dashboards").glob("*.json"))])
def test_a_board_can_be_drawn(prometheus, name, tmp_path):
    """Pictures for people without a Grafana; kept in SPECSERVE_PICTURES where that names a folder."""
    page_file = tmp_path / f"{name}.html"
    text = board_html(ROOT / "dashboards" / f"{name}.json", lambda expr: query(prometheus, expr))
    page_file.write_text(text, encoding="utf-8")
    height = int(re.search(r"height:(\d+)px'>", text)[1]) + 70
    with browsing() as page:
        page.open(page_file.as_uri(), 1440, height)
        picture = Path(os.environ.get("SPECSERVE_PICTURES", tmp_path)) / f"board-{name}.png"
        page.picture(picture, scale=0.75)
    assert 5_000 < picture.stat().st_size < 200_000
