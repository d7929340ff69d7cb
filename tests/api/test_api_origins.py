"""Where each token of a stream came from, on request."""

from __future__ import annotations

from scripted_engine import NOBODY, TOKENIZER, ScriptedEngine, app_of, chat, events_of, stats

from specserve.types import Delta


def script() -> list[Delta]:
    ids = TOKENIZER.encode("0 1 2 3 4 5 6 7 8 9", special=False)
    rounds = [(1, 0, 0), (3, 2, 4), (3, 2, 2), (1, 1, 3)]  # tokens, kept, offered; the last one is cut at its end
    deltas, at = [], 0
    for tokens, kept, offered in rounds:
        deltas.append(Delta(NOBODY, tuple(ids[at : at + tokens]), kept, offered))
        at += tokens
    last = deltas[-1]
    deltas[-1] = Delta(NOBODY, last.tokens, last.kept, last.offered, finish="length", stats=stats(at))
    return deltas


def streamed(**options: object) -> list[dict]:
    app = app_of(ScriptedEngine(script()))
    return [e for e in events_of(chat(app, stream=True, stream_options=options)) if e != "[DONE]"]


def test_each_token_has_its_origin_and_its_text():
    """Plain without a chain, a correction after a refused draft, a bonus after a whole chain; texts add up."""
    chunks = streamed(include_origins=True)
    rounds = [chunk["specserve"] for chunk in chunks if "specserve" in chunk]
    assert [entry["origins"] for entry in rounds] == [
        ["plain"],
        ["accepted", "accepted", "correction"],
        ["accepted", "accepted", "bonus"],
        ["accepted"],
    ]
    assert [(entry["drafted"], entry["kept"]) for entry in rounds] == [(0, 0), (4, 2), (2, 2), (3, 1)]
    content = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert "".join(text for entry in rounds for text in entry["texts"]) == content
    assert all(len(entry["texts"]) == len(entry["origins"]) for entry in rounds)


def test_nobody_else_sees_them():
    """Without the option, chunks are OpenAI's and nothing more."""
    assert all("specserve" not in chunk for chunk in streamed(include_usage=True))
