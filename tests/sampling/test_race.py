"""Noise per token id, and the race that it decides."""

import sys

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest

from specserve.sampling.noise import Purpose, philox, token_keys, token_words, uniform
from specserve.sampling.race import race, race_sparse

race_module = sys.modules[race.__module__]
KNOWN_KEYS = [[1704915664, -1241373260, 338905745, -1727431911]]
KNOWN_WORDS = [[2078965859, 1844268860, 1017544455, 2072887641]]
KNOWN_UNIFORM = [0.10713226698205458]


def keys_of(count: int, seed: int = 5) -> torch.Tensor:
    return token_keys(torch.tensor([seed]), torch.arange(count))


def rings(keys: torch.Tensor, vocab: int) -> torch.Tensor:
    """E of every id, by the definition: float64 [m, vocab]."""
    ids = torch.arange(vocab, dtype=torch.int32)
    own, block = (
        [token_words(keys[:, None, part], numbers) for part in (slice(0, 2), slice(2, 4))]
        for numbers in (ids, -1 - ids // 64)
    )
    after = -torch.log1p(-(own[0] + (own[1].double() + 0.5) / 2**31) / 2**31)
    first = -torch.log1p(-(block[0] + ((block[1] // 64).double() + 0.5) / 2**25) / 2**31) / 64
    return first + torch.where(block[1] % 64 == ids % 64, 0, after)


def scores(dist: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """dist / E of every id in float64, with no short cut."""
    return dist.double() / rings(keys, dist.shape[1])


def mixed(x: int, key: int) -> int:
    """The integer mixer in plain Python."""
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = ((x ^ (x >> 15)) ^ key) * 0x846CA68B % 2**32
    return (x ^ (x >> 16)) >> 1


def test_token_words_are_the_documented_integers() -> None:
    """Key words are a Philox block with purpose 3; an id's bits are the mixer's, as unsigned 32-bit arithmetic."""
    seed, position, branch = -7, 2**32 - 3, 2
    counter, seed_words = [[2**32 - 3], [0], [3], [branch]], [[2**32 - 7], [2**32 - 1]]
    words = philox(np.array(counter, dtype=np.uint64), np.array(seed_words, dtype=np.uint64))
    key = words[:, 0].tolist()
    keys = token_keys(torch.tensor([seed]), torch.tensor([position]), torch.tensor([branch]))
    assert [int(k) % 2**32 for k in keys[0]] == key
    ids = [0, 1, 77, 31_999, 151_999]
    found = token_words(keys[:, None, :2], torch.tensor(ids, dtype=torch.int32))[0].tolist()
    assert found == [mixed((i + key[0]) % 2**32, key[1]) for i in ids]


def test_known_answers() -> None:
    """The keys and bits of one seed, written down once: they may never change."""
    keys = token_keys(torch.tensor([42]), torch.tensor([7]))
    assert keys.tolist() == KNOWN_KEYS
    assert token_words(keys[:, None, :2], torch.arange(4, dtype=torch.int32)).tolist() == KNOWN_WORDS
    assert uniform(torch.tensor([42]), Purpose.CHOOSE, torch.tensor([7]), torch.tensor([1])).tolist() == KNOWN_UNIFORM


def test_the_noise_of_an_id_depends_on_its_key_and_id_only() -> None:
    """Any subset of ids, in any order and shape, has the bits that the whole vocabulary has, in numpy as in torch."""
    keys = keys_of(3)[:, None, :2]
    everything = token_words(keys, torch.arange(1000, dtype=torch.int32))
    some = torch.tensor([999, 3, 500], dtype=torch.int32)
    assert torch.equal(token_words(keys, some), everything[:, some.long()])
    assert (token_words(keys.numpy(), np.arange(1000, dtype=np.int32)) == everything.numpy()).all()


def test_clocks_ring_on_other_devices_as_in_numpy() -> None:
    """What CPUs compute in numpy is what torch computes elsewhere, but for the last bit of a logarithm."""
    keys, ids = (
        keys_of(40)[:, None],
        torch.randint(200_000, (40, 300), generator=torch.Generator().manual_seed(3)).int(),
    )
    in_numpy = race_module._rings(np, ids.numpy(), keys.numpy())
    assert torch.allclose(race_module._rings(torch, ids, keys), torch.from_numpy(in_numpy), rtol=1e-15, atol=0)


def test_noise_per_id_is_uniform_and_independent() -> None:
    """Over ids, and over positions, words are uniform; neighbours in either, and branches, do not correlate."""
    ids = torch.arange(2000, dtype=torch.int32)
    words = token_words(keys_of(400)[:, None, :2], ids).double() / 2**31
    for sample in (words[7], words[:, 11], words.flatten()[::7]):
        assert kstest(sample.numpy(), "uniform").pvalue > 1e-3
    other = token_words(token_keys(torch.tensor([5]), torch.arange(400), torch.tensor([1]))[:, None, :2], ids).double()
    low = token_words(keys_of(400)[:, None, 2:], ids).double()
    pairs = {
        "ids": (words[:, :-1], words[:, 1:]),
        "positions": (words[:-1], words[1:]),
        "branches": (words, other),
        "bits": (words, low),
    }
    for name, (a, b) in pairs.items():
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()
        assert abs(correlation) < 5e-3, name
    # The smallest word of a row decides races: where it lies is even over ids, and its size is exponential.
    smallest, where = words.min(-1)
    assert kstest(smallest.numpy() * 2000, "expon").pvalue > 1e-3
    assert kstest(where.numpy() / 2000, "uniform").pvalue > 1e-3


def test_clocks_of_ids_are_independent_exponentials() -> None:
    """Each E, over positions and over ids, is standard exponential; no two of a block or of two blocks correlate."""
    found = rings(keys_of(3000), 200)
    for sample in (found[:, 0], found[:, 63], found[:, 64], found[7], found.flatten()[::7]):
        assert kstest(sample.numpy(), "expon").pvalue > 1e-3
    apart = torch.corrcoef(found.T) - torch.eye(200)
    assert apart.abs().max() < 5.5 / 3000**0.5
    # Likewise of the smallest of any subset: within a block, across two, and of one whole block.
    for ids in (range(3), range(60, 70), range(64), range(130, 200, 7)):
        smallest, first = found[:, list(ids)].min(-1)
        assert kstest(smallest.numpy() * len(ids), "expon").pvalue > 1e-3
        assert chisquare(torch.bincount(first, minlength=len(ids)).numpy()).pvalue > 1e-3


def test_every_bit_of_a_word_depends_on_the_id() -> None:
    """Flipping one bit of the id flips each bit of the word about half of the time."""
    keys = keys_of(3000)[:, None, :2]
    for flipped in (1, 2, 256, 65536):
        a, b = (token_words(keys, torch.tensor([i], dtype=torch.int32)) for i in (1234, 1234 ^ flipped))
        changed = ((a ^ b) >> torch.arange(31, dtype=torch.int32)) & 1
        share = changed.double().mean(0)
        assert (share - 0.5).abs().max() < 0.05


@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 65, 127, 128, 1000, 1024, 5003])
@pytest.mark.parametrize("scale", [0.0, 1.0, 6.0])
def test_the_short_cut_finds_the_winner_of_all_scores(vocab: int, scale: float) -> None:
    """Bounds never hide the winner, for flat and for sharp dists; batches of few values are worked out whole."""
    dist = torch.softmax(torch.randn(300, vocab, generator=torch.Generator().manual_seed(vocab)) * scale, -1)
    keys = keys_of(300)
    assert torch.equal(race(dist, keys), scores(dist, keys).argmax(-1))
    filtered = torch.where(dist >= dist.topk(min(3, vocab), -1).values[:, -1:], dist, 0)
    assert torch.equal(race(filtered, keys), scores(filtered, keys).argmax(-1))
    assert (filtered.gather(1, race(filtered, keys)[:, None]) > 0).all()


def test_a_sparse_race_is_the_race_among_its_ids() -> None:
    """Over the ids of its support, in any order and padded, a dist has the winner that it has as a whole row."""
    dist = torch.softmax(torch.randn(500, 300, generator=torch.Generator().manual_seed(1)) * 3, -1)
    probs, ids = dist.topk(20, -1)
    truncated = torch.zeros_like(dist).scatter_(1, ids, probs)
    padded = [torch.nn.functional.pad(part.flip(-1), (3, 2)) for part in (ids.int(), probs)]
    assert torch.equal(race_sparse(*padded, keys_of(500)), race(truncated, keys_of(500)))


def test_a_row_does_not_depend_on_its_company() -> None:
    """A row alone, and among others, has the same winner; so has float64."""
    dist = torch.softmax(torch.randn(64, 20_000, generator=torch.Generator().manual_seed(2)), -1)
    together = race(dist, keys_of(64))
    assert race(dist.double(), keys_of(64)).tolist() == together.tolist()
    for row in (0, 31, 63):
        assert race(dist[row : row + 1], keys_of(64)[row : row + 1]).item() == together[row]


def test_winners_follow_the_dist() -> None:
    """Over 200,000 positions an id wins as often as its probability says; a wrong dist is noticed."""
    dist = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.04, 0.01])
    found = torch.bincount(race(dist.expand(200_000, -1), keys_of(200_000)), minlength=6).numpy()
    assert chisquare(found, dist.double().numpy() / dist.double().sum().item() * 200_000).pvalue > 1e-3
    wrong = torch.tensor([0.42, 0.23, 0.2, 0.1, 0.04, 0.01]).double().numpy()
    assert chisquare(found, wrong / wrong.sum() * 200_000).pvalue < 1e-6


def test_the_race_has_the_dists_law_by_integration() -> None:
    """Integrated over a grid of the noise of three ids, each wins with its probability."""
    steps, dist = 160, torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    clocks = -torch.log1p(-(torch.arange(steps).double() + 0.5) / steps)
    grid = torch.stack(torch.meshgrid(clocks, clocks, clocks, indexing="ij"), -1)
    share = torch.bincount((dist / grid).argmax(-1).flatten(), minlength=3).double() / steps**3
    assert torch.allclose(share, dist, atol=2 / steps)


@pytest.mark.parametrize("bad", [float("nan"), 0.0])
def test_a_row_without_a_dist_spoils_no_other(bad: float) -> None:
    """Rows of NaN or of zeros get some id, and their neighbours their winners."""
    dist = torch.full((3, 200), 1 / 200)
    dist[1] = bad
    found = race(dist, keys_of(3))
    assert 0 <= int(found[1]) < 200
    assert found[[0, 2]].tolist() == race(dist[[0, 2]], keys_of(3)[[0, 2]]).tolist()


def test_no_rows_have_no_winners() -> None:
    """An empty batch is no special case for callers."""
    assert race(torch.empty(0, 9), torch.empty(0, 4, dtype=torch.int32)).shape == (0,)
