"""The exactness bench: its judgements, its expectations and its pictures."""

from __future__ import annotations

import json
from itertools import product
from xml.etree import ElementTree

import pytest
import torch
from rule_proofs import Tree, block_thresholds, chain_laws, mean_kept, rejection_thresholds

from specserve.bench import exactness, expectations
from specserve.bench.svg import Axis
from specserve.cli import main
from specserve.config import EngineConfig
from specserve.errors import ConfigError
from specserve.sampling.noise import Purpose, token_keys, uniform
from specserve.verification import FixedNoise, all_rules, block, judges_of, rejection
from specserve.verification._draft_rows import DraftRows


@pytest.fixture(scope="module")
def rows():
    return exactness.measure(8000, lambda _: None)


def test_rules_pass_and_broken_variants_do_not(rows) -> None:
    """Every lossless rule fits the target's law, with filters too; every variant and lossy rule is far from it."""
    served = [row for row in rows if row["broken"] is None]
    assert {row["rule"] for row in served} == {name for name, rule in all_rules().items() if rule.LOSSLESS}
    assert {row["top_p"] for row in served} == {1.0, 0.8}
    assert all(row["p_value"] > 1e-4 for row in served)
    broken = [row for row in rows if row["broken"] is not None]
    assert len(broken) == 7
    assert all(row["p_value"] < 1e-4 for row in broken)
    assert all(0.5 < row["chi_square"] < 1.5 and row["distance"] < 1.5 * row["by_chance"] for row in served)
    assert all(row["chi_square"] > 1.5 for row in broken)
    with pytest.raises(ConfigError, match="from 5000"):
        exactness.measure(10, lambda _: None)


@pytest.mark.parametrize(("vocab", "depth"), [(3, 1), (4, 2), (3, 3)])
def test_expectations_are_those_of_the_proofs(vocab: int, depth: int) -> None:
    """Kept tokens by the published formulas are what enumeration of the served rules' verdicts gives."""
    generator = torch.Generator().manual_seed(depth)
    target, draft = (Tree(vocab, depth, generator, sparse=False) for _ in range(2))
    models = [{prefix: tree.dist(prefix) for prefix in tree.prefixes} for tree in (target, draft)]
    proven = [
        mean_kept(list(chain_laws(judge, thresholds, target, draft, draft, depth)))
        for judge, thresholds in ((rejection.judge, rejection_thresholds), (block.judge, block_thresholds))
    ]
    assert expectations.expected_kept(*models, vocab, depth) == pytest.approx(proven, abs=1e-12)


def test_block_never_keeps_less(rows) -> None:
    """On each of the drawn pairs, and more on most that are deeper than one token."""
    pairs = list(expectations.expectations(70))
    assert all(pair.block > pair.rejection - 1e-12 for pair in pairs)
    deep = [pair for pair in pairs if pair.depth > 1]
    assert sum(pair.block > pair.rejection + 1e-6 for pair in deep) > 0.7 * len(deep)


def drawn_shares(target, draft, vocab: int, depth: int, count: int = 20_000) -> dict[str, float]:
    """What the served rules keep of chains that are drafted and judged with the workers' own noise."""
    seeds = torch.arange(count)[:, None]
    positions, places = torch.arange(depth + 1)[None], torch.arange(depth)
    noise = FixedNoise(
        uniform(seeds, Purpose.ACCEPT, positions[:, :-1], 0, places),
        uniform(seeds, Purpose.CHOOSE, positions),
        token_keys(seeds, positions),
    )
    propose = uniform(seeds, Purpose.PROPOSE, positions[:, :-1], 0, places)
    found = {}
    for name, judge in judges_of(EngineConfig()).items():
        rule, read = all_rules()[name], [()] * count
        chain, along = torch.empty(count, depth, dtype=torch.int64), [torch.stack([target[prefix] for prefix in read])]
        shipped = []
        for place in range(depth):
            shipped.append(torch.stack([draft[prefix] for prefix in read]))
            chain[:, place] = exactness._pick(rule, shipped[-1], propose[:, place], noise.keys[:, place])
            read = [(*prefix, token) for prefix, token in zip(read, chain[:, place].tolist(), strict=True)]
            along.append(torch.stack([target[prefix] for prefix in read]))
        drafts = DraftRows.whole(torch.stack(shipped, 1)) if rule.NEEDS_DISTS else DraftRows.certain(chain)
        kept, _ = judge(torch.stack(along, 1), drafts, chain, torch.full((count,), depth), noise)
        found[name] = float(kept.double().mean()) / depth
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_shares_by_expectation_are_those_of_drawn_chains(temperature: float) -> None:
    """Every rule as it is served, within what chance makes of 20,000 chains; of one-hot dists exactly."""
    target, draft = (expectations._at(logits, temperature) for logits in expectations._alike(3))
    expected = expectations.kept_shares(target, draft, 4, 3)
    drawn = drawn_shares(target, draft, 4, 3)
    assert set(expected) == set(drawn)
    assert drawn == pytest.approx(expected, abs=0.013 if temperature else 1e-12)


def test_shares_meet_at_temperature_0_and_order_as_proven() -> None:
    """Above it `block` keeps no less than `rejection`, and that no less than `coupled`."""
    greedy, *warm = expectations.by_temperature(10, (0.0, 0.5, 1.0, 2.0))
    shares = [greedy[rule] for rule in ("block", "rejection", "coupled", "exact", "typical")]
    assert shares == pytest.approx([shares[0]] * 5)
    assert all(row["block"] >= row["rejection"] >= row["coupled"] for row in warm)


def circles(picture: str) -> int:
    return len(ElementTree.fromstring(picture).findall(".//{http://www.w3.org/2000/svg}circle"))


def test_pictures_hold_a_dot_for_each_row(tmp_path, rows) -> None:
    """Well-formed SVG without a background, a dot for each row and two for the key; the acceptance of a JSON file."""
    source = tmp_path / "acceptance.json"
    found = [
        {"temperature": t, "rule": rule, "lossless": lossless, "first_position": share}
        for t, (rule, lossless, share) in product((0.0, 0.7), (("block", "yes", 0.2), ("typical", "NO", 0.35)))
    ]
    source.write_text(json.dumps({"rows": found}))
    expected = expectations.by_temperature(2, (0.0, 1.0))
    paths = exactness.plot(rows, expected, source, tmp_path / "images")
    pictures = {path.name: path.read_text() for path in paths}
    assert {name: circles(picture) for name, picture in pictures.items()} == {
        "p_values.svg": len(rows) + 2,
        "distances.svg": 2 * len(rows) + 3,
        "kept_tokens.svg": 300 + 3,
        "temperatures.svg": 5 * 2 + 5,
        "acceptance.svg": 4 + 2,
    }
    assert all(len(picture) < 100_000 and "<rect" not in picture for picture in pictures.values())
    source.write_text("{}")
    with pytest.raises(ConfigError, match="bench acceptance --json"):
        exactness.plot(rows, expected, source, tmp_path)
    with pytest.raises(ConfigError, match="cannot write pictures"):
        exactness.plot(rows, expected, None, source)


def test_axes_place_values_and_keep_them_inside() -> None:
    """Linear and logarithmic, with what lies beyond at the ends."""
    line, powers = Axis("", 0, 4, []), Axis("", 1e-6, 1, [], logarithmic=True)
    assert [line.place(value) for value in (-1, 0, 1, 4, 9)] == [0, 0, 0.25, 1, 1]
    assert [powers.place(value) for value in (0, 1e-6, 1e-3, 1)] == pytest.approx([0, 0, 0.5, 1])
    assert (powers.label(1e-6), powers.label(1)) == ("10⁻⁶", "1")


def test_the_command_prints_and_draws(tmp_path, capsys) -> None:
    """`specserve bench exactness --plots DIR` shows the table and names the files."""
    assert main(["bench", "exactness", "--tokens", "5000", "--plots", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "rejection" in out
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {"p_values.svg", "distances.svg", "kept_tokens.svg", "temperatures.svg"}
    assert all(f"wrote {tmp_path / name}" in out for name in drawn)
