"""The files themselves: boards, alert rules, and what Prometheus and Grafana need to find them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from specserve.dashboards import memory, overview, pipeline, speculation
from specserve.dashboards.alerts import rules
from specserve.errors import ConfigError

BOARDS = (overview.BOARD, speculation.BOARD, pipeline.BOARD, memory.BOARD)

_HEAD = "# Written by `specserve dashboards`; change specserve/dashboards/ and run it again.\n"

_SCRAPE = {
    "global": {"scrape_interval": "5s", "evaluation_interval": "15s"},
    "rule_files": ["alerts.yml"],
    "scrape_configs": [
        {
            # One target is the whole deployment, however many HTTP processes it has.
            "job_name": "specserve",
            "metrics_path": "/metrics",
            "static_configs": [{"targets": ["127.0.0.1:8000"]}],
        }
    ],
}

_DATASOURCES = {
    "apiVersion": 1,
    "datasources": [
        {
            "name": "Prometheus",
            "uid": "specserve-prometheus",
            "type": "prometheus",
            "access": "proxy",
            "url": "http://127.0.0.1:9090",
            "isDefault": True,
            "jsonData": {"timeInterval": "5s"},
        }
    ],
}

_PROVIDERS = {
    "apiVersion": 1,
    "providers": [
        {
            "name": "specserve",
            "type": "file",
            "folder": "specserve",
            "disableDeletion": True,
            "allowUiUpdates": False,
            "updateIntervalSeconds": 30,
            "options": {"path": "/var/lib/grafana/dashboards/specserve"},
        }
    ],
}


def files() -> dict[str, str]:
    """Every file by its path below the root of the project. Raises ConfigError where Grafana's builders are missing."""
    try:
        from specserve.dashboards.grafana import grafana_json
    except ImportError:
        raise ConfigError(
            "boards are made with grafana-foundation-sdk, which is not installed; pip install 'specserve[dashboards]'"
        ) from None
    found = {f"dashboards/{board.uid.removeprefix('specserve-')}.json": grafana_json(board) for board in BOARDS}
    found["deploy/prometheus/prometheus.yml"] = _yaml(_SCRAPE)
    found["deploy/prometheus/alerts.yml"] = _yaml(rules())
    found["deploy/grafana/provisioning/datasources/specserve.yml"] = _yaml(_DATASOURCES)
    found["deploy/grafana/provisioning/dashboards/specserve.yml"] = _yaml(_PROVIDERS)
    return found


def write(root: Path) -> list[Path]:
    """Write all of them below a folder; returns those that changed. Raises ConfigError where that cannot be."""
    changed = []
    for name, text in files().items():
        path = root / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")
                changed.append(path)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
    return changed


def _yaml(data: Any) -> str:
    return _HEAD + yaml.safe_dump(data, sort_keys=False, width=110, allow_unicode=True)
