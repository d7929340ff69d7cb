"""The exactness bench: its judgements, its expectations and its pictures."""

from __future__ import annotations

import json
from itertools import product
from xml.etree import ElementTree

import pytest
import torch
from rule_proofs import Tree, block_thresholds, chain_laws, mean_kept, rejection_thresholds

from specserve.bench import exactness
from specserve.bench.svg import Axis
from specserve.cli import main
from specserve.errors import ConfigError
from specserve.verification import all_rules, block, rejection


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
    assert exactness.expected_kept(*models, vocab, depth) == pytest.approx(proven, abs=1e-12)


def test_block_never_keeps_less(rows) -> None:
    """On each of the drawn pairs, and more on most that are deeper than one token."""
    pairs = list(exactness.expectations(70))
    assert all(pair.block > pair.rejection - 1e-12 for pair in pairs)
    deep = [pair for pair in pairs if pair.depth > 1]
    assert sum(pair.block > pair.rejection + 1e-6 for pair in deep) > 0.7 * len(deep)


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
    paths = exactness.plot(rows, source, tmp_path / "images")
    pictures = {path.name: path.read_text() for path in paths}
    assert {name: circles(picture) for name, picture in pictures.items()} == {
        "p_values.svg": len(rows) + 2,
        "kept_tokens.svg": 300 + 3,
        "acceptance.svg": 4 + 2,
    }
    assert all(len(picture) < 100_000 and "<rect" not in picture for picture in pictures.values())
    source.write_text("{}")
    with pytest.raises(ConfigError, match="bench acceptance --json"):
        exactness.plot(rows, source, tmp_path)
    with pytest.raises(ConfigError, match="cannot write pictures"):
        exactness.plot(rows, None, source)


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
    assert (tmp_path / "p_values.svg").exists()
    assert "kept_tokens.svg" in out.replace("\n", "")
