"""Environment variables of CPU worker processes. Imports nothing: they must be set before torch is loaded."""

from __future__ import annotations

CPU_WORKER_ENVIRONMENT: dict[str, str] = {
    # Threads of an OpenMP pool spin after each parallel region, for up to 200 ms. Two worker processes that share
    # cores would then starve each other exactly while one waits for the other, which is the normal case here.
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",  # GNU's pool, the one in torch's wheels
    "KMP_BLOCKTIME": "0",  # Intel's and LLVM's pool, milliseconds
    # The tokenizers library starts a thread per core otherwise, and warns after a fork.
    "TOKENIZERS_PARALLELISM": "false",
    # A model is a folder; nothing may wait for a model hub.
    "HF_HUB_OFFLINE": "1",
}


def cpu_worker_environment(threads: int) -> dict[str, str]:
    """The variables for a worker with this many threads; 0 leaves the pools' size to the machine."""
    if threads == 0:
        return dict(CPU_WORKER_ENVIRONMENT)
    return CPU_WORKER_ENVIRONMENT | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
