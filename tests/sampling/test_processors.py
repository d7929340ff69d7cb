"""Masks, biases and penalties on rows of logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specserve.errors import ProtocolError
from specserve.sampling.dists import process
from specserve.sampling.history import History
from specserve.sampling.processors import Place, Processors, apply
from specserve.types import Sampling

VOCAB = 20
NEVER = -torch.inf


def chain(*, prompt=(1, 2), answer=(), ends=(0,), **options):
    history = History(np.array([*prompt, *answer], dtype=np.int32), len(prompt))
    return Processors(Sampling(**options), ends, history)


def processed(processors, drafted=(), logits=None):
    """The changed row, from logits that are 1 for even ids and -1 for odd ones unless given."""
    row = torch.tensor([1.0, -1.0]).repeat(VOCAB // 2) if logits is None else logits
    rows = torch.stack([row, row])
    apply(rows, [Place(1, processors, drafted)], VOCAB)
    assert torch.equal(rows[0], row), "a row that nobody named was changed"
    return rows[1]


def test_repetition_divides_above_zero_and_multiplies_below_for_prompt_answer_and_draft():
    """Prompt 1, 2; answer 3; drafted 4: each once, whatever its count."""
    row = processed(chain(answer=[3, 3], repetition_penalty=2.0), drafted=[4, 4])
    assert row[1:6].tolist() == [-2.0, 0.5, -2.0, 0.5, -1.0]


def test_frequency_and_presence_count_the_answer_and_the_draft_only():
    """Answer 3, 3 and draft 3, 4: the prompt does not count."""
    row = processed(chain(answer=[3, 3], frequency_penalty=0.5, presence_penalty=0.25), drafted=[3, 4])
    assert row[1:6].tolist() == [-1.0, 1.0, -1 - 1.5 - 0.25, 1 - 0.5 - 0.25, -1.0]


def test_repetition_comes_before_frequency():
    """The order shows where both act on one token: 1 / 2 - 0.5, not (1 - 0.5) / 2; and the bias came before both."""
    row = processed(chain(answer=[4], repetition_penalty=2.0, frequency_penalty=0.5, logit_bias=((4, 1.0), (6, 3.0))))
    assert row[[4, 6]].tolist() == [2 / 2 - 0.5, 4.0]


def test_masks_come_last_in_effect():
    """No bias lifts a masked token."""
    row = processed(chain(allowed_token_ids=(3, 4), bad_words=((3,),), logit_bias=((5, 100.0), (3, 100.0))))
    assert row.isfinite().nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize(
    ("answer", "drafted", "masked"),
    [([], [], [9]), ([5], [], [7, 9]), ([], [5], [7, 9]), ([5], [6], [8, 9]), ([5, 6], [5], [7, 9]), ([6], [], [9])],
)
def test_a_bad_word_is_masked_where_it_would_be_complete(answer, drafted, masked):
    """Words 5 7, 5 6 8 and 9; their beginning may lie in the answer, in the draft, or in both."""
    row = processed(chain(answer=answer, bad_words=((5, 7), (5, 6, 8), (9,))), drafted=drafted)
    assert row.isneginf().nonzero().flatten().tolist() == masked


def test_a_bad_word_does_not_begin_in_the_prompt():
    """The answer may not hold it; a prompt that ends with its beginning is another matter."""
    assert processed(chain(prompt=(5,), bad_words=((5, 7),))).isfinite().all()


@pytest.mark.parametrize(("answer", "drafted", "held"), [([], [], True), ([5], [6], True), ([5, 6], [7], False)])
def test_ends_are_held_back_until_min_tokens(answer, drafted, held):
    """Three tokens of answer and draft, and then the end tokens are free."""
    row = processed(chain(answer=answer, min_tokens=3, ends=(0, 4)), drafted=drafted)
    assert bool(row[[0, 4]].isneginf().all()) is held
    assert row[[1, 2, 3, 5]].isfinite().all()


def test_a_mask_that_leaves_nothing_is_not_applied():
    """Only id 0 is allowed and it is an end and a bad word: the later masks give way."""
    row = processed(chain(allowed_token_ids=(0,), bad_words=((0,),), min_tokens=5))
    assert row.isfinite().nonzero().flatten().tolist() == [0]


def test_ids_that_are_allowed_and_masked_already_give_way():
    """A grammar left the row without them: the row stays as it was, and another one is held to the same ids."""
    masked = torch.full((VOCAB,), NEVER)
    masked[7] = 1.0
    rows = torch.stack([masked, torch.ones(VOCAB)])
    limited = chain(allowed_token_ids=(3, 4))
    apply(rows, [Place(0, limited, ()), Place(1, limited, ())], VOCAB)
    assert [row.isfinite().nonzero().flatten().tolist() for row in rows] == [[7], [3, 4]]


def test_rows_of_one_batch_have_each_its_own_context():
    """Index j sees the committed tokens and drafts 1 … j; the counts are the same before and after (MLC's T4)."""
    processors = chain(answer=[3], frequency_penalty=1.0)
    before = dict(processors.history.counts)
    rows = torch.zeros(4, VOCAB)
    apply(rows, [Place(j, processors, [7, 3, 7][:j]) for j in range(4)], VOCAB)
    assert [rows[j, [3, 7]].tolist() for j in range(4)] == [[-1, 0], [-1, -1], [-2, -1], [-2, -2]]
    assert processors.history.counts == before


def test_options_that_do_nothing_need_no_chain():
    """Temperature and filters alone, and penalties at their neutral values, cost nothing per row."""
    assert not Processors.wanted(Sampling(temperature=0.5, top_p=0.5, top_k=3, min_p=0.5))
    for option in (
        {"logit_bias": ((1, 1.0),)},
        {"min_tokens": 1},
        {"bad_words": ((1,),)},
        {"allowed_token_ids": (1,)},
        {"repetition_penalty": 1.1},
        {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1},
    ):
        assert Processors.wanted(Sampling(**option))


def test_ids_beyond_a_narrower_model_are_left_out():
    """A draft's logits may be narrower than the target's; ids that it does not have concern only the target."""
    wide = chain(
        prompt=(1, 25),
        answer=(26,),
        repetition_penalty=2.0,
        logit_bias=((30, 5.0),),
        bad_words=((31,),),
        allowed_token_ids=(2, 30),
    )
    assert processed(wide, drafted=[27]).isfinite().nonzero().flatten().tolist() == [2]


def test_a_history_is_rewritten_by_position():
    """Refused drafts vanish, what was kept stays, and a gap is an error; counts follow."""
    history = History(np.array([1, 2, 3], dtype=np.int32), 2)
    history.write(2, [3, 4, 5, 2])
    assert history.counts == {1: 0, 2: 1, 3: 1, 4: 1, 5: 1}
    history.write(4, [6])
    assert (history.tail(9), len(history)) == ([3, 4, 6], 5)
    assert history.counts == {1: 0, 2: 0, 3: 1, 4: 1, 6: 1}
    history.write(0, [1, 2, 3])
    assert history.tail(9) == [3]
    with pytest.raises(ProtocolError, match="position 5"):
        history.write(5, [1])
    assert {token: count for token, count in zip(*map(list, history.occurrences()), strict=True)} == {1: 0, 2: 0, 3: 1}


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, 5), (0.1, 4), (0.5, 2), (1.0, 1)])
def test_min_p_keeps_what_is_near_the_likeliest(min_p, kept):
    """Odds 8 : 4 : 2 : 1 : 0.5, renormalised; greedy rows stay one-hot."""
    logits = torch.tensor([[8.0, 4.0, 2.0, 1.0, 0.5]]).log().repeat(2, 1)
    settings = (torch.tensor([1.0, 0.0]), torch.ones(2), torch.zeros(2, dtype=torch.int64), 5)
    dist = process(logits, *settings, torch.full((2,), min_p))
    expected = torch.tensor([8.0, 4.0, 2.0, 1.0, 0.5])[:kept]
    torch.testing.assert_close(dist[0, :kept], expected / expected.sum())
    assert dist[0, kept:].sum() == 0
    assert dist[1].tolist() == [1, 0, 0, 0, 0]


def test_min_p_acts_after_top_p():
    """top-p 0.7 of .5 .25 .15 .1 keeps two; min-p before it would have made the first two reach 0.7 of less mass."""
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    settings = (torch.ones(1), torch.tensor([0.7]), torch.zeros(1, dtype=torch.int64), 4)
    dist = process(logits, *settings, torch.tensor([0.4]))
    torch.testing.assert_close(dist, torch.tensor([[2 / 3, 1 / 3, 0, 0]]))
    # The other order: min-p 0.6 leaves only the first, which top-p cannot bring back to two.
    assert (process(logits, *settings, torch.tensor([0.6])) > 0).sum() == 1
