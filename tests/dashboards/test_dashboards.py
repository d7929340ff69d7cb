"""Boards, rules and configuration: as generated, valid, and without the usual mistakes."""

from __future__ import annotations

import copy
import gzip
import json
import shutil
import subprocess
from pathlib import Path

import jsonschema
import lints
import pytest
import yaml

from specserve.dashboards.alerts import ALERTS
from specserve.dashboards.files import BOARDS, write
from specserve.metrics import ENGINE_METRICS, HTTP_METRICS, LEDGER_METRICS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "dashboards"

SCHEMA = json.loads(gzip.decompress((Path(__file__).parent / "grafana-dashboard.schema.json.gz").read_bytes()))
"""Grafana's own, as published beside its foundation SDK (Apache-2.0)."""


def boards() -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}


def board(name: str) -> dict:
    return copy.deepcopy(boards()[name])


def test_the_files_are_as_the_code_says(tmp_path):
    """What is committed is what `specserve dashboards` writes."""
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is not installed")
    written = write(tmp_path)
    assert len(written) == len(BOARDS) + 4
    for path in written:
        name = path.relative_to(tmp_path)
        assert (ROOT / name).read_text(encoding="utf-8") == path.read_text(encoding="utf-8"), f"{name}: run it again"
    assert write(tmp_path) == []


def test_there_is_a_file_for_every_board():
    """And none besides."""
    assert set(boards()) == {each.uid.removeprefix("specserve-") for each in BOARDS}
    assert {found["uid"] for found in boards().values()} == {each.uid for each in BOARDS}


@pytest.mark.parametrize("name", boards())
def test_a_board_fits_grafanas_schema(name):
    """The published schema of a dashboard, which is stricter than Grafana itself."""
    validator = jsonschema.Draft7Validator(SCHEMA)
    assert [error.message for error in validator.iter_errors(board(name))] == []
    broken = board(name) | {"refresh": 5}
    assert list(validator.iter_errors(broken))


@pytest.mark.parametrize("lint", lints.LINTS, ids=lambda lint: lint.__name__)
@pytest.mark.parametrize("name", boards())
def test_a_board_has_none_of_the_usual_mistakes(name, lint):
    """Each lint finds nothing."""
    assert list(lint(board(name))) == []


def test_every_metric_is_on_a_board_or_in_an_alert():
    """What nobody looks at need not be counted."""
    shown = {
        name
        for found in boards().values()
        for panel in lints.panels(found)
        for e in lints.exprs(panel)
        for name in lints.names_in(e)
    }
    shown |= {name for alert in ALERTS for name in lints.names_in(alert.expr)}
    families = {lints.SAMPLES[name].name for name in shown}
    assert {metric.name for metric in (*ENGINE_METRICS, *HTTP_METRICS, *LEDGER_METRICS)} - families == set()


MISTAKES = {
    "unknown_metrics": ("overview", "expr", "sum (rate(specserve_tokens_total[$__rate_interval]))"),
    "unknown_labels": ("overview", "legendFormat", "{{colour}}"),
    "missing_model": ("overview", "expr", "sum (rate(specserve_generation_tokens_total[$__rate_interval]))"),
    "rates": ("overview", "expr", 'sum (delta(specserve_generation_tokens_total{model_name=~"$model_name"}[5m]))'),
}


@pytest.mark.parametrize("lint", MISTAKES)
def test_a_wrong_expression_is_found(lint):
    """The lints can fail."""
    name, field, value = MISTAKES[lint]
    broken = board(name)
    lints.panels(broken)[0]["targets"][0][field] = value
    assert list(getattr(lints, lint)(broken)) != []


@pytest.mark.parametrize(
    ("expr", "mistake"),
    [
        ("avg (rate(specserve_round_seconds_sum[1m]) / rate(specserve_round_seconds_count[1m]))", "mean of ratios"),
        ("sum (specserve_generation_tokens_total)", "no rate of a counter"),
        ("sum (rate(specserve_slots[$__rate_interval]))", "rate of a gauge"),
    ],
)
def test_a_wrong_rate_is_found(expr, mistake):
    """A mean of ratios, a bare counter, the rate of a gauge."""
    assert any(found.startswith(mistake) for found in lints.bad_rates(expr))


def test_a_wrong_unit_a_lost_source_and_an_overlap_are_found():
    """Milliseconds over seconds; a data source by its own uid; two panels in one place; one title twice."""
    broken = board("overview")
    for panel in lints.panels(broken):
        panel["fieldConfig"]["defaults"]["unit"] = "ms"
        panel["datasource"]["uid"] = "PBFA97CFB590B2093"
        panel["gridPos"] |= {"x": 20, "y": 0}
        panel["title"] = "Tokens"
    for lint in (lints.units_against_names, lints.sources, lints.overlaps, lints.identities):
        assert list(lint(broken)) != [], lint.__name__


def test_boards_link_to_each_other_and_choose_a_model():
    """Each has both variables, and finds the others by their tag."""
    for found in boards().values():
        assert [variable["name"] for variable in found["templating"]["list"]] == ["DS_PROMETHEUS", "model_name"]
        assert found["tags"] == found["links"][0]["tags"] == ["specserve"]


def test_alerts_name_metrics_and_labels_that_exist():
    """And say what to do."""
    for alert in ALERTS:
        assert lints.names_in(alert.expr) <= lints.SAMPLES.keys(), alert.name
        assert alert.does.endswith(".")


def test_grafana_finds_prometheus_and_the_boards():
    """The provisioning files agree with each other and with Grafana's version of the format."""
    folder = ROOT / "deploy" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "specserve.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((folder / "dashboards" / "specserve.yml").read_text())["providers"]
    assert (source["type"], provider["type"]) == ("prometheus", "file")
    assert provider["options"]["path"].startswith("/")


PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian: prometheus) is not installed")
@pytest.mark.parametrize(
    "arguments",
    [("check", "config", "prometheus.yml"), ("check", "rules", "alerts.yml"), ("test", "rules", "alerts.test.yml")],
    ids=" ".join,
)
def test_promtool_agrees(arguments):
    """Configuration and rules are valid, and the rules do what their unit tests say."""
    where = ROOT / "deploy" / "prometheus"
    done = subprocess.run([PROMTOOL, *arguments], check=False, cwd=where, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian: prometheus) is not installed")
def test_every_alert_has_a_unit_test():
    """And its test names it."""
    tests = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.test.yml").read_text(encoding="utf-8"))["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert fired == {alert.name for alert in ALERTS}
