"""The folder is the registry: a rule, a speculator or a backend is one file, named in the config by its file name.

Files that begin with an underscore, and the worker modules that a room names in `NOT_CHOICES`, are not choices.
A choice from elsewhere is named by its dotted path: a module, or a class in one, with the same parts as our files.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

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


def load(room: str, name: str) -> Any:
    """Import the file that stands for a choice, or what a dotted path names.

    Raises ConfigError that lists the choices there are, or says why the path leads nowhere.
    """
    if is_dotted(name):
        return _elsewhere(room, name)
    known = names_in(room)
    if name not in known:
        raise ConfigError(f"no {room} called {name!r}; there are: {', '.join(known)}")
    return import_module(f"specserve.{room}.{name}")


def is_dotted(name: str) -> bool:
    """Whether a name is a path of names with dots between, as Python's are."""
    return "." in name and all(part.isidentifier() for part in name.split("."))


def _elsewhere(room: str, path: str) -> Any:
    """The module of a dotted path or, where there is none, what the path before the last dot holds."""
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path + ".").startswith(error.name + "."):
            raise ConfigError(f"{room} {path!r} cannot be imported: {error}") from None
    except Exception as error:  # whatever a module from elsewhere raises when it is imported
        raise ConfigError(f"{room} {path!r} cannot be imported: {type(error).__name__}: {error}") from None
    module, _, attribute = path.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{room} {path!r} is not there: {error}; is its package installed here?") from None
