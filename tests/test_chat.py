"""The terminal chat against a real server with a tiny model."""

from __future__ import annotations

import io
import json
import signal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import pytest
from http_server import serving
from pydantic import SecretStr
from tiny_models import tiny_llama

from specserve.chat import Chat, server_url
from specserve.cli import main
from specserve.errors import ConfigError, SpecserveError, Unavailable
from specserve.local import LocalEngine

TOO_LONG = "word " * 600


class Interrupting(io.StringIO):
    """A terminal whose user presses Ctrl-C once, after `after` pieces of an answer."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def write(self, text: str) -> int:
        written = super().write(text)
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)
        return written


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tiny_llama(tmp_path_factory.mktemp("target"), seed=1)
    target = {"source": str(folder), "device": "cpu", "kv_blocks": 200}
    tree = {"model_name": "tiny", "target": target, "draft": {"speculator": "ngram"}, "engine": {"max_requests": 2}}
    with LocalEngine(tree) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine):
    with serving(engine) as url:
        yield url


def talk(monkeypatch, url, *lines, out=None, **options):
    """What the terminal shows after these lines and the end of input, and the chat."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    shown = io.StringIO() if out is None else out
    chat = Chat(url, out=shown, temperature=0, max_tokens=24, **options)
    chat.run()
    return shown.getvalue(), chat


def roles(chat):
    return [message["role"] for message in chat._messages]


def test_an_answer_is_shown_with_its_numbers_and_remembered(monkeypatch, url) -> None:
    """The answer stands in the history, and the line below it tells tokens and drafts."""
    shown, chat = talk(monkeypatch, url, "hi")
    assert roles(chat) == ["user", "assistant"]
    assert chat._messages[1]["content"] in shown
    assert "[24 tokens, " in shown


def test_a_depth_of_0_switches_drafting_off_and_a_greedy_answer_stays(monkeypatch, url) -> None:
    """What the server cannot do is told with what it can."""
    (drafted, with_drafts), (plain, without) = (talk(monkeypatch, url, "hi hi hi", depth=depth) for depth in (2, 0))
    assert with_drafts._messages == without._messages
    assert "drafted tokens kept" in drafted
    assert "drafted" not in plain
    assert "[not answered: speculation.depth: at most 4 here]" in talk(monkeypatch, url, "hi", depth=9)[0]


def test_an_error_is_told_and_the_chat_goes_on_without_the_failed_message(monkeypatch, url) -> None:
    """A message over the context is refused by the server; the next one is answered as if it had not been sent."""
    shown, chat = talk(monkeypatch, url, TOO_LONG, "hi")
    assert "[not answered: " in shown
    assert roles(chat) == ["user", "assistant"]
    assert chat._messages[0]["content"] == "hi"
    with pytest.raises(SpecserveError):
        chat.say(TOO_LONG)
    assert roles(chat) == ["user", "assistant"]


@pytest.fixture
def interruptible():
    """Ctrl-C interrupts, whatever servers of other tests made of it in this process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_stops_the_answer_and_keeps_the_prompt(monkeypatch, url) -> None:
    """What was shown stays as the answer, and the next line is answered."""
    out = Interrupting(after=4)
    shown, chat = talk(monkeypatch, url, "hi", "again", out=out)
    assert "\n[stopped]\n" in shown
    assert roles(chat) == ["user", "assistant"] * 2
    assert 0 < len(chat._messages[1]["content"]) < len(chat._messages[3]["content"])


def test_ctrl_c_at_the_prompt_says_how_to_end(monkeypatch, url) -> None:
    """The prompt is only left on purpose."""

    class Pressed(io.StringIO):
        def readline(self, *size):
            if not self.tell():
                self.seek(1)
                raise KeyboardInterrupt
            return super().readline(*size)

    monkeypatch.setattr("sys.stdin", Pressed(" hi\n"))
    shown = io.StringIO()
    chat = Chat(url, out=shown, max_tokens=4, temperature=0)
    chat.run()
    assert "/quit or Ctrl-D ends." in shown.getvalue()
    assert roles(chat) == ["user", "assistant"]


def test_commands_are_answered_and_never_sent(monkeypatch, url) -> None:
    """/clear forgets all but the system prompt; unknown commands list the known ones; /quit ends."""
    shown, chat = talk(monkeypatch, url, "hi", "/help", "/clear", "/clera x", "/quit", "never", system="be brief")
    assert roles(chat) == ["system"]
    assert "starts over]" in shown
    assert "there is no command /clera\n" in shown
    assert shown.count("/quit    ends") == 2


@pytest.mark.parametrize(
    ("said", "status"), [("hi\n", 0), ("", 0), ("/help\n/quit\n", 0), (f"{TOO_LONG}\n", 1), (f"{TOO_LONG}\nhi\n", 1)]
)
def test_the_exit_status_tells_of_messages_without_an_answer(monkeypatch, url, capsys, said, status) -> None:
    """Who sends a message through a pipe reads nothing else; one that was answered later makes up for none."""
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    assert main(["chat", "--url", url, "--max-tokens", "4"]) == status
    assert ("[not answered: " in capsys.readouterr().out) is bool(status)


def test_the_model_is_checked_before_the_first_prompt(monkeypatch, url, capsys) -> None:
    """A wrong name is told with the names that are served."""
    assert main(["chat", "--url", url, "--model", "huge"]) == 1
    assert "no model called 'huge', but tiny" in capsys.readouterr().err
    assert "Chatting with tiny" in talk(monkeypatch, url, model="tiny")[0]


@pytest.mark.parametrize("form", ["{}", "{}/", "{}/v1", "{}/v1/"])
def test_addresses_as_people_type_them(url, form) -> None:
    """The scheme and /v1 may be there or not."""
    assert Chat(form.format(url)).model() == "tiny"
    assert Chat(form.format(url.removeprefix("http://"))).model() == "tiny"


@pytest.mark.parametrize("wrong", ["ftp://host", "http://", "host:port"])
def test_what_is_no_address_is_refused(wrong) -> None:
    """The flag is named."""
    with pytest.raises(ConfigError, match="--url"):
        server_url(wrong)


def test_no_server_is_told_at_once(url) -> None:
    """A closed port, and a server that is not OpenAI-compatible."""
    with pytest.raises(Unavailable, match="is `specserve serve` running"):
        Chat("127.0.0.1:1").model()
    assert httpx.get(f"{url}/health").status_code == 200
    with pytest.raises(SpecserveError, match="/health"):
        Chat(f"{url}/health").model()


def test_a_server_with_keys_is_asked_with_one(monkeypatch, engine) -> None:
    """With the key the chat works; without it the first request is refused in words."""
    server = engine.config.server.model_copy(update={"api_keys": (SecretStr("chat-key"),)})
    monkeypatch.setattr(engine, "config", engine.config.model_copy(update={"server": server}))
    with serving(engine) as url:
        shown, _ = talk(monkeypatch, url, "Hello", api_key="chat-key")
        assert "tokens" in shown
        with pytest.raises(SpecserveError, match="API key"):
            talk(monkeypatch, url, "Hello")


CUT = ": cut\n\n"


@pytest.fixture
def broken_server():
    """Serves a model's name, and whatever body it is given for an answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(json.dumps({"data": [{"id": "tiny"}]}))

        def do_POST(self) -> None:
            self.answer(self.server.body)

        def answer(self, body: str) -> None:
            self.send_response(200)
            if body.startswith(CUT):  # in chunks, of which the last one never comes
                self.send_header("Transfer-Encoding", "chunked")
                body = f"{len(body):x}\r\n{body}\r\n"
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def event(content: str, finish: str | None) -> str:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("", "sent no answer"),
        ("<html>Sign in</html>", "sent no answer"),
        (event("He", None), "the answer was cut"),
        (CUT + event("He", None), "the answer was cut"),
        (event("He", "abort"), "the answer was cut"),
        (event("Hello", "stop") + "data: [DONE]\n\n", None),
    ],
)
def test_an_answer_that_did_not_come_whole_is_told(monkeypatch, broken_server, capsys, body, told) -> None:
    """By the exit status too: a proxy's login page, a stream that was cut, one that the server gave up."""
    broken_server.body = body
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert main(["chat", "--url", f"http://127.0.0.1:{broken_server.server_port}"]) == (1 if told else 0)
    shown = capsys.readouterr().out
    assert told in shown if told else "[not answered" not in shown
