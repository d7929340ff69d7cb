"""Container and compose files: valid, pinned, closed to the outside, and mounting what is there. Not built in tests."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from shipped import ROOT, compose_schema, errors, placed, read

COMPOSE = "deploy/compose.yaml"
SERVICES: dict[str, Any] = read(COMPOSE)["services"]


@pytest.mark.parametrize("name", [COMPOSE, "deploy/compose.gpu.yaml"])
def test_a_compose_file_fits_the_specification(name):
    """The published schema, which refuses unknown keys of a service."""
    assert errors(compose_schema(), read(name)) == []


def test_a_wrong_compose_file_is_found():
    """A misspelt key, and a service that is a list."""
    found = read(COMPOSE)
    assert errors(compose_schema(), found | {"services": {"head": found["services"]["head"] | {"imag": "x"}}})
    assert errors(compose_schema(), found | {"services": []})


def test_nothing_is_published_beyond_this_machine():
    """Every published port is on the loopback address, and Ray's own are not published at all."""
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published
    assert all(re.fullmatch(r"127\.0\.0\.1:(8000|3000|9090):\d+", port) for port in published)


def test_every_secret_has_to_be_given():
    """None has a default: compose stops with a word where one is missing."""
    text = (ROOT / COMPOSE).read_text(encoding="utf-8")
    for secret in ("RAY_AUTH_TOKEN", "SPECSERVE_API_KEY", "REDIS_PASSWORD", "GRAFANA_PASSWORD"):
        assert f"${{{secret}:?" in text
        assert f"${{{secret}:-" not in text


def test_images_are_pinned():
    """To a version, so that tomorrow's deployment is today's."""
    images = {service["image"] for service in SERVICES.values()}
    assert all(re.search(r":v?\d+\.\d+", image) for image in images), images


def test_what_is_mounted_is_there():
    """The boards, rules and provisioning files that the tests of the dashboards check."""
    volumes = [volume for service in SERVICES.values() for volume in service.get("volumes", [])]
    mounted = [volume.split(":")[0] for volume in volumes if volume.startswith(".")]
    assert len(mounted) == 3
    assert all((ROOT / "deploy" / path).exists() for path in mounted)
    provider = read("deploy/grafana/provisioning/dashboards/specserve.yml")["providers"][0]
    assert any(provider["options"]["path"] in volume for volume in SERVICES["grafana"]["volumes"])


def test_shipped_scrape_and_source_addresses_hold_in_the_shared_network():
    """Prometheus and Grafana name 127.0.0.1; that is the head, because they share its network."""
    for name in ("prometheus", "grafana", "deploy"):
        assert SERVICES[name]["network_mode"] == "service:head"
    (target,) = read("deploy/prometheus/prometheus.yml")["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target == "127.0.0.1:8000"


def started_with(service: dict[str, Any]) -> list[str]:
    command = service["command"]
    return shlex.split(command) if isinstance(command, str) else command


def test_the_serve_file_is_placed_on_the_containers():
    """Each worker container is a node of the kind that the Serve file names, quotes and all."""
    kinds = {}
    for name in ("target", "draft"):
        (resources,) = (word for word in started_with(SERVICES[name]) if word.startswith("--resources="))
        kinds[name] = resources
    assert kinds == {name: f'--resources={{"{name}_node":1000}}' for name in kinds}
    args = read("deploy/serve.yaml")["applications"][0]["args"]
    nodes = [{"CPU": 4.0}] + [{"CPU": 4.0, f"{name}_node": 1000.0} for name in kinds]
    assert placed(args, nodes).roles == ("coordinator", "target", "draft")


def container_lines() -> list[str]:
    text = (ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8")
    return [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]


def test_the_container_copies_what_is_there_and_needed():
    """Each source exists, is let through by the ignore file, and is all that a node's setup reads."""
    copied = [word for line in container_lines() if line.startswith("COPY") for word in line.split()[2:-1]]
    let_through = (ROOT / "deploy" / "Containerfile.dockerignore").read_text().splitlines()
    assert set(copied) == {line.removeprefix("!") for line in let_through if line.startswith("!")}
    assert set(copied) == {local for local in read("cluster.yaml")["file_mounts"].values() if not local.startswith("~")}
    assert all((ROOT / Path(path)).exists() for path in copied)


def test_the_container_runs_as_a_user_with_authentication_on():
    """Not as root, from a pinned Python, installed by the script that makes any machine a node."""
    lines = container_lines()
    assert re.fullmatch(r"FROM python:3\.\d+-slim-\w+", lines[0])
    assert "USER ray" in lines
    assert any("RAY_AUTH_MODE=token" in line for line in lines if line.startswith("ENV"))
    assert any("deploy/setup-node.sh" in line for line in lines if line.startswith("RUN"))
