"""What must hold on a device before its times mean anything: the same tokens as on the CPU, and rules with their law.

The CPU's results are what the tests prove; here the same functions run on both, recorded steps say what eager ones say,
and on the device rules are also enumerated: every drafted token, and a grid over both of a rule's uniform numbers,
weighed by their probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from specserve.bench.report import Row
from specserve.config import EngineConfig
from specserve.models import TokenTree
from specserve.models._head_folder import HeadDescription
from specserve.models._step_shapes import StepShape, planned
from specserve.models._stretches import Stretch, ragged
from specserve.models.eagle import EagleHead, Network, llama_config
from specserve.models.paged_transformers import PagedTransformers
from specserve.sampling.noise import token_keys, token_words
from specserve.verification import FixedNoise, Judge, all_rules, judges_of
from specserve.verification._draft_rows import DraftRows

BLOCK_TOKENS = 16

_PROMPTS = (5, 33, 64, 1, 17)
_STEPS = 24
_NODES, _TREES = 12, 4
_HEAD = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
_FED = (1, 1, 5, 1, 1, 3, 1, 1)
"""Tokens of each row in a head's forwards behind the prompts: drafted ones, and catching up."""
_ROWS, _DEPTH, _VOCAB = 512, 4, 64
_GRID = 200
_ENUMERATED = 6
_NOISE_IDS = 152_000

Made = Callable[[torch.device], PagedTransformers]
"""Makes a float32 model with the same weights on any device."""

AnyBackend = TypeVar("AnyBackend", PagedTransformers, EagleHead)


def checks(device: torch.device, made: Made) -> Iterator[Row]:
    """One row for each fact, with how far it was from holding and whether it holds."""
    yield from _same_answers(device, made)
    wrong = differing_noise(device)
    yield row("noise: integers that are not the documented ones", wrong, wrong == 0)
    yield from _same_recorded(device, made)
    yield from _same_trees(device, made)
    yield from _same_head(device)
    for name, judge in judges_of(EngineConfig()).items():
        differing = _differing(judge, device)
        yield row(f"rule {name}: decisions as on the CPU", differing, differing == 0)
    for name, rule in all_rules().items():
        if rule.LOSSLESS and rule.NEEDS_DISTS:
            distance = enumerated_distance(judges_of(EngineConfig())[name], device)
            yield row(f"rule {name}: distance from the target's law", distance, distance < 4 / _GRID)


def row(check: str, found: float, holds: bool) -> Row:
    """A fact as a row of the report."""
    return {"check": check, "found": found, "holds": "yes" if holds else "NO"}


def differing_noise(device: torch.device) -> int:
    """How many of the integers behind the noise differ on the device from unsigned 32-bit arithmetic on the host."""
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 42, 7, 8])
    keys = token_keys(seeds.to(device), torch.arange(len(seeds), device=device) * 0x1FFFFFFF)
    found = token_words(keys[:, None, :2], torch.arange(_NOISE_IDS, dtype=torch.int32, device=device)).cpu().numpy()
    pairs = token_keys(seeds, torch.arange(len(seeds)) * 0x1FFFFFFF).numpy()[:, None, :2].view(np.uint32)
    x: npt.NDArray[Any] = np.arange(_NOISE_IDS, dtype=np.uint32) + pairs[..., 0]
    x = (x ^ x >> 16) * np.uint32(0x7FEB352D)
    x = (x ^ x >> 15 ^ pairs[..., 1]) * np.uint32(0x846CA68B)
    return int(((x ^ x >> 16) >> 1 != found.view(np.uint32)).sum())


def _same_answers(device: torch.device, made: Made) -> Iterator[Row]:
    """Greedy tokens of rows of different lengths, and how far their logits are apart."""
    answers = [greedy(_with_pages(made(where)), _PROMPTS, _STEPS) for where in (device, torch.device("cpu"))]
    (tokens, logits), (expected, reference) = answers
    differing = int((tokens != expected).sum())
    apart = float((logits - reference).abs().max())
    yield row("greedy tokens as on the CPU, float32", differing, differing == 0)
    yield row("largest difference of logits", apart, apart < 1e-2)


def _same_recorded(device: torch.device, made: Made) -> Iterator[Row]:
    """Greedy tokens of recorded and of eager steps, one at a time, and then all read again as verifications."""
    recorded, eager = made(device), _with_pages(made(device))
    engine = EngineConfig(depth=_DEPTH, max_requests=8)  # so that batches are padded
    context = 4 * BLOCK_TOKENS * -(-(max(_PROMPTS) + _STEPS) // BLOCK_TOKENS)
    if wrong := _recorded(recorded, planned("target", engine, context)):
        yield row(f"steps are recorded: {wrong}", 0, False)
        return
    answers = [greedy(backend, _PROMPTS, _STEPS) for backend in (recorded, eager)]
    tokens = answers[1][0]
    differing = int((answers[0][0] != tokens).sum())
    yield row("greedy tokens of recorded steps as of eager ones, float32", differing, differing == 0)
    decoded = float((answers[0][1] - answers[1][1]).abs().max())
    yield row("largest difference of logits, decoding", decoded, decoded < 1e-3)
    verified = [_verified(backend, tokens) for backend in (recorded, eager)]
    apart = float((verified[0] - verified[1]).abs().max())
    yield row("largest difference of logits, verifying", apart, apart < 1e-3)
    replayed = _replays(recorded)
    expected = _STEPS - 1 + _STEPS // (_DEPTH + 1)
    yield row("steps replayed", replayed, replayed == expected)


def _same_trees(device: torch.device, made: Made) -> Iterator[Row]:
    """Logits of recorded and of eager verifications of trees, each time others, with a chain beside."""
    recorded, eager = made(device), _with_pages(made(device))
    engine = EngineConfig(depth=_DEPTH, max_requests=8, outcomes=0, tree="dynamic", tree_nodes=_NODES)
    if wrong := _recorded(recorded, planned("target", engine, 8 * BLOCK_TOKENS)):
        yield row(f"steps with trees are recorded: {wrong}", 0, False)
        return
    apart = float((_in_trees(recorded) - _in_trees(eager)).abs().max())
    yield row("largest difference of logits, trees", apart, apart < 1e-3)
    replayed = _replays(recorded)
    yield row("steps with trees replayed", replayed, replayed == _TREES)


def _in_trees(backend: PagedTransformers) -> torch.Tensor:
    """Logits [m, V], on the CPU, of random trees of up to `_NODES` nodes behind made-up prompts."""
    tables, chance, shown = _tables(_PROMPTS, _STEPS), np.random.default_rng(1), []
    prompts = [chance.integers(3, backend.vocab_size, length) for length in _PROMPTS]
    backend.forward(ragged([Stretch(0, tokens, table, 1) for tokens, table in zip(prompts, tables, strict=True)]))
    for _ in range(_TREES):
        rows = []
        for at, (length, table) in enumerate(zip(_PROMPTS, tables, strict=True)):
            nodes = int(chance.integers(1, _NODES + 1))
            parents = [int(chance.integers(-1, node)) for node in range(nodes)]
            tree = TokenTree(length, np.array(parents, dtype=np.int64)) if at else None
            tokens = chance.integers(3, backend.vocab_size, nodes + 1)
            rows.append(Stretch(length - 1, tokens, table, nodes + 1, tree=tree))
        shown.append(backend.forward(ragged(rows)).cpu())
    return torch.cat(shown)


def _same_head(device: torch.device) -> Iterator[Row]:
    """Logits and states of a random EAGLE head, recorded and eager, drafting and catching up."""
    recorded, eager = random_head(device), _with_pages(random_head(device))
    engine = EngineConfig(depth=_DEPTH, max_requests=8, outcomes=0)
    if wrong := _recorded(recorded, planned("draft", engine, 8 * BLOCK_TOKENS)):
        yield row(f"steps of a head are recorded: {wrong}", 0, False)
        return
    apart = float((_drafted(recorded) - _drafted(eager)).abs().max())
    yield row("largest difference of logits and states, a head", apart, apart < 1e-3)
    replayed = _replays(recorded)
    yield row("steps of a head replayed", replayed, replayed == len(_FED))


def random_head(device: torch.device) -> EagleHead:
    """A small EAGLE head in float32 with the same random weights on any device."""
    described = HeadDescription(1, (), _HEAD["hidden_size"], 1, (), False, _HEAD | {"max_position_embeddings": 1024})
    torch.manual_seed(0)
    network = Network(llama_config(described), described, _HEAD["vocab_size"])
    network.take(network.state_dict() | {"lm_head.weight": torch.randn(_HEAD["vocab_size"], _HEAD["hidden_size"]) / 8})
    return EagleHead(network.eval().requires_grad_(False).to(device), described, None)


def _drafted(head: EagleHead) -> torch.Tensor:
    """Logits and states [m, V + width], on the CPU, behind made-up prompts and states; a drafted token reads the states
    of the forward before."""
    tables, chance, shown = _tables(_PROMPTS, _STEPS), np.random.default_rng(2), []
    noise, origins = torch.Generator().manual_seed(2), np.ones(len(_PROMPTS), dtype=np.int64)
    starts, states = [1] * len(_PROMPTS), torch.empty(0)
    for counts in (_PROMPTS, *([count] * len(_PROMPTS) for count in _FED)):
        feeds = [chance.integers(3, head.vocab_size, count) for count in counts]
        rows = zip(starts, feeds, tables, strict=True)
        if max(counts) > 1:
            states = torch.randn(sum(counts), head.width, generator=noise).to(head.device)
        batch = ragged([Stretch(start, feed, table, 1) for start, feed, table in rows])
        logits, states = head.forward_from(batch, states, origins)
        starts = [start + count for start, count in zip(starts, counts, strict=True)]
        shown.append(torch.cat([logits, states], -1).cpu())
    return torch.cat(shown)


def _verified(backend: PagedTransformers, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [m, V], on the CPU, of greedy tokens [steps, rows] read again, some at once, behind the same prompts."""
    tables, shown = _tables(_PROMPTS, _STEPS), []
    for first in range(0, len(tokens) - _DEPTH, _DEPTH + 1):
        read = tokens[first : first + _DEPTH + 1].T.numpy()
        rows = [
            Stretch(length + first, feed, table, len(feed))
            for length, feed, table in zip(_PROMPTS, read, tables, strict=True)
        ]
        shown.append(backend.forward(ragged(rows)).cpu())
    return torch.cat(shown)


def _recorded(backend: AnyBackend, shapes: Sequence[StepShape]) -> str:
    """Record these steps, with pages as of `_with_pages`; why not, where they cannot be."""
    backend.plan_steps(shapes)
    _with_pages(backend)
    try:
        for _ in backend.record_steps():
            pass
    except RuntimeError as error:
        return str(error) or type(error).__name__
    return ""


def _replays(backend: PagedTransformers | EagleHead) -> int:
    return 0 if backend.graphs is None else backend.graphs.replayed


def _with_pages(backend: AnyBackend) -> AnyBackend:
    """The same one, with KV for the prompts and steps of these checks."""
    backend.allocate(_tables(_PROMPTS, _STEPS).size, BLOCK_TOKENS)
    return backend


def _tables(prompts: tuple[int, ...], steps: int) -> npt.NDArray[np.int32]:
    """Block tables int32 [rows, width], each block once."""
    longest = -(-(max(prompts) + steps) // BLOCK_TOKENS)
    return np.arange(longest * len(prompts), dtype=np.int32).reshape(len(prompts), -1)


def greedy(backend: PagedTransformers, prompts: tuple[int, ...], steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [steps, rows] and logits float32 [steps, rows, V], on the CPU, after made-up prompts of so many."""
    tables = _tables(prompts, steps)
    chance = np.random.default_rng(0)
    read = [chance.integers(3, backend.vocab_size, length) for length in prompts]
    starts, tokens, logits = [0] * len(prompts), [], []
    for _ in range(steps):
        rows = zip(starts, read, tables, strict=True)
        shown = backend.forward(ragged([Stretch(start, feed, table, 1) for start, feed, table in rows])).cpu()
        starts = [start + len(feed) for start, feed in zip(starts, read, strict=True)]
        chosen = shown.argmax(-1)
        read = [np.array([token]) for token in chosen.tolist()]
        tokens.append(chosen)
        logits.append(shown)
    return torch.stack(tokens), torch.stack(logits)


def _differing(judge: Judge, device: torch.device) -> int:
    """Rows of random dists, drafts and noise whose decision in float64 is another one than on the CPU."""
    generator = torch.Generator().manual_seed(1)
    target, draft = torch.softmax(3 * torch.randn(2, _ROWS, _DEPTH + 1, _VOCAB, generator=generator).double(), -1)
    draft = draft[:, :_DEPTH]
    tokens = torch.multinomial(draft.reshape(-1, _VOCAB), 1, generator=generator).view(_ROWS, _DEPTH)
    lengths = torch.randint(_DEPTH + 1, (_ROWS,), generator=generator)
    noise = FixedNoise(
        torch.rand(_ROWS, _DEPTH, generator=generator).double(),
        torch.rand(_ROWS, _DEPTH + 1, generator=generator).double(),
        token_keys(torch.arange(_ROWS)[:, None], torch.arange(_DEPTH + 1).expand(_ROWS, -1)),
    )

    def decide(where: torch.device) -> torch.Tensor:
        there = FixedNoise(noise.accept.to(where), noise.choose.to(where), noise.keys.to(where))
        rows = DraftRows.whole(draft.to(where))
        return torch.stack(judge(target.to(where), rows, tokens.to(where), lengths.to(where), there)).cpu()

    return int((decide(device) != decide(torch.device("cpu"))).any(0).sum())


def enumerated_distance(judge: Judge, device: torch.device) -> float:
    """Total variation between the first token of chains of one and the target's dist, over all that can happen."""
    generator = torch.Generator().manual_seed(2)
    target, draft = torch.softmax(2 * torch.randn(2, _ENUMERATED, generator=generator).double(), -1).to(device)
    middle = (torch.arange(_GRID, device=device, dtype=torch.float64) + 0.5) / _GRID
    tokens, accept, choose = torch.cartesian_prod(
        torch.arange(_ENUMERATED, device=device, dtype=torch.float64), middle, middle
    ).T
    drafted = tokens.long()[:, None]
    count = len(drafted)
    noise = FixedNoise(
        accept[:, None],
        choose[:, None].expand(-1, 2),
        token_keys(torch.arange(count, device=device)[:, None], torch.arange(2, device=device).expand(count, -1)),
    )
    dists, shipped = target.expand(count, 2, -1), DraftRows.whole(draft.expand(count, 1, -1).contiguous())
    kept, following = judge(dists, shipped, drafted, torch.ones(count, dtype=torch.int64, device=device), noise)
    first = torch.where(kept > 0, drafted[:, 0], following)
    law = torch.zeros_like(target).index_add_(0, first, draft[drafted[:, 0]] / _GRID**2)
    return float((law - target).abs().sum() / 2)
