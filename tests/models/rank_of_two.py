"""The second process of a pair that holds models together, one after the other.

Each line that it reads names a port, a configuration file, and a fault or `none`. A fault befalls it in each batch of
more than a few tokens: `memory` does not fit, `error` is a bug, `death` ends the process, `hang` never comes back, and
`nothing` is what it adds to one sum.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from specserve import config as configs
from specserve.models._ranks import Meeting, RankGroup, arrive
from specserve.models._tensor_parallel import follow
from specserve.models._worker import load_backend

HOST = "127.0.0.1"
WAIT_S = 200.0
FEW = 8
WIDTH = 32  # of the tiny models


def group_of_two(store: Any, rank: int, hang_after_s: float) -> RankGroup:
    return RankGroup(store, rank, 2, host=HOST, device=torch.device("cpu"), hang_after_s=hang_after_s)


def befall(fault: str, rows: torch.Tensor) -> torch.Tensor:
    if fault == "nothing":
        return torch.zeros_like(rows[..., :1]).expand(*rows.shape[:-1], WIDTH).contiguous()
    if fault == "memory":
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate a lot")
    if fault == "error":
        raise ValueError("a bug of the second rank")
    if fault == "death":
        os._exit(1)
    time.sleep(3600)
    raise AssertionError("it was to be killed")


def break_forwards(part: Any, fault: str) -> None:
    """In the midst of a step: before the second layer's attention is summed, behind half of the exchanges."""
    forward, layer = part.forward, part._model.model.layers[1].self_attn.o_proj
    product, sizes = layer.part.forward, [0]

    def broken(rows: torch.Tensor) -> torch.Tensor:
        if sizes[-1] > FEW:
            return befall(fault, rows)
        return product(rows)

    def counted(batch: Any) -> torch.Tensor:
        sizes.append(len(batch.tokens))
        return forward(batch)

    layer.part.forward, part.forward = broken, counted


def hold(port: str, path: str, fault: str) -> None:
    """One model, until rank 0 leaves."""
    config = configs.load(Path(path))
    ranks = group_of_two(arrive(Meeting(HOST, int(port)), WAIT_S), 1, WAIT_S)
    part, info = load_backend(config.target, "target", config.engine, ranks=ranks)
    print(info.blocks, flush=True)
    if fault != "none":
        break_forwards(part, fault)
    try:
        follow(part, ranks)
    except Exception as error:  # what ends a rank
        print(type(error).__name__, file=sys.stderr)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        hold(*line.split())
