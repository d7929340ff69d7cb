"""Environment variables of CPU worker processes. Imports nothing: they must be set before torch is loaded."""

from __future__ import annotations

CPU_WORKER_ENVIRONMENT: dict[str, str] = {
    # Threads of an OpenMP pool spin after each parallel region, for up to 200 ms. Two worker processes that share
    # cores would then starve each other exactly while one waits for the other, which is the normal case here.
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",  # GNU's pool, the one in torch's wheels
    "KMP_BLOCKTIME": "0",  # Intel's and LLVM's pool, milliseconds
    # Every round makes tensors of the logits' size. By default glibc gives each of them back to the kernel, and most of
    # the sampling time goes into fresh pages; so a worker keeps what it has once had.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
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
