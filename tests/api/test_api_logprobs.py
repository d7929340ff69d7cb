"""Log-probabilities, echo and several answers to one prompt, as clients see them."""

from __future__ import annotations

import math

import pytest
from scripted_engine import NOBODY, TOKENIZER, ScriptedEngine, app_of, chat, complete, events_of, said, stats

from specserve.types import Delta, Request, TokenLogprob

HIGH, LOW = -0.25, -math.inf


def scored(text: str) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
    """The tokens of a text, each with a score and two alternatives: itself and the next id."""
    tokens = tuple(TOKENIZER.encode(text, special=False))
    return tokens, tuple(TokenLogprob(token, HIGH, ((token, HIGH), (token + 1, LOW))) for token in tokens)


def script(*texts: str) -> list[Delta]:
    """Deltas with scores, the last of which ends the answer."""
    parts = [scored(text) for text in texts]
    deltas = [Delta(NOBODY, tokens, logprobs=scores) for tokens, scores in parts[:-1]]
    tokens, scores = parts[-1]
    return [*deltas, Delta(NOBODY, tokens, finish="length", stats=stats(3), logprobs=scores)]


def test_a_chat_has_one_entry_per_token() -> None:
    """Token, logprob, bytes and alternatives; minus infinity is -9999; a split character shows its bytes."""
    body = chat(app_of(ScriptedEngine(script("fox ", "😀"))), logprobs=True, top_logprobs=2).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"]
    assert bytes(value for entry in content for value in entry["bytes"]).decode() == "fox 😀"
    assert content[0]["token"] == TOKENIZER.token_text(scored("fox ")[0][0])[0]
    assert {len(entry["top_logprobs"]) for entry in content} == {2}
    assert content[0]["logprob"] == content[0]["top_logprobs"][0]["logprob"] == HIGH
    assert content[0]["top_logprobs"][1]["logprob"] == -9999.0


def test_a_completion_has_four_parallel_lists() -> None:
    """Offsets point at where each token begins in the text."""
    body = complete(app_of(ScriptedEngine(script("The quick ", "fox"))), logprobs=1).json()
    (choice,) = body["choices"]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"] == "The quick fox"
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert found["token_logprobs"] == [HIGH] * len(found["tokens"])
    assert all(top[token] == HIGH for top, token in zip(found["top_logprobs"], found["tokens"], strict=True))


@pytest.mark.parametrize("fields", [{}, {"stop": "never"}])
def test_a_stream_carries_each_score_once(fields: dict[str, object]) -> None:
    """Pieces put together are the whole answer's lists, whether or not text was held back."""
    deltas = script("n", "ev", "e", "n")
    whole = complete(app_of(ScriptedEngine(deltas)), logprobs=1, **fields).json()["choices"][0]["logprobs"]
    events = events_of(complete(app_of(ScriptedEngine(deltas)), logprobs=1, stream=True, **fields))
    pieces = [event["choices"][0]["logprobs"] for event in events[:-1] if event["choices"]]
    for name in whole:
        assert [value for piece in pieces if piece for value in piece[name]] == whole[name]
    chats = events_of(chat(app_of(ScriptedEngine(deltas)), logprobs=True, stream=True, **fields))
    entries = [event["choices"][0]["logprobs"] for event in chats[:-1]]
    assert sum(len(entry["content"]) for entry in entries if entry) == len(whole["tokens"])


def test_scores_reach_as_far_as_the_counted_tokens() -> None:
    """Tokens that complete a stop text are counted and scored, though their text is cut."""
    body = complete(app_of(ScriptedEngine(script("one E", "ND"))), logprobs=0, stop="END").json()
    (choice,) = body["choices"]
    assert choice["text"] == "one "
    assert len(choice["logprobs"]["tokens"]) == body["usage"]["completion_tokens"]


def test_no_scores_unless_asked() -> None:
    """logprobs stays null, also for chats that say false."""
    for response in (
        chat(app_of(ScriptedEngine(said("x"))), logprobs=False),
        complete(app_of(ScriptedEngine(said("x")))),
    ):
        assert response.json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_in_front(stream: bool) -> None:
    """The prompt's text and scores come first, the first token's without a number; stop texts in it do not stop."""
    prompt = tuple(TOKENIZER.encode("The fox", special=False))
    _, scores = scored("The fox")
    tokens, own = scored(" jumps")
    first = TokenLogprob(prompt[0], None)
    last = Delta(NOBODY, tokens, finish="length", stats=stats(2), logprobs=own, prompt_logprobs=(first, *scores[1:]))
    engine = ScriptedEngine([last])
    fields = {"prompt": list(prompt), "echo": True, "logprobs": 1, "stop": ["fox"], "stream": stream}
    response = complete(app_of(engine), **fields)
    choice = (events_of(response)[0] if stream else response.json())["choices"][0]
    assert choice["text"] == "The fox jumps"
    assert "".join(choice["logprobs"]["tokens"]) == "The fox jumps"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert None not in choice["logprobs"]["token_logprobs"][1:]
    assert (engine.requests[0].prompt_logprobs, engine.requests[0].max_tokens) == (1, 16)


def test_max_tokens_0_with_echo_scores_only() -> None:
    """Nothing is generated; the text is the prompt's."""
    engine = ScriptedEngine([Delta(NOBODY, (), finish="length", stats=stats(0, ()))])
    body = complete(app_of(engine), prompt="fox", echo=True, max_tokens=0).json()
    assert body["choices"][0]["text"] == "fox"
    assert (engine.requests[0].max_tokens, body["usage"]["completion_tokens"]) == (0, 0)


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("prompts", [["a"], ["a", "b c"]])
def test_n_answers_to_each_prompt(prompts: list[str], seed: int | None) -> None:
    """Choice index is prompt · n + branch; branches share prompt, seed and family; prompts count once."""

    def script(request: Request) -> list[object]:
        return said(f"{len(request.prompt)}.{request.branch}", finish="length")

    engine = ScriptedEngine(script)  # type: ignore[arg-type]
    body = complete(app_of(engine), prompt=prompts, n=3, best_of=3, temperature=0, seed=seed).json()
    encoded = [TOKENIZER.encode(text, special=True) for text in prompts]
    assert [choice["text"] for choice in body["choices"]] == [f"{len(ids)}.{b}" for ids in encoded for b in range(3)]
    assert [choice["index"] for choice in body["choices"]] == list(range(3 * len(prompts)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, encoded))
    for ids in encoded:
        family = [request for request in engine.requests if list(request.prompt) == ids]
        assert sorted(request.branch for request in family) == [0, 1, 2]
        assert len({request.seed for request in family}) == len({request.family for request in family}) == 1
        assert seed is None or family[0].seed == seed
    assert len({request.family for request in engine.requests}) == len(prompts)
    assert len({request.id for request in engine.requests}) == 3 * len(prompts)


def test_a_chat_streams_n_choices() -> None:
    """Each choice has its role, its text and its end; the usage counts the prompt once."""
    events = events_of(
        chat(app_of(ScriptedEngine(said("a", "b"))), n=2, stream=True, stream_options={"include_usage": True})
    )
    for index in (0, 1):
        mine = [e["choices"][0] for e in events[:-2] if e["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "ab"
        assert [choice["finish_reason"] for choice in mine].count("stop") == 1
    alone = chat(app_of(ScriptedEngine(said("a", "b")))).json()["usage"]["prompt_tokens"]
    assert events[-2]["usage"]["prompt_tokens"] == alone


def test_min_tokens_holds_for_stop_texts() -> None:
    """Stop texts are searched in what follows the first min_tokens tokens."""
    tokens = tuple(TOKENIZER.encode("XX", special=False))
    assert len(tokens) == 2
    ended = Delta(NOBODY, tokens, finish="stop", stop_reason="X", stats=stats(2))
    assert complete(app_of(ScriptedEngine([ended])), stop="X", min_tokens=1).json()["choices"][0]["text"] == "X"
    assert complete(app_of(ScriptedEngine([ended])), stop="X").json()["choices"][0]["text"] == ""
