"""Serve large language models faster by speculation across machines, with exactly the target's distribution."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["Config", "LocalEngine", "Sampling", "__version__"]

if TYPE_CHECKING:
    from specserve.config import Config
    from specserve.local import LocalEngine
    from specserve.types import Sampling

_HOMES = {"Config": "specserve.config", "LocalEngine": "specserve.local", "Sampling": "specserve.types"}


def __getattr__(name: str) -> Any:
    # Importing the package runs nothing: each public name brings its room along when it is first used.
    if name not in _HOMES:
        raise AttributeError(f"module 'specserve' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    # Who looks around in a shell or a notebook sees what is there, imported yet or not.
    return sorted({*globals(), *__all__})
