"""The folder is the registry: a rule, a speculator or a backend is one file, named in the config by its file name.

Files that begin with an underscore, and the worker modules that a room names in `NOT_CHOICES`, are not choices.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from specserve.errors import ConfigError


def names_in(room: str) -> list[str]:
    """The choices in a room such as `verification`, sorted."""
    package = import_module(f"specserve.{room}")
    hidden: frozenset[str] = getattr(package, "NOT_CHOICES", frozenset())
    return sorted(
        module.name
        for module in iter_modules(package.__path__)
        if not module.name.startswith("_") and module.name not in hidden
    )


def load(room: str, name: str) -> ModuleType:
    """Import the file that stands for a choice. Raises ConfigError that lists the choices there are."""
    known = names_in(room)
    if name not in known:
        raise ConfigError(f"no {room} called {name!r}; there are: {', '.join(known)}")
    return import_module(f"specserve.{room}.{name}")
