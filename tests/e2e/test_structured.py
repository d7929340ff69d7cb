"""Structured answers through the whole engine, with a draft model that knows nothing of the target's taste."""

from __future__ import annotations

import itertools
import json
import random
import re

import jsonschema
import pytest
from json_schemas import random_schema
from tiny_models import tiny_llama

from specserve.errors import InvalidField
from specserve.local import LocalEngine
from specserve.transport.local import LocalChannel
from specserve.types import Request, RequestId, Sampling, Structured
from specserve.verification import verifier

MAX_TOKENS = 400


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [tiny_llama(tmp_path_factory.mktemp(name), seed=seed) for name, seed in (("target", 1), ("draft", 2))]


def engine_on(folders, speculator="small_model", **engine):
    target, draft = ({"source": str(folder), "kv_memory_gib": 0.05, "device": "cpu"} for folder in folders)
    limits = {"depth": 16, "max_requests": 50, "max_batch_tokens": 1024, "queue_limit": 1000}
    return LocalEngine(
        {"target": target, "draft": {"speculator": speculator, "model": draft}, "engine": limits | engine}
    )


@pytest.fixture(scope="module")
def engine(folders):
    with engine_on(folders) as engine:
        yield engine


NUMBERS = itertools.count()


def ask(engine, structured, depth, temperature, max_tokens=MAX_TOKENS):
    """Answers to these specifications, all of them together, in order; each with a seed of its own."""
    sampling = Sampling(temperature)
    requests = [
        Request(
            RequestId(f"r{next(NUMBERS)}"),
            tuple(engine.tokenizer.encode(f"Question {seed}", special=True)),
            max_tokens,
            sampling,
            seed=seed,
            depth=depth,
            structured=each,
        )
        for seed, each in enumerate(structured)
    ]
    return engine.complete(requests)


def schemas(count):
    rng = random.Random(11)
    return [random_schema(rng) for _ in range(count)]


@pytest.mark.parametrize("count", [25, pytest.param(100, marks=pytest.mark.full)])
def test_every_answer_is_valid_at_any_depth_and_temperature(engine, count):
    """Random schemas: whole, valid JSON each time; at temperature 0 the same text with and without speculation."""
    asked = schemas(count)
    wanted = [Structured("json_schema", json.dumps(schema)) for schema in asked]
    greedy = {}
    for temperature, depth in itertools.product((0.0, 1.0), (0, 4, 16)):
        answers = ask(engine, wanted, depth, temperature)
        for schema, answer in zip(asked, answers, strict=True):
            assert answer.finish_reason == "stop", (schema, answer.text)
            jsonschema.validate(json.loads(answer.text), schema)
        if temperature == 0:
            greedy[depth] = [answer.text for answer in answers]
        elif depth:
            assert sum(answer.stats.kept_tokens for answer in answers) > count
    assert greedy[0] == greedy[4] == greedy[16]
    assert len(set(greedy[0])) > count // 3
    assert engine.levels().slots_held == engine.levels().target_blocks_held == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_regex_choice_and_grammar(engine, temperature):
    """Each kind is held to, with drafts; all kinds in one batch."""
    pattern = r"[a-z]{2,6}(-[0-9]{1,3}){0,2}!"
    choices = ["yes", "no", "yes and no", "jein"]
    kinds = [
        Structured("regex", pattern),
        Structured("choice", json.dumps(choices)),
        Structured("grammar", 'start: word (", " word)~1..3\nword: /[a-c]{1,4}/'),
        Structured("json_object"),
    ]
    answers = ask(engine, kinds * 3, 4, temperature, max_tokens=60)
    for regex, choice, grammar, _ in zip(*[iter(answers)] * 4, strict=True):
        assert re.fullmatch(pattern, regex.text)
        assert choice.text in choices
        assert re.fullmatch(r"[a-c]{1,4}(, [a-c]{1,4}){1,3}", grammar.text)
        assert {regex.finish_reason, choice.finish_reason, grammar.finish_reason} == {"stop"}
    assert all(answer.text.startswith("{") for answer in answers[3::4])


def test_plain_requests_beside_structured_ones_are_untouched(engine):
    """Two of each in one batch: the plain ones answer as they do alone."""
    point = Structured("json_schema", '{"type": "array", "items": {"enum": [1, "a"]}, "maxItems": 3}')
    mixed = ask(engine, [None, point, None, point], 4, 0.0, max_tokens=60)
    plain = ask(engine, [None, None, None], 4, 0.0, max_tokens=60)
    assert [mixed[0].tokens, mixed[2].tokens] == [plain[0].tokens, plain[2].tokens]
    assert all(isinstance(json.loads(mixed[i].text), list) for i in (1, 3))


def test_guesses_that_know_no_grammar_are_refused_not_fatal(folders):
    """Prompt lookup repeats whatever stood in the prompt, end tokens and forbidden ones too."""
    with engine_on(folders, speculator="ngram", depth=8) as engine:
        item = Structured("json_schema", '{"type": "array", "items": {"enum": [1, 22]}, "minItems": 9, "maxItems": 9}')
        prompt = [*engine.tokenizer.encode("[1, 22, [1, 22, ] 1, 22, 1", special=False), 2, 0, 2]
        for depth in (0, 8):
            (answer,) = engine.generate([prompt * 3], max_tokens=MAX_TOKENS, depth=depth, structured=item)
            assert len(json.loads(answer.text)) == 9
            assert depth == 0 or answer.stats.drafted_tokens > answer.stats.kept_tokens > 0


@pytest.mark.parametrize("after", [1, 3, 9])
def test_a_verifier_replaced_in_the_middle_of_an_answer_goes_on_in_its_grammar(folders, after):
    """The new one is told the committed tokens, whatever round the old one was lost in: the text is the same."""
    wanted = [Structured("json_schema", json.dumps(schema)) for schema in schemas(6)]
    with engine_on(folders) as engine:
        undisturbed = [answer.text for answer in ask(engine, wanted, 4, 0.0)]
        fresh, info = verifier.build(engine.config)
        rounds = itertools.count()
        commit = engine._engine._commit

        def commit_and_replace(verdict):
            commit(verdict)
            if next(rounds) == after:
                channel = LocalChannel(fresh, engine._mailbox, "target", 1)
                engine._engine.attach("target", channel, 1, info)

        engine._engine._commit = commit_and_replace
        assert [answer.text for answer in ask(engine, wanted, 4, 0.0)] == undisturbed
        assert next(rounds) > after


def test_an_answer_cut_by_max_tokens_is_a_beginning_of_a_valid_one(engine):
    """Length ends a structured answer as any other; what is there is still within the grammar."""
    digits = Structured("regex", "[0-9]{50}")
    request = dict(max_tokens=5, depth=4, structured=digits, sampling=Sampling(1.0), seed=3)
    (answer,) = engine.generate(["x"], **request)
    assert (answer.finish_reason, len(answer.tokens)) == ("length", 5)
    assert re.fullmatch("[0-9]+", answer.text)


def test_what_cannot_be_served_is_refused_before_it_runs(engine):
    """By the engine's own door too: specifications, and options that contradict them."""
    with pytest.raises(InvalidField, match="look-around"):
        engine.generate(["x"], structured=Structured("regex", "(?=a)b"))
    with pytest.raises(InvalidField, match="ignore_eos"):
        engine.generate(["x"], structured=Structured("regex", "ab"), ignore_eos=True)
    assert engine.levels().running == 0
