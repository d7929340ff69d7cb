"""One server for all clients: a tiny pair of models with a chat template that takes tools, on loopback."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from http_server import serving
from templates_with_tools import TAGGED
from tiny_models import tiny_llama

from specserve.local import LocalEngine

API_KEY = "the-clients-key"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `target` and `draft`; the target's holds the tokenizer for programs that want one."""
    root = tmp_path_factory.mktemp("models")
    for name, seed, layers in (("target", 1, 2), ("draft", 2, 1)):
        folder = tiny_llama(root / name, seed=seed, layers=layers)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TAGGED}))
    return root


@contextlib.contextmanager
def served(models: Path, depth: int = 4, **server: object) -> Iterator[SimpleNamespace]:
    """A running server: its url, and the tokenizer's folder."""
    config = {
        "model_name": "tiny",
        "target": {"source": str(models / "target"), "kv_memory_gib": 0.1},
        "draft": {"model": {"source": str(models / "draft"), "kv_memory_gib": 0.1}},
        "engine": {"depth": depth, "max_requests": 16, "max_batch_tokens": 256},
        "server": server,
    }
    with LocalEngine(config) as engine, serving(engine) as url:
        yield SimpleNamespace(url=url, tokenizer=models / "target", engine=engine)


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[SimpleNamespace]:
    """The server with a key, as most clients insist on sending one."""
    with served(models, api_keys=[API_KEY], open_metrics=True) as running:
        yield running
