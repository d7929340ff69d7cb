"""Makes the helper modules of this folder importable from every test, and shares tests out among processes."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parent

sys.path.insert(0, str(ROOT))

if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    torch.set_num_threads(1)


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@functools.cache
def starts_ray(file: str) -> bool:
    return "pytest.mark.ray" in (ROOT.parent / file).read_text()


class FilesTogether(LoadScopeScheduling):
    """The tests of a file stay in one process, for what they share, and so do those of all files that start Ray.

    Two clusters would only slow each other down, and some tests count the processes that they find.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = file_of(nodeid)
        return "ray" if starts_ray(file) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log) -> FilesTogether:
    return FilesTogether(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts Ray comes first: it is the longest part."""
    items.sort(key=lambda item: not starts_ray(file_of(item.nodeid)))
