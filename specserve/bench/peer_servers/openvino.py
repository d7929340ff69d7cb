"""OpenVINO GenAI's continuous batching, with a draft model or prompt lookup. It brings no server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specserve.bench.peer_servers._launch import Asked, Tokens

DISTRIBUTION = "openvino-genai"
REQUIREMENTS = ("openvino-genai==2026.4.1", "optimum-intel==2.2.0", "torch==2.13.0")
UNWANTED = ("torchvision",)
MODES = ("plain", "draft", "ngram")

_KV_GB = 1
_NGRAM = 3


def export(source: Path, to: Path) -> None:
    """An OpenVINO model with its tokenizer."""
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    main_export(
        str(source),
        output=to,
        task="text-generation-with-past",
        ov_config=OVConfig(dtype="fp32"),
        convert_tokenizer=True,
    )


def engine(asked: Asked) -> Pipeline:
    """The pipeline."""
    return Pipeline(asked)


class Pipeline:
    """A `ContinuousBatchingPipeline`, driven step by step."""

    def __init__(self, asked: Asked) -> None:
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = _KV_GB
        scheduler.max_num_seqs = asked.requests
        scheduler.enable_prefix_caching = False
        exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        numeric = exact | {"INFERENCE_NUM_THREADS": asked.threads}
        more: dict[str, Any] = {}
        if asked.mode == "draft":
            more["draft_model"] = genai.draft_model(asked.draft, "CPU", **numeric)
        if asked.mode == "ngram":
            more["prompt_lookup"] = True
        self._genai = genai
        self._asked = asked
        self._pipeline = genai.ContinuousBatchingPipeline(asked.target, scheduler, "CPU", numeric | more)
        self._open: dict[int, Any] = {}

    def add(self, key: int, prompt: Tokens, max_tokens: int) -> None:
        """Take a request."""
        import numpy
        import openvino

        ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        self._open[key] = self._pipeline.add_request(key, ids, self._wish(max_tokens))

    def _wish(self, max_tokens: int) -> Any:
        wish = self._genai.GenerationConfig()
        wish.max_new_tokens = max_tokens
        wish.ignore_eos = True
        wish.do_sample = False
        if self._asked.mode != "plain":
            wish.num_assistant_tokens = self._asked.depth
        if self._asked.mode == "ngram":
            wish.max_ngram_size = _NGRAM
        return wish

    def step(self) -> list[tuple[int, Tokens]]:
        """One step of the pipeline."""
        self._pipeline.step()
        finished = self._genai.GenerationStatus.FINISHED
        done = [key for key, handle in self._open.items() if handle.get_status() == finished]
        return [(key, list(self._open.pop(key).read_all()[0].generated_ids)) for key in done]
