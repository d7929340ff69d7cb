"""The corpus: what the target writes, what a file holds, and how both are kept."""

from __future__ import annotations

import json
import random
from itertools import islice

import pytest
import torch
from tiny_models import tiny_llama
from tiny_tokenizer import write_folder
from transformers import AutoTokenizer

from specserve.bench.held_out import PROMPTS
from specserve.bench.prompts import CHATS
from specserve.config import ModelConfig
from specserve.distill import corpus, reading, writing
from specserve.distill.openings import Opening, opening
from specserve.errors import ConfigError
from specserve.models import loading

EXAMPLES = 14


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("target"), seed=3)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def configured(target, request):
    """The target in either dtype."""
    return ModelConfig(source=str(target), device="cpu", dtype=request.param)


@pytest.fixture(scope="module")
def model(target, configured):
    return loading.load_model(target, configured)


@pytest.fixture(scope="module")
def written(configured):
    return list(islice(writing.Writer(configured, rows=5, seed=7).examples(), EXAMPLES))


def test_the_states_are_those_of_the_target_on_the_whole_text(written, model):
    """Rows that start, end and are replaced at different steps hold what one forward over each text gives."""
    tolerance = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (0.12, 0.05)}[model.dtype]
    assert len({len(example.tokens) for example in written}) > 3
    for example in written:
        with torch.inference_mode():
            truth = model.model(input_ids=example.tokens[None], use_cache=False).last_hidden_state[0]
        assert example.hidden.shape == truth.shape
        assert example.hidden.dtype == model.dtype
        torch.testing.assert_close(example.hidden, truth, atol=tolerance[0], rtol=tolerance[1])


def test_greedy_answers_are_the_targets_first_choices(written, model):
    """At temperature 0 every answer token is the likeliest one by the states that are kept before it."""
    greedy = [example for example in written if example.temperature == 0]
    warm = [example for example in written if example.temperature == 1]
    assert greedy
    assert warm
    for example in greedy:
        assert (choices(model, example) == example.tokens[example.answer :]).all()
    assert any((choices(model, example) != example.tokens[example.answer :]).any() for example in warm)


def choices(model, example):
    return model.lm_head(example.hidden[example.answer - 1 : -1]).float().argmax(-1)


def test_every_text_is_one_chat_with_an_answer(written, target):
    """Head, message, tail, answer: as the chat template has them, and the message begins after what is common."""
    turn = writing.Turn.of(target)
    for example in written:
        tokens = example.tokens.tolist()
        assert example.start == len(turn.head)
        assert tokens[: example.start] == turn.head
        assert tokens[example.answer - len(turn.tail) : example.answer] == turn.tail


def test_messages_end_where_a_sentence_does(written, target):
    """Which ids that may be follows from their texts; no message is longer than the rule lets it become."""
    turn = writing.Turn.of(target)
    most = writing.OPENING_TOKENS + max(writing.MESSAGE_TOKENS) + writing.SENTENCE_TOKENS
    lengths = [example.answer - len(turn.tail) - example.start for example in written]
    assert max(lengths) <= most
    tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
    ends = [tokenizer(text, add_special_tokens=False)["input_ids"][-1] for text in ("the end.", "why?", "so!", "so")]
    assert [token in turn.closing for token in ends] == [True, True, True, False]


def test_a_whole_question_gets_its_answer_at_once(configured, target, monkeypatch):
    """Nothing is added to it, whatever the target would go on with; other messages are longer than their opening."""
    turn = writing.Turn.of(target)
    tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
    for whole in (True, False):
        monkeypatch.setattr(writing, "opening", lambda noise, whole=whole: Opening("a b a", whole))
        ids = tokenizer("a b a", add_special_tokens=False)["input_ids"]
        for example in islice(writing.Writer(configured, rows=3, seed=1).examples(), 6):
            message = example.tokens[example.start : example.answer - len(turn.tail)].tolist()
            assert message[: len(ids)] == ids
            assert (message == ids) == whole


def test_an_answer_ends_where_it_says_again_what_it_said():
    """As many tokens as `REPEATED_TOKENS`, in the same order; and where it is as long as answers get."""
    said = list(range(writing.REPEATED_TOKENS))
    assert writing._is_over([*said, 99, *said])
    assert writing._is_over([7] * (writing.REPEATED_TOKENS + 1))
    assert not writing._is_over([*said, 99, *said[:-1]])
    assert not writing._is_over([*said, 99, *said[1:], 98])
    assert not writing._is_over(list(range(writing.ANSWER_TOKENS - 1)))
    assert writing._is_over(list(range(writing.ANSWER_TOKENS)))


def test_no_opening_is_a_prompt_that_drafts_are_measured_on():
    """Those of `bench speculators` and of `bench compare` are held out."""
    measured = {*CHATS, *(prompt for kind in PROMPTS.values() for prompt in kind)}
    draw = random.Random(1)
    texts = {opening(draw).text for _ in range(60_000)} - {""}
    assert len(texts) > 8_000
    assert not texts & measured


def test_the_same_seed_writes_the_same_texts(configured, written):
    """Texts repeat with the seed and differ without it."""
    again = islice(writing.Writer(configured, rows=5, seed=7).examples(), 3)
    other = islice(writing.Writer(configured, rows=5, seed=8).examples(), 3)
    assert [one.tokens.tolist() for one in again] == [one.tokens.tolist() for one in written[:3]]
    assert [one.tokens.tolist() for one in other] != [one.tokens.tolist() for one in written[:3]]


def test_tokens_are_drawn_from_the_dist():
    """Inverse transform by bins meets every token as often as its probability, also past the first bin."""
    dist = torch.zeros(1, 700)
    dist[0, [3, 255, 256, 699]] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    noise = (torch.arange(1000) + 0.5) / 1000
    drawn = writing._by_bins(dist.expand(1000, -1), noise)
    assert drawn.bincount(minlength=700)[[3, 255, 256, 699]].tolist() == [100, 200, 300, 400]


def test_shards_hold_what_was_written(tmp_path, written):
    """Examples come back as they were, and their size is known without reading them."""
    corpus.write_shard(tmp_path, 4, written[:5])
    (path,) = corpus.shards(tmp_path)
    back = corpus.read_shard(path)
    assert corpus.number_of(path) == 4
    assert corpus.taught_tokens(path) == sum(len(one.tokens) - one.start for one in written[:5])
    for one, other in zip(back, written[:5], strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert torch.equal(one.hidden, other.hidden)
        assert (one.start, one.answer, one.temperature) == pytest.approx((other.start, other.answer, other.temperature))


def test_a_target_without_a_chat_template_cannot_write(tmp_path):
    """It is told to use a file."""
    folder = tiny_llama(tmp_path, seed=3)
    write_folder(folder, chat_template=None)
    with pytest.raises(ConfigError, match="no chat template"):
        writing.Turn.of(folder)


def test_files_of_text_and_of_chats(tmp_path, configured, model):
    """Documents of a text file, and lines of a .jsonl file; of a chat only the last message is the answer."""
    text = tmp_path / "some.txt"
    text.write_text("The first document.\n\nThe second one,\nwith two lines.\n")
    chats = tmp_path / "some.jsonl"
    messages = [{"role": "user", "content": "the dog"}, {"role": "assistant", "content": "the cat and the dog"}]
    chats.write_text(json.dumps({"text": "plain " * 600}) + "\n\n" + json.dumps({"messages": messages}) + "\n")
    plain = list(reading.Reader(configured, text).examples())
    mixed = list(reading.Reader(configured, chats).examples())
    assert [(one.start, one.answer) for one in plain] == [(1, 1), (1, 1)]
    assert max(len(one.tokens) for one in mixed) == reading.WINDOW
    chat = mixed[-1]
    with torch.inference_mode():
        truth = model.model(input_ids=chat.tokens[None], use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(chat.hidden.float(), truth.float(), atol=0.12, rtol=0.05)
    assert 1 < chat.answer < len(chat.tokens)
    assert [one.tokens.tolist() for one in reading.Reader(configured, chats).examples(2)] == [
        one.tokens.tolist() for one in mixed[2:]
    ]


@pytest.mark.parametrize("line", ["{", "[]", '{"messages": []}', '{"prompt": "a"}', '{"messages": [1, 2]}'])
def test_a_line_that_is_no_document_is_named(tmp_path, configured, line):
    """With the file and its number."""
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"bad\.jsonl, line 2"):
        reading.Reader(configured, file)


def test_one_text_at_a_time_can_be_written(configured):
    """With few rows there are steps in which every answer is greedy, or none is."""
    alone = list(islice(writing.Writer(configured, rows=1, seed=3).examples(), 8))
    assert {example.temperature > 0 for example in alone} == {True, False}
    assert all(len(example.tokens) > example.answer for example in alone)
