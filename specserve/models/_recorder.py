"""Recording a step once and replaying it, so that the host pays for its launches once.

A recorded step reads and writes the same memory in every replay; who replays it writes its inputs there before and
reads its results there afterwards. It may not look at a value on the host, nor bring one from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Step = Callable[[], None]


class Recorder(Protocol):
    """A way to record. All that one recorder recorded is replayed on one stream, one after the other."""

    def record(self, step: Step) -> Step:
        """Run a step a few times and return what replays it. Raises RuntimeError where it cannot be recorded."""
        ...


class CudaRecorder:
    """By CUDA graphs. All share one pool of memory: what a step keeps for others is in tensors that were made before.

    A step runs once before it is captured, on a stream of its own, so that libraries load and choose what they use.
    What could not be captured is refused there already: a capture that fails leaves the allocator in a state of its
    own. Errors of capturing are those of this thread: others may use the device meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Step) -> Step:
        """See `Recorder`."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), NoLooks():  # type: ignore[no-untyped-call]
            step()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                step()
        finally:
            torch.cuda.set_stream(current)  # where a capture fails, torch does not
        replay: Step = graph.replay
        return replay


class PlainRecorder:
    """On any device: a step is run again. What a CUDA graph could not hold is refused here too.

    For CPUs it gains nothing; it runs the very steps that a GPU replays, where there is none.
    """

    def record(self, step: Step) -> Step:
        """See `Recorder`."""
        with NoLooks():  # type: ignore[no-untyped-call]
            step()
        return step


_LOOKS = frozenset(
    {"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::allclose", "aten::lift_fresh"}
    | {"aten::nonzero", "aten::nonzero_numpy", "aten::argwhere", "aten::masked_select", "aten::unique_dim"}
    | {"aten::_unique", "aten::_unique2", "aten::unique_consecutive", "aten::bincount"}
)
"""Operators whose result has a size or is a number that the host must know, or that bring one from the host."""

_INDEXED = frozenset({"aten::index", "aten::index_put", "aten::index_put_"})


def _by_truth(indices: Any) -> bool:
    """Whether what is picked is said by a mask: how much that is the host must know."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _to_host(args: Any, kwargs: Any) -> bool:
    """Whether a copy leaves a device for the host."""
    goes = [each for each in (*args[1:], kwargs.get("device")) if isinstance(each, torch.device | str)]
    return args[0].device.type != "cpu" and any(torch.device(each).type == "cpu" for each in goes)


class NoLooks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In its scope such operators raise RuntimeError, and so does what brings values to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        brings = name in ("aten::_to_copy", "aten::to") and _to_host(args, kwargs or {})
        if (
            brings
            or name in _LOOKS
            or (name in _INDEXED and _by_truth(args[1]))
            or (name == "aten::where" and len(args) == 1)
        ):
            raise RuntimeError(f"{name} makes the host look at a value, or brings one from it; it cannot be recorded")
        return func(*args, **(kwargs or {}))
