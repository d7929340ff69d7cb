"""The page and `specserve top`, in front of a real engine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import httpx
import pytest
from browser import CHROMIUM, browsing
from http_server import serving
from rich.console import Console
from tiny_models import equal_pair

from specserve.api.page import FILES
from specserve.errors import Unavailable
from specserve.local import LocalEngine
from specserve.top import Top, spark


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Two equal tiny models, so that drafts are kept, in a chat."""
    config = {
        **equal_pair(tmp_path_factory.mktemp("models"), kv_blocks=128, threads=1),
        "engine": {"depth": 3},
    }
    with LocalEngine(config) as engine, serving(engine) as address:
        yield address


def test_the_page_comes_from_here_alone(url):
    """Every file is served with its type and a policy that lets nothing else in; no file names another host."""
    for path, name in FILES.items():
        answer = httpx.get(url + path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/")
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        rest = answer.text.replace("http://www.w3.org/2000/svg", "")  # a namespace, not an address
        assert "http:" not in rest, name
        assert "https:" not in rest, name
        assert "innerHTML" not in rest, name


def test_top_draws_the_pipeline(url):
    """One picture with both workers, levels and flows, after an answer."""
    httpx.post(f"{url}/v1/completions", json={"prompt": "once", "max_tokens": 12, "temperature": 0})
    console = Console(width=120, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    Top(url, console).run(once=True)
    text = console.export_text()
    assert "depth 3, rule rejection · ok" in text
    assert httpx.get(f"{url}/status.json").json()["tree_nodes"] is None
    for word in ("draft", "target", "slots 0 of", "tokens/s", "acceptance", "overlap"):
        assert word in text


@pytest.mark.parametrize(("policy", "most"), [("fixed", ""), ("adaptive", "at most ")])
def test_trees_are_told_with_their_size_and_whether_it_adapts(tmp_path, policy, most):
    """By the status and by top; chains have no nodes to tell of."""
    engine = {"depth": 3, "tree": "dynamic", "tree_nodes": 5, "depth_policy": policy}
    config = {**equal_pair(tmp_path, kv_blocks=128, threads=1), "engine": engine}
    with LocalEngine(config) as running, serving(running) as address:
        status = httpx.get(f"{address}/status.json").json()
        console = Console(width=120, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
        Top(address, console).run(once=True)
    assert (status["depth"], status["depth_policy"], status["tree_nodes"]) == (3, policy, 5)
    assert f"depth {most}3 in trees of {most}5 nodes, rule rejection" in console.export_text()


def test_top_says_when_nobody_answers():
    """In words, as all commands do."""
    with pytest.raises(Unavailable, match="is `specserve serve` running"):
        Top("127.0.0.1:9").run(once=True)


def test_sparks_are_as_high_as_their_share():
    """Nothing, half and all; zeros alone stay flat."""
    assert spark([0, 1, 2]) == " ▄█"
    assert spark([0, 0]) == "  "


QUESTION = "Name three planets and say one thing about each."
SAY = """(() => {{
  const set = (id, value) => {{ document.getElementById(id).value = value }};
  set('message', '{message}'); set('max-tokens', {tokens});
  const speculate = document.getElementById('speculate');
  if (speculate.checked !== {speculate}) speculate.click();
  document.getElementById('{button}').click();
}})()"""
LAST = "document.querySelector('.answers:last-child .answer:last-child .text')"


def said(speculate: str, button: str, message: str = "once upon a time", tokens: int = 24) -> str:
    """The script of a person who writes, sets both fields and presses a button."""
    return SAY.format(message=message, tokens=tokens, speculate=speculate, button=button)


def kinds(page) -> dict[str, int]:
    script = f"JSON.stringify([...{LAST}.children].map(token => token.className.split(' ')[1]))"
    found = json.loads(page.value(script))
    return {kind: found.count(kind) for kind in set(found)}


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="chromium (Debian: chromium) is not installed")
def test_a_person_sees_where_tokens_come_from(url):
    """Send, see colours, switch speculation off, get the same greedy text; the strip is alive and nothing complains."""
    with browsing() as page:
        page.open(f"{url}/", 1440, 900)
        page.until("document.getElementById('health').textContent == 'ok'")
        assert page.value("document.getElementById('key-field').offsetParent === null")
        page.value(said(speculate="true", button="send"))
        page.until(f"!!{LAST} && !document.body.dataset.busy")
        assert kinds(page).keys() >= {"accepted", "bonus"}
        speculated = page.value(f"{LAST}.textContent")
        page.value("document.getElementById('clear').click()")
        page.value(said(speculate="false", button="send"))
        page.until(f"!!{LAST} && !document.body.dataset.busy")
        assert kinds(page).keys() == {"plain"}
        assert page.value(f"{LAST}.textContent") == speculated
        page.value("document.getElementById('clear').click()")
        page.value(said(speculate="true", button="both"))
        page.until("!!document.querySelector('.verdict')")
        assert page.value("document.querySelector('.verdict').textContent").startswith("✓ the same text")
        page.until("!!document.querySelector('#tokens path.line')")
        assert page.value("document.querySelector('#target .device').textContent") == "cpu"
        assert page.messages == []


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="chromium (Debian: chromium) is not installed")
@pytest.mark.parametrize("width", [360, 768, 1440])
def test_the_page_fits_the_screen(url, width):
    """No sideways scrolling, from a phone to a desk."""
    with browsing() as page:
        page.open(f"{url}/", width, 800, phone=width < 500)
        page.until("document.getElementById('health').textContent == 'ok'")
        assert page.value("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.fixture(scope="module")
def demo():
    """The demo pair with its trained draft."""
    with LocalEngine({"target": {"context_length": 1024, "kv_memory_gib": 0.5}}) as engine, serving(engine) as address:
        yield address


@pytest.mark.full
@pytest.mark.demo
@pytest.mark.skipif(CHROMIUM is None, reason="chromium (Debian: chromium) is not installed")
@pytest.mark.parametrize(
    ("name", "width", "height", "button"), [("page", 1440, 900, "both"), ("page-phone", 390, 844, "send")]
)
def test_the_page_can_be_shown_to_people(demo, name, width, height, button, tmp_path):
    """A real answer at a desk and on a phone; kept in SPECSERVE_PICTURES where that names a folder."""
    with browsing() as page:
        page.open(f"{demo}/", width, height, phone=width < 500)
        page.until("document.getElementById('health').textContent == 'ok'")
        page.value(said("true", button, QUESTION, 40))
        page.until(f"!!{LAST} && !document.body.dataset.busy", seconds=240)
        page.until("!!document.querySelector('#tokens path.line')")
        if width < 500:
            page.value("window.scrollTo(0, document.body.scrollHeight)")
        picture = Path(os.environ.get("SPECSERVE_PICTURES", tmp_path)) / f"{name}.png"
        page.picture(picture)
        assert page.messages == []
        assert page.value("document.getElementById('key-field').offsetParent === null")
    assert 5_000 < picture.stat().st_size < 300_000
