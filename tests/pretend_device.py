"""A device that is not there: tensors that compute on the CPU and behave, towards code, as those of an accelerator do.

What meets them must be on the same device, but for numbers; looking at what they hold is counted, as a GPU's host
waits for it; and what brings values there is counted by whether it waits too.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

ELSEWHERE = torch.device("meta")
"""How code sees it: neither a CPU nor a GPU. A real meta tensor holds nothing, so none can be meant."""

_READS = frozenset({"tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__contains__"})
_SIZED = frozenset({"nonzero", "masked_select", "unique", "argwhere", "allclose", "equal", "repeat_interleave"})
_BRINGS = frozenset({"tensor", "as_tensor", "asarray"})
_MAKES = frozenset({"zeros", "ones", "empty", "full", "arange", "rand", "randn", "new_zeros", "new_full", "new_empty"})


class Elsewhere(torch.Tensor):
    """A tensor there. Only `PretendDevice` knows what to do with it."""


def there(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, there."""
    return tensor.as_subclass(Elsewhere)


def moved(model: torch.nn.Module) -> torch.nn.Module:
    """A model whose weights are there from now on."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: there(tensor.detach()) for name, tensor in held.items() if tensor is not None})
    return model


def _here(value: Any) -> Any:
    return tree_map_only(Elsewhere, lambda each: each.as_subclass(torch.Tensor), value)


def _back(value: Any) -> Any:
    return tree_map_only(torch.Tensor, there, value)


class PretendDevice(TorchFunctionMode):
    """In its scope the device is there.

    looks and waits count by what did it; sent counts what was brought without waiting.
    """

    def __init__(self) -> None:
        super().__init__()
        self.looks: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.sent = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        with torch._C.DisableTorchFunction():
            return self._call(func, getattr(func, "__name__", ""), args, kwargs)

    def _call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        leaves = tree_flatten((args, kwargs))[0]
        mine = [each for each in leaves if isinstance(each, Elsewhere)]
        if name == "__get__" and mine:
            return self._attribute(func, args)
        goes = self._goes(name, args, kwargs)
        if goes is not None:
            return self._moved(func, name, args, kwargs, goes)
        if not mine:
            return func(*args, **kwargs)
        if name == "copy_" and len(mine) == 1:
            return self._copied(args, kwargs)
        if name in _READS or name in _SIZED or (name == "where" and len(args) == 1):
            self._look(name, args, kwargs)
            found = func(*_here(args), **_here(kwargs))
            return _back(found) if name in _SIZED else found
        if name in ("__getitem__", "__setitem__", "index_put_", "index_put", "index"):
            args = (args[0], self._indices(args[1]), *args[2:])
        else:
            self._same_device(name, leaves)
        return _back(func(*_here(args), **_here(kwargs)))

    def _attribute(self, func: Any, args: Any) -> Any:
        attribute = func.__self__.__name__
        told = {"device": ELSEWHERE, "is_cpu": False, "is_cuda": False, "is_meta": True}
        if attribute in told:
            return told[attribute]
        found = func(*_here(args))
        return there(found) if isinstance(found, torch.Tensor) else found

    def _goes(self, name: str, args: Any, kwargs: Any) -> torch.device | None:
        """Where a call puts its result, where it says so."""
        if "device" in kwargs:
            return torch.device("cpu") if kwargs["device"] is None else torch.device(kwargs["device"])
        if name == "to":
            for each in args[1:]:
                if isinstance(each, torch.device | str):
                    return torch.device(each)
                if isinstance(each, torch.Tensor):
                    return ELSEWHERE if isinstance(each, Elsewhere) else torch.device("cpu")
        return None

    def _moved(self, func: Any, name: str, args: Any, kwargs: Any, goes: torch.device) -> Any:
        was_there = bool(args) and isinstance(args[0], Elsewhere)
        waits = not kwargs.pop("non_blocking", False)
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        args = tuple(torch.device("cpu") if isinstance(each, torch.device) else each for each in args)
        found = func(*_here(args), **_here(kwargs))
        if goes == ELSEWHERE:
            if not was_there and name not in _MAKES:
                self.sent += not waits
                if waits:
                    self.waits[name] += 1
            return there(found)
        if was_there and name == "to":
            self._look("to", args, kwargs)
        return found

    def _copied(self, args: Any, kwargs: Any) -> Any:
        """Between host and device; into the device it may be waited for or not."""
        if not isinstance(args[0], Elsewhere):
            self.looks["copy_"] += 1
        elif kwargs.get("non_blocking", False):
            self.sent += 1
        else:
            self.waits["copy_"] += 1
        args[0].as_subclass(torch.Tensor).copy_(_here(args[1]))
        return args[0]

    def _indices(self, index: Any) -> Any:
        for each in index if isinstance(index, tuple) else (index,):
            if isinstance(each, Elsewhere) and each.dtype == torch.bool:
                self.looks["index by a mask"] += 1
            elif isinstance(each, list) or (isinstance(each, torch.Tensor) and not isinstance(each, Elsewhere)):
                self.waits["index from the host"] += 1
        return index

    def _look(self, name: str, args: Any, kwargs: Any) -> None:
        if name == "numpy" and not kwargs.get("force"):
            raise TypeError("can't convert a tensor of an accelerator to numpy; use Tensor.cpu() first")
        if name == "repeat_interleave" and kwargs.get("output_size") is not None:
            return
        self.looks[name] += 1

    def _same_device(self, name: str, leaves: list[Any]) -> None:
        plain = [each for each in leaves if isinstance(each, torch.Tensor) and not isinstance(each, Elsewhere)]
        strangers = [each for each in plain if each.dim()]
        assert not strangers, f"{name} of tensors on two devices: {[tuple(each.shape) for each in strangers]}"
