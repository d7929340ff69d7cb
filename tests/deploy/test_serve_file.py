"""`deploy/serve.yaml`: valid for Ray Serve, and its arguments for the application that it names."""

from __future__ import annotations

import copy
from importlib import import_module

import pytest
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema
from shipped import read

from specserve import config as configs
from specserve.errors import ConfigError


def test_the_file_fits_serves_schema():
    """And a misspelt key does not."""
    ServeDeploySchema.model_validate(read("deploy/serve.yaml"))
    with pytest.raises(ValidationError):
        ServeDeploySchema.model_validate(read("deploy/serve.yaml") | {"proxy_location": "Somewhere"})


def test_the_named_builder_takes_the_arguments(monkeypatch):
    """It makes an application; a misspelt argument is refused by name."""
    monkeypatch.setenv("SPECSERVE_API_KEY", "some-long-key")
    (application,) = read("deploy/serve.yaml")["applications"]
    module, _, name = application["import_path"].partition(":")
    build = getattr(import_module(module), name)
    assert type(build(application["args"])).__name__ == "Application"
    wrong = copy.deepcopy(application["args"]) | {"taget": {}}
    with pytest.raises(ConfigError, match="unknown setting taget"):
        build(wrong)


def test_the_longest_request_is_not_cut_by_the_proxy():
    """Serve lets a request live as long as the application does."""
    found = read("deploy/serve.yaml")
    config = configs.parse(found["applications"][0]["args"])
    assert found["http_options"]["request_timeout_s"] >= config.server.request_timeout_s
