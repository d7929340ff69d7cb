"""What C says of rows over a vocabulary is what tensor operations say."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from specserve import native
from specserve.config import EngineConfig
from specserve.errors import ProtocolError
from specserve.sampling import _kernels, blocks, noise
from specserve.sampling.dists import draw_where_possible, process
from specserve.sampling.race import race, race_scores
from specserve.sampling.wire import sparsify
from specserve.verification import FixedNoise, judges_of
from specserve.verification._draft_rows import DraftRows

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler with OpenMP")

WIDTHS = (1, 2, 63, 64, 65, 127, 128, 129, 1000, 5000)
JUDGES = {name: judge for name, judge in judges_of(EngineConfig()).items() if name != "synthetic"}


@contextmanager
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine that has no compiler."""
    caches = (_kernels.kernel, _kernels._philox)
    with monkeypatch.context() as patched:
        patched.setattr(native, "library", lambda: None)
        for each in caches:
            each.cache_clear()
        yield
    for each in caches:
        each.cache_clear()


@pytest.fixture
def both(monkeypatch):
    """Runs a function with kernels and without."""

    def run(function: Callable[[], object]) -> tuple[object, object]:
        with_kernels = function()
        with without_kernels(monkeypatch):
            return with_kernels, function()

    return run


def dists(kind: str, rows: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows of one kind: nearly certain, spread like a language model's, equal, or mostly 0."""
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    scale = {"sharp": 12.0, "usual": 3.0, "flat": 0.0, "filtered": 3.0}[kind]
    dist = torch.softmax(logits * scale, -1)
    if kind == "filtered":
        dist = torch.where(dist >= dist.topk(min(5, width), -1).values[:, -1:], dist, 0)
    return dist / dist.sum(-1, keepdim=True)


def uniforms(*shape: int, seed: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_integers_of_the_noise_are_the_same_bits(both) -> None:
    """Seeds and positions at their limits, branches and places, for both uniforms and keys."""
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789])[:, None]
    positions, places = torch.tensor([0, 1, 77, 2**31, 2**32 - 1])[None], torch.tensor([0, 1, 65_537, 2**32 - 1, 5])
    compiled, plain = both(
        lambda: (
            noise.uniform(seeds, noise.Purpose.ACCEPT, positions, 3, places),
            noise.token_keys(seeds, positions, 2**32 - 1),
        )
    )
    assert all(torch.equal(a, b) for a, b in zip(compiled, plain, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["sharp", "usual", "flat", "filtered"])
def test_races_have_the_same_winners(both, kind: str, dtype: torch.dtype) -> None:
    """For any width of a row, and 2,000 keys."""
    for seed, width in enumerate(WIDTHS):
        dist = dists(kind, 200, width, dtype, seed)
        keys = noise.token_keys(torch.arange(200), torch.tensor(width))
        compiled, plain = both(lambda dist=dist, keys=keys: race(dist, keys))
        assert torch.equal(compiled, plain), width


def test_races_over_whole_vocabularies_have_the_same_winners(both) -> None:
    """32,000 and 152,000 ids, in a batch that two threads share."""
    for width in (32_000, 152_000):
        dist = dists("usual", 16, width, torch.float32, 1)
        keys = noise.token_keys(torch.arange(16), torch.tensor(9))
        compiled, plain = both(lambda dist=dist, keys=keys: race(dist, keys))
        assert torch.equal(compiled, plain)
        assert compiled.tolist() == [int(race(dist[i : i + 1], keys[i : i + 1])) for i in range(16)]


def test_scores_of_single_ids_are_the_same(both) -> None:
    """To the last bits of a logarithm, whatever the ids."""
    ids = torch.randint(200_000, (50, 40), generator=torch.Generator().manual_seed(1)).int()
    probs, keys = uniforms(50, 40, seed=2).float(), noise.token_keys(torch.arange(50), torch.tensor(3))
    compiled, plain = both(lambda: race_scores(ids, probs, keys))
    assert torch.allclose(compiled, plain, rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["sharp", "usual", "filtered"])
def test_draws_are_the_same(both, kind: str, dtype: torch.dtype) -> None:
    """Also where a row has no weight at all. For noise 1, which only rounding could make, any possible id will do."""
    for seed, width in enumerate(WIDTHS):
        weights = dists(kind, 300, width, dtype, seed)
        weights[7] = 0
        chance = uniforms(300, seed=seed)
        chance[:7] = 1
        compiled, plain = both(lambda weights=weights, chance=chance: draw_where_possible(weights, chance))
        assert torch.equal(compiled[0][7:], plain[0][7:]), width
        assert (weights[:7].gather(1, compiled[0][:7, None]) > 0).all()
        assert torch.equal(compiled[1], plain[1])
        assert compiled[1].tolist() == [i != 7 for i in range(300)]


def test_rows_may_lie_apart(both) -> None:
    """Every third row of a tensor is read where it lies."""
    weights = dists("usual", 300, 500, torch.float32, 4)[::3]
    keys = noise.token_keys(torch.arange(100), torch.tensor(1))
    compiled, plain = both(lambda: (race(weights, keys), draw_where_possible(weights, uniforms(100, seed=3))[0]))
    assert all(torch.equal(a, b) for a, b in zip(compiled, plain, strict=True))


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", JUDGES)
def test_rules_give_the_same_verdicts(both, name: str, dtype: torch.dtype, sparse: bool) -> None:
    """Ragged chains, padded drafts, and drafted tokens that are likely, unlikely and impossible."""
    for seed, (vocab, depth) in enumerate([(3, 2), (40, 4), (300, 0), (700, 5)]):
        rows = 400
        target = dists("usual", rows * (depth + 1), vocab, dtype, seed).view(rows, depth + 1, vocab)
        shape = (rows, depth, vocab)
        draft = (dists("usual", rows * depth, vocab, dtype, 9 + seed).view(shape) * 0.3 + target[:, :-1] * 0.7) ** 2
        probs, ids = draft.topk(min(8, vocab), -1)
        probs[..., 5:] = 0
        probs /= probs.sum(-1, keepdim=True)
        ids = torch.where(probs > 0, ids, 0)
        generator = torch.Generator().manual_seed(seed)
        places = torch.randint(min(8, vocab), (rows, depth, 1), generator=generator)
        tokens, lengths = ids.gather(2, places).squeeze(2), torch.randint(depth + 1, (rows,), generator=generator)
        keys = noise.token_keys(torch.arange(rows)[:, None], torch.arange(depth + 1)[None])
        chance = FixedNoise(uniforms(rows, depth, seed=seed), uniforms(rows, depth + 1, seed=50 + seed), keys)
        dense = torch.zeros(shape, dtype=dtype).scatter_add_(2, ids, probs)
        offered = DraftRows(ids, probs) if sparse else DraftRows.whole(dense)
        compiled, plain = both(
            lambda c=(target, offered, tokens, lengths, chance): JUDGES[name](*c)  # one case at a time
        )
        assert torch.equal(compiled[0], plain[0])
        assert torch.equal(compiled[1], plain[1])


@pytest.mark.parametrize("name", JUDGES)
def test_threads_change_nothing(name: str) -> None:
    """A batch that is large enough to be shared among threads gets what each of its rows gets alone."""
    rows, depth, vocab = 64, 1, 16_000
    target = dists("usual", rows * 2, vocab, torch.float32, 3).view(rows, 2, vocab)
    probs, ids = target[:, :1].topk(64, -1)
    draft, tokens = DraftRows(ids, probs / probs.sum(-1, keepdim=True)), ids[:, :, 0]
    keys = noise.token_keys(torch.arange(rows)[:, None], torch.arange(2)[None])
    chance = FixedNoise(uniforms(rows, 1, seed=1), uniforms(rows, 2, seed=2), keys)
    lengths = torch.full((rows,), depth)
    kept, following = JUDGES[name](target, draft, tokens, lengths, chance)
    for row in range(0, rows, 7):
        me = slice(row, row + 1)
        alone = FixedNoise(chance.accept[me], chance.choose[me], keys[me])
        mine = DraftRows(draft.ids[me], draft.probs[me])
        said = JUDGES[name](target[me], mine, tokens[me], lengths[me], alone)
        assert (int(said[0]), int(said[1])) == (int(kept[row]), int(following[row]))


@pytest.mark.parametrize("name", JUDGES)
@pytest.mark.parametrize("token", [-1, 10])
def test_ids_outside_of_the_vocabulary_are_refused(name: str, token: int) -> None:
    """Nothing beside a row is read."""
    target = torch.full((1, 2, 10), 0.1)
    chance = FixedNoise(torch.zeros(1, 1).double(), torch.zeros(1, 2).double(), torch.zeros(1, 2, 4).int())
    tokens = torch.tensor([[token]])
    with pytest.raises(ProtocolError, match="vocabulary of 10"):
        JUDGES[name](target, DraftRows.certain(tokens), tokens, torch.tensor([1]), chance)


@pytest.mark.parametrize("temperature", [1e-3, 0.7, 1.0, 5.0])
def test_softmax_is_that_of_float64_to_within_rounding(temperature: float) -> None:
    """Ids without a chance have none, padding has none, and a row's bits do not depend on its company."""
    logits = torch.randn(5, 3001, generator=torch.Generator().manual_seed(2)) * 8
    logits[1, ::2] = -torch.inf
    logits[2] = 3
    heat = np.full(5, temperature, dtype=np.float32)
    found = _kernels.softmax(logits, heat, 2999)
    expected = torch.softmax(logits[:, :2999].double() / float(heat[0]), -1)
    # Below e^-87 of the largest nothing is left. A logit far below it is rounded by a larger step.
    assert torch.allclose(found[:, :2999].double(), expected, rtol=1e-5, atol=1e-37)
    assert torch.allclose(found[:, :2999].double(), expected, rtol=0, atol=3e-7)
    assert (found[:, 2999:] == 0).all()
    assert (found[1, :2999:2] == 0).all()
    assert torch.equal(torch.cat([_kernels.softmax(row[None], heat[:1], 2999) for row in logits]), found)


@pytest.mark.parametrize("width", [1, 7, 1024, 1025, 49_152])
def test_sums_of_exponentials_are_those_of_float64_to_within_rounding(width: int) -> None:
    """Rows that lie apart, of any width, with ids that are not allowed."""
    rows = (torch.randn(3, width + 5, generator=torch.Generator().manual_seed(width)) * 4)[:, :width]
    rows[1, 1::3] = -torch.inf
    most = rows.amax(-1)
    expected = (rows.double() - most[:, None]).exp().sum(-1)
    found = _kernels.exp_sums(rows, most.numpy())
    assert torch.allclose(torch.from_numpy(found), expected, rtol=1e-6)


def test_greedy_rows_of_a_batch_are_one_hot(both) -> None:
    """Temperature 0 counts as 1 within the kernel, and is settled after it."""
    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(1))
    settings = (torch.tensor([0.0, 1.0, 0.5]), torch.tensor([1.0, 1.0, 0.9]), torch.tensor([0, 0, 4]))
    compiled, plain = both(lambda: process(logits, *settings, 64))
    assert torch.allclose(compiled, plain, rtol=1e-6)
    assert torch.equal(compiled > 0, plain > 0)


def test_what_is_no_number_spoils_its_row_only() -> None:
    """As with tensor operations: the verifier finds such a row by its logits, and the others are served."""
    logits = torch.zeros(3, 40)
    logits[1, 5] = torch.nan
    found = _kernels.softmax(logits, np.ones(3, dtype=np.float32), 40)
    assert found.isnan().all(-1).tolist() == [False, True, False]
    keys = noise.token_keys(torch.arange(3), torch.tensor(1))
    for ids in (race(found, keys), draw_where_possible(found, uniforms(3, seed=1))[0]):
        assert ((ids >= 0) & (ids < 40)).all()


def test_the_largest_place_is_the_first_one() -> None:
    """Ties go to the lowest id, NaN comes first, in blocks and across them; rows of -inf have place 0."""
    rows = torch.zeros(7, 1000)
    rows[0, [300, 301, 900]] = 1
    rows[1, [20, 700]] = torch.tensor([5.0, torch.nan])
    rows[2] = -torch.inf
    rows[3, 999] = 2
    rows[4, [40, 45]] = torch.tensor([torch.nan, torch.inf])
    rows[5, 3:] = -1
    rows[6, 255:257] = 1
    assert blocks.argmax(rows).tolist() == [300, 700, 0, 999, 40, 0, 255]
    for width in (1, 2, 15, 16, 17, 255, 256, 257):
        mixed = torch.randint(4, (200, width), generator=torch.Generator().manual_seed(width)).float()
        assert torch.equal(blocks.argmax(mixed), (mixed == mixed.amax(-1, keepdim=True)).long().argmax(-1))


@pytest.mark.parametrize("kind", ["sharp", "usual", "flat", "filtered"])
def test_the_same_ids_are_kept_of_a_dist(both, kind: str) -> None:
    """Whatever is kept of whatever width, also where equals are cut; what rounds to 0 is not kept."""
    for seed, width in enumerate(WIDTHS):
        dist = dists(kind, 20, width, torch.float32, seed)
        dist[::2] = (dist[::2] * 256).round() / 256
        for k in (1, 4, 64, 200):
            compiled, plain = both(lambda dist=dist, k=k: sparsify(dist, k))
            assert all(torch.equal(a, b) for a, b in zip(compiled, plain, strict=True)), (width, k)
            assert compiled[0].shape == (20, k)


def test_the_largest_logits_come_in_order() -> None:
    """The lower id first of equals; −1 for what is masked, and throughout where a row holds a NaN."""
    rows = torch.randint(9, (50, 700), generator=torch.Generator().manual_seed(1)).float()
    rows[1, 5:] = -torch.inf
    rows[2, 699] = torch.nan
    for count in (1, 2, 7, 64, 700):
        values, ids = _kernels.likeliest(rows, count)
        expected, order = torch.sort(rows, descending=True, stable=True)
        order[expected == -torch.inf] = -1
        expected[2], order[2] = torch.nan, -1
        assert torch.equal(ids, order[:, :count])
        assert torch.equal(values.nan_to_num(7e9), expected[:, :count].nan_to_num(7e9))
