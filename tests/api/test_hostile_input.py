"""What a client or a model's folder may try: templates that reach out or never end, keys that are guessed by time."""

from __future__ import annotations

import contextlib
import hmac

import pytest
from scripted_engine import ScriptedEngine, app_of, call, chat, said

from specserve.api import access
from specserve.errors import RequestError
from specserve.templates import ChatTemplate

USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__ }}{{ ().__class__.__bases__[0].__subclasses__() }}",
        "{{ messages.append({'role': 'user', 'content': 'x'}) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.name }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    """Attributes of objects, changes of its input, files, modules and endless ranges: a 400, or nothing comes of it."""
    rendered = ""  # an attribute that the sandbox hides is rendered as nothing
    with contextlib.suppress(RequestError):
        rendered = ChatTemplate(source, {}).render(USER)
    assert rendered == ""


@pytest.mark.parametrize("field", ["chat_template", "template"])
def test_a_client_s_own_template_is_never_rendered(field: str) -> None:
    """It is refused or ignored; the engine sees the tokens of the model's own template."""
    engine = ScriptedEngine(said("x"))
    app = app_of(engine)
    assert chat(app).status_code == 200
    reply = chat(app, **{field: "{{ 7 * 7 }}"})
    assert reply.status_code == 400 or engine.requests[-1].prompt == engine.requests[0].prompt


@pytest.mark.parametrize("name", ["chat_template", "messages", "tools"])
def test_template_variables_cannot_replace_what_the_server_sets(name: str) -> None:
    """A 400 that says where."""
    reply = chat(app_of(ScriptedEngine(said("x"))), chat_template_kwargs={name: "{{ 7 * 7 }}"})
    assert reply.status_code == 400
    assert "chat_template_kwargs" in reply.json()["error"]["message"]


def test_every_key_is_compared_in_constant_time_whatever_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first key, the last one and a wrong one cost the same comparisons, of hashes of one length."""
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(access.hmac, "compare_digest", counting)
    keys = ["client-key-one", "client-key-two", "client-key-three"]
    app = app_of(ScriptedEngine(), api_keys=keys, admin_key="admin-key-0000")
    counts = set()
    for key in [*keys, "x", "client-key-on", "k" * 5000]:
        compared.clear()
        call(app, "GET", "/v1/models", headers={"authorization": f"Bearer {key}"})
        counts.add(len(compared))
        assert set(compared) == {(32, 32)}
    assert counts == {4}


@pytest.mark.parametrize("model", ["../../etc/passwd", "/etc/passwd", "tiny/../tiny"])
def test_names_from_clients_are_no_paths(model: str) -> None:
    """A model is looked up by its name only: anything else is a 404."""
    reply = chat(app_of(ScriptedEngine(said("x"))), model=model)
    assert reply.status_code == 404
