"""Temperature, filters and drawing."""

import pytest
import torch

from specserve.sampling import dists
from specserve.sampling.dists import draw, filter_dist, process


def processed(logits: torch.Tensor, temperature=1.0, top_p=1.0, top_k=0, vocab_size=None) -> torch.Tensor:
    n = len(logits)
    return process(
        logits,
        torch.full((n,), temperature),
        torch.full((n,), top_p),
        torch.full((n,), top_k),
        logits.shape[1] if vocab_size is None else vocab_size,
    )


def test_temperature_zero_is_one_hot_at_the_lowest_of_the_largest() -> None:
    """Ties at temperature 0 go to the lowest id."""
    assert processed(torch.tensor([[1.0, 3.0, 3.0, 0.0]]), temperature=0).tolist() == [[0, 1, 0, 0]]


@pytest.mark.parametrize("temperature", [1e-40, 1e-6, 0.3, 1.0, 2.0])
def test_temperature_divides_logits(temperature: float) -> None:
    """The dist is softmax(logits / temperature), finite for any positive temperature."""
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0)) * 50
    expected = torch.softmax(logits.double() / torch.tensor(temperature).double(), -1).float()
    assert torch.allclose(processed(logits, temperature), expected, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.9, 0), (1.0, 5), (0.5, 50)])
def test_ids_beyond_the_vocabulary_are_impossible(temperature: float, top_p: float, top_k: int) -> None:
    """Padding ids have probability 0 even where their logits are the largest."""
    logits = torch.randn(3, 20)
    logits[:, 12:] = 100.0
    dist = processed(logits, temperature, top_p, top_k, vocab_size=12)
    assert dist[:, 12:].abs().sum() == 0
    assert torch.allclose(dist.sum(-1), torch.ones(3))


@pytest.mark.parametrize("k", [1, 2, 7, 40, 100])
def test_top_k_keeps_exactly_k(k: int) -> None:
    """k ids survive, the likeliest ones, with their ratios unchanged."""
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    plain, dist = processed(logits), processed(logits, top_k=k)
    assert (dist > 0).sum(-1).tolist() == [min(k, 40)] * 5
    for row, before in zip(dist, plain, strict=True):
        kept = row > 0
        assert before[kept].min() >= before[~kept].amax() if (~kept).any() else True
        assert torch.allclose(row[kept], before[kept] / before[kept].sum(), rtol=1e-5)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95])
def test_top_p_keeps_the_smallest_sufficient_set(top_p: float) -> None:
    """The kept mass reaches top_p; without its least likely member it would not."""
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(2)) * 2
    plain, dist = processed(logits), processed(logits, top_p=top_p)
    for row, before in zip(dist, plain, strict=True):
        kept = before[row > 0]
        assert kept.sum() >= top_p - 1e-6
        assert kept.sum() - kept.min() < top_p + 1e-6


def test_filters_combine_top_k_first() -> None:
    """top-p counts the mass that top-k has left: of [.4 .3 .2 .1] with k = 2, p = .5 keeps the first alone."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert processed(logits, top_p=0.5, top_k=2).tolist() == [[1, 0, 0, 0]]
    assert processed(logits, top_p=0.6, top_k=2)[0].tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])


@pytest.mark.parametrize("width", [8, 3000, 20_000])
def test_equal_probabilities_keep_the_lower_ids(width: int) -> None:
    """On a flat row both filters keep the first ids, however wide it is."""
    flat = torch.zeros(1, width)
    assert processed(flat, top_k=3)[0].nonzero().flatten().tolist() == [0, 1, 2]
    assert processed(flat, top_p=0.5 - 0.5 / width)[0].nonzero().flatten().tolist() == list(range(width // 2))


def test_looking_at_few_candidates_first_changes_nothing() -> None:
    """The short look and the full sort give the same dists, for flat and peaked rows in one batch."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 5000, generator=generator) * torch.tensor([0.0, 0.1, 1.0, 2.0, 4.0, 8.0])[:, None]
    dist = torch.softmax(logits.round(decimals=1), -1)
    top_p = torch.tensor([0.9, 0.3, 0.99, 0.5, 0.95, 0.9])
    top_k = torch.tensor([0, 0, 40, 0, 1000, 0])
    for row in range(6):
        one = (dist[row : row + 1], top_p[row : row + 1], top_k[row : row + 1])
        assert torch.equal(filter_dist(*one), filter_dist(*one, candidates=5000))
    assert torch.equal(filter_dist(dist, top_p, top_k), filter_dist(dist, top_p, top_k, candidates=5000))


def test_mixed_rows_are_as_if_alone() -> None:
    """Greedy, plain and filtered rows of one batch do not touch each other."""
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(4))
    temperature = torch.tensor([0.0, 1.0, 0.5, 0.0, 2.0])
    top_p = torch.tensor([0.5, 1.0, 0.8, 1.0, 1.0])
    top_k = torch.tensor([0, 0, 10, 3, 4])
    batch = process(logits, temperature, top_p, top_k, 60)
    for r in range(5):
        alone = process(logits[r : r + 1], temperature[r : r + 1], top_p[r : r + 1], top_k[r : r + 1], 60)
        assert torch.equal(batch[r : r + 1], alone)


def test_a_row_is_filtered_to_the_same_bits_in_any_company() -> None:
    """A neighbour whose top k needs a longer sort changes no bit of a row, and the long row is right."""
    logits = torch.randn(40, 5000, generator=torch.Generator().manual_seed(9))
    n = len(logits)
    temperature, top_p = torch.full((n,), 1.3), torch.full((n,), 0.9)
    top_k = torch.full((n,), 700)
    top_k[-3:] = torch.tensor([1500, 1024, 4000])
    batch = process(logits, temperature, top_p, top_k, 5000)
    for r in range(n):
        alone = process(logits[r : r + 1], temperature[r : r + 1], top_p[r : r + 1], top_k[r : r + 1], 5000)
        assert torch.equal(batch[r : r + 1], alone)
    plain = processed(logits, 1.3)
    assert torch.equal(batch[-3:] > 0, filter_dist(plain[-3:], top_p[-3:], top_k[-3:], candidates=5000) > 0)


def test_process_leaves_its_input_alone() -> None:
    """The logits are not written to."""
    logits = torch.randn(2, 10)
    before = logits.clone()
    processed(logits, top_p=0.5, top_k=3, vocab_size=8)
    assert torch.equal(logits, before)


def test_draw_inverts_the_cdf() -> None:
    """The share of evenly spread noise that lands on an id is the id's probability."""
    weights = torch.tensor([0.0, 2.0, 0.0, 5.0, 3.0, 0.0])
    noise = (torch.arange(1000).double() + 0.5) / 1000
    counts = torch.bincount(draw(weights.expand(1000, 6), noise), minlength=6)
    assert counts.tolist() == [0, 200, 0, 500, 300, 0]


@pytest.mark.parametrize("noise", [0.0, 0.5, 1 - 2.0**-24, 1 - 2.0**-53, 1.0])
def test_draw_never_returns_an_impossible_id(noise: float) -> None:
    """No noise, not even 1, picks an id without weight."""
    weights = torch.rand(200, 500, generator=torch.Generator().manual_seed(5))
    weights[:, ::3] = 0
    weights[:, 400:] = 0
    weights[:50] *= 1e-30
    picked = draw(weights, torch.full((200,), noise, dtype=torch.float64))
    assert (weights.gather(1, picked[:, None]) > 0).all()


def test_greedy_batches_make_no_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of temperature 0 needs no pass over exponentials."""
    monkeypatch.setattr(dists, "_softmax", lambda *_: pytest.fail("softmax of a greedy batch"))
    processed(torch.randn(3, 10), temperature=0)
