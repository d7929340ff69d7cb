"""Specifications: what compiles, what is refused and how, and that no specification takes long."""

from __future__ import annotations

import json

import pytest
from grammar_tokens import A, C, abc_grammars, ids, regex
from tiny_tokenizer import byte_level, word_mark

from specserve.errors import InvalidField, UnsupportedField
from specserve.sampling.constraint import Constraint
from specserve.sampling.grammar import Grammars
from specserve.text import Tokenizer
from specserve.types import Structured

MAX_BYTES = 64 * 1024
TOKENIZER = Tokenizer(byte_level(), end_tokens=frozenset({0, 2}))
GRAMMARS = Grammars(TOKENIZER)


def schema(**fields: object) -> Structured:
    return Structured("json_schema", json.dumps(fields))


def takes(structured: Structured, text: str) -> bool:
    """Whether the whole text is an answer: every token of it is allowed, and an end token after it."""
    tokens = TOKENIZER.encode(text, special=False)
    after = ids(Constraint(structured, GRAMMARS, tokens, 0).allowed())
    return after is not None and {0, 2} <= after


POINT = schema(
    type="object",
    properties={"x": {"type": "integer"}, "kind": {"enum": ["a", "b"]}},
    required=["x", "kind"],
    additionalProperties=False,
)


@pytest.mark.parametrize(
    ("structured", "good", "bad"),
    [
        (POINT, ['{"x": 1, "kind": "a"}', '{\n  "x": -20,\n  "kind": "b"\n}'], ['{"x": 1}', '{"x": 1.5, "kind": "a"}']),
        (Structured("json_object"), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a": 1', "{} x"]),
        (Structured("regex", "[a-c]+|x{2}"), ["abccba", "xx"], ["", "x", "xxx", "d"]),
        (Structured("regex", "é|日本"), ["é", "日本"], ["日", "e"]),
        (
            Structured("choice", '["yes", "no", "yes, but \\"no\\""]'),
            ["yes", "no", 'yes, but "no"'],
            ["y", "yes,", "No"],
        ),
        (Structured("grammar", 'start: item ("," item)*\nitem: /[0-9]+/'), ["1", "1,22,3"], ["1,", "a"]),
        (Structured("grammar", 'root ::= "a" b\nb ::= [0-9]+'), ["a0", "a123"], ["a", "0"]),
    ],
)
def test_each_kind_takes_its_own_texts_and_no_others(structured: Structured, good: list[str], bad: list[str]) -> None:
    """Every kind of specification compiles, passes the door, and decides by tokens what its texts are."""
    GRAMMARS.check(structured, max_bytes=MAX_BYTES)
    assert [text for text in good if not takes(structured, text)] == []
    assert [text for text in bad if takes(structured, text)] == []


@pytest.mark.parametrize(
    ("structured", "named"),
    [
        (Structured("json_schema", "{"), "json_schema"),
        (schema(type="bogus"), "bogus"),
        (schema(type="array", uniqueItems=True), "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        (schema(type="integer", minimum=5, maximum=3), "minimum"),
        ({"$ref": "http://127.0.0.1/x.json"}, "x.json"),
        ({"$ref": "file:///etc/hostname"}, "hostname"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "oneOf"),
        ({"uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}], "x-guidance": {"coerce_one_of": True}}, "oneOf"),
        (Structured("regex", "(a"), "regex"),
        (Structured("regex", "(?=a)b"), "look-around"),
        (Structured("regex", r"(a)\1"), "backreference"),
        (Structured("grammar", "start: missing"), "missing"),
        (Structured("grammar", "start: start"), "grammar"),
        (Structured("grammar", ""), "grammar"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(structured: Structured | dict, named: str) -> None:
    """Wrong, unsatisfiable and unsupported specifications, also those that ask to be taken lightly."""
    asked = structured if isinstance(structured, Structured) else schema(**structured)
    with pytest.raises(InvalidField, match=named) as error:
        GRAMMARS.check(asked, max_bytes=MAX_BYTES)
    assert error.value.param == asked.kind
    assert len(error.value.message) < 500


BOMBS = {
    "counted twice": Structured("regex", "(a{1000}){1000}"),
    "many stars": Structured("regex", "(a|a)*" * 2000),
    "deep regex": Structured("regex", "(" * 30_000 + "a" + ")" * 30_000),
    "deep grammar": Structured("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "doubling rules": Structured(
        "grammar", "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(40)) + '\na40: "x"'
    ),
    "long repeat": Structured("grammar", 'start: a{1000000}\na: "x"'),
    "product of choices": schema(
        allOf=[
            {"anyOf": [{"properties": {f"p{i}{j}": {"type": "integer"}}, "required": [f"p{i}{j}"]} for j in range(4)]}
            for i in range(12)
        ]
    ),
    "coprime multiples": schema(allOf=[{"type": "integer", "multipleOf": p} for p in (997, 1009, 1013, 1019, 1021)]),
    "many properties": schema(type="object", properties={f"p{i}": {"type": "integer"} for i in range(1500)}),
    "itself": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "deep schema": Structured("json_schema", "[" * 30_000),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", BOMBS)
def test_specifications_that_explode_are_refused(name: str) -> None:
    """Each of them would take very long, or all memory, if its expansion were followed to the end."""
    bomb = BOMBS[name]
    with pytest.raises(InvalidField):
        GRAMMARS.check(bomb if isinstance(bomb, Structured) else schema(**bomb), max_bytes=MAX_BYTES)


def test_a_long_specification_is_refused_before_it_is_compiled() -> None:
    """The limit counts UTF-8 bytes."""
    GRAMMARS.check(Structured("choice", '["é"]'), max_bytes=6)
    with pytest.raises(InvalidField, match="6 bytes, at most 5"):
        GRAMMARS.check(Structured("choice", '["é"]'), max_bytes=5)


def test_big_numbers_in_a_schema_cost_nothing() -> None:
    """Bounds are counted, not unrolled."""
    for fields in ({"type": "string", "maxLength": 10**9}, {"type": "array", "maxItems": 10**9, "items": {}}):
        GRAMMARS.check(schema(**fields), max_bytes=MAX_BYTES)


def test_white_space_between_json_tokens_is_bounded() -> None:
    """One space, or a line break with its indentation: a model cannot get lost in blanks."""
    assert takes(POINT, '{\n                    "x": 1, "kind": "a"}')
    assert not takes(POINT, '{  "x": 1, "kind": "a"}')
    assert not takes(POINT, '{\n\n"x": 1, "kind": "a"}')


def test_tokenizers_that_cannot_be_held_to_a_grammar_say_so() -> None:
    """Without end tokens an answer could never end; word marks without bytes cannot be matched."""
    endless = Grammars(Tokenizer(byte_level()))
    with pytest.raises(UnsupportedField, match="end token"):
        endless.check(regex("a"), max_bytes=MAX_BYTES)
    marks = Grammars(Tokenizer(word_mark(), end_tokens=frozenset({2})))
    with pytest.raises(UnsupportedField, match="tokenizer"):
        marks.check(regex("a"), max_bytes=MAX_BYTES)


def test_a_vocabulary_that_cannot_spell_the_answer_is_refused() -> None:
    """Five tokens cannot write a digit."""
    grammars = abc_grammars()
    with pytest.raises(InvalidField, match="no text"):
        grammars.check(regex("[0-9]"), max_bytes=MAX_BYTES)
    assert ids(Constraint(regex("a|c"), grammars, [], 0).allowed()) == {A, C}
