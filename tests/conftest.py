"""Makes the helper modules of this folder importable from every test, and says which tests share a process."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes share the tests, all that start Ray are one's, the first; else each file stays together.

    Two clusters would only slow each other down, and some tests count the processes that they find.
    """
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)
    for item in items:
        item.add_marker(pytest.mark.xdist_group("ray" if item.get_closest_marker("ray") else item.location[0]))
