"""Other engines' servers beside ours: asked with the same tokens, or named with the reason why they are not."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from http_server import serving
from tiny_models import tiny_llama

from specserve import LocalEngine
from specserve.bench.peers import Peer
from specserve.cli import main
from specserve.errors import SpecserveError, Unavailable


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("target"), seed=1)


@pytest.fixture(scope="module")
def url(folder):
    """A real server of that API: our own."""
    config = {"target": {"source": str(folder)}, "draft": {"speculator": "none"}, "engine": {"depth": 0}}
    with LocalEngine(config) as engine, serving(engine) as base_url:
        yield base_url


@contextmanager
def answering(answers: dict[str, tuple[int, bytes]]):
    """A server that says what it is told to, by path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = answers[self.path]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_peer_answers_every_prompt_in_full(url) -> None:
    """Two prompts of token ids at once: the tokens that were asked for, in a measured time."""
    with Peer("ours", url) as peer:
        outcome = peer.run([[5, 6, 7], [8, 9]], 6, 0, 2)
    assert outcome.tokens == 12
    assert outcome.seconds > 0


def test_the_table_has_peers_and_says_which_were_skipped(folder, url, tmp_path) -> None:
    """One that answers has a row for each concurrency; one that is not there has a row with the reason."""
    path = tmp_path / "compare.json"
    sizes = ["--prompts", "2", "--max-tokens", "3", "--passes", "1", "--concurrency", "1,2", "--depth", "0"]
    own = ["--target", str(folder), "--systems", "local", "--speculators", "none"]
    peers = ["--peers", f"there={url},gone=http://127.0.0.1:9"]
    assert main(["bench", "compare", *sizes, *own, *peers, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert len({tuple(row) for row in rows}) == 1
    found = [(row["system"], row["concurrency"], row["tokens_per_s"] is not None) for row in rows]
    assert found == [
        ("specserve-local", 1, True), ("specserve-local", 2, True), ("there", 1, True), ("there", 2, True),
        ("gone", None, False),
    ]  # fmt: skip
    assert rows[-1]["mode"].startswith("skipped: gone does not answer at http://127.0.0.1:9")
    assert rows[2]["mode"] == "as started"
    assert rows[0]["mode"] == "plain"


def test_nobody_at_the_address_is_told_at_once() -> None:
    """The port is closed."""
    with pytest.raises(Unavailable, match="gone does not answer"):
        Peer("gone", "http://127.0.0.1:9")


MODELS = (200, b'{"data": [{"id": "m"}]}')


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"/v1/models": (200, b'{"data": []}')}, "serves no model"),
        ({"/v1/models": (404, b"no such page")}, "answered 404: no such page"),
        ({"/v1/models": (200, b"<html>")}, "something else than a JSON object"),
        ({"/v1/models": MODELS, "/v1/completions": (500, b"broken")}, "answered 500: broken"),
        (
            {"/v1/models": MODELS, "/v1/completions": (200, b'{"usage": {"completion_tokens": 2}}')},
            "answered with 2 tokens where 6 were asked for",
        ),
    ],
    ids=["no model", "no such page", "no JSON", "broken", "short"],
)
def test_what_is_not_the_same_work_is_not_measured(answers, said) -> None:
    """A server without a model, of another kind, that fails, or that ends early."""
    with answering(answers) as base_url, pytest.raises(SpecserveError, match=said), Peer("it", base_url) as peer:
        peer.run([[5, 6]], 6, 0, 1)


@pytest.mark.parametrize("wrong", ["vllm", "vllm=127.0.0.1:8081", "=http://127.0.0.1:1"])
def test_peers_are_given_by_name_and_address(wrong, capsys) -> None:
    """Anything else is refused before a model is loaded."""
    with pytest.raises(SystemExit):
        main(["bench", "compare", "--peers", wrong])
    assert "takes servers such as" in capsys.readouterr().err
