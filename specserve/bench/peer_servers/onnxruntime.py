"""ONNX Runtime GenAI's generator: one static batch, and one at a time with a draft model or n-grams."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specserve.bench.peer_servers._launch import Asked, Generate, Tokens

DISTRIBUTION = "onnxruntime-genai"
REQUIREMENTS = ("onnxruntime-genai==0.18.0", "torch==2.13.0", "transformers>=5.17,<5.25", "onnx", "onnx-ir")
MODES = ("plain", "draft", "ngram")

_CONFIG = "genai_config.json"
_NGRAM = 3


def export(source: Path, to: Path) -> None:
    """An ONNX model, and the runtime's description of it."""
    sys.argv[1:] = ["-i", str(source), "-o", str(to), "-p", "fp32", "-e", "cpu", "-c", str(to / "cache")]
    runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")


def generate(asked: Asked) -> Generate:
    """One batch where nothing is drafted; the runtime refuses to draft for more than one prompt."""
    import onnxruntime_genai

    config = onnxruntime_genai.Config(asked.target)
    config.overlay(json.dumps(_overlay(asked)))
    model = onnxruntime_genai.Model(config)

    def answers(prompts: Sequence[Tokens], max_tokens: int) -> list[Tokens]:
        if asked.mode == "plain":
            return _batch(onnxruntime_genai, model, asked, prompts, max_tokens)
        return [_batch(onnxruntime_genai, model, asked, [prompt], max_tokens)[0] for prompt in prompts]

    return answers


def _overlay(asked: Asked) -> dict[str, Any]:
    """What differs from the exported description: threads, no end tokens, a draft.

    The exported padding is a token of every chat prompt; ends are another id that no text has.
    """
    session = {"intra_op_num_threads": asked.threads}
    model: dict[str, Any] = {"decoder": {"session_options": session}, "eos_token_id": _NEVER, "pad_token_id": _NEVER}
    if asked.mode == "draft":
        described = json.loads((Path(asked.draft) / _CONFIG).read_text(encoding="utf-8"))["model"]["decoder"]
        place = os.path.relpath(Path(asked.draft) / described["filename"], asked.target)
        described["session_options"] |= session
        model["draft"] = described | {"filename": place}
    return {"model": model}


_NEVER = 3
"""An id that ends nothing: a special token that neither prompts nor answers hold."""


def _batch(runtime: Any, model: Any, asked: Asked, prompts: Sequence[Tokens], max_tokens: int) -> list[Tokens]:
    """Prompts are filled up on the right: on a CPU, those filled up on the left get wrong answers."""
    import numpy

    widest = max(map(len, prompts))
    params = runtime.GeneratorParams(model)
    params.set_search_options(do_sample=False, batch_size=len(prompts), max_length=widest + max_tokens)
    if asked.mode != "plain":
        ngram = {"ngram_size": _NGRAM} if asked.mode == "ngram" else {}
        params.set_speculative_options(max_draft_tokens=asked.depth, **ngram)
    generator = runtime.Generator(model, params)
    generator.append_tokens(numpy.array([p + [_NEVER] * (widest - len(p)) for p in prompts], dtype=numpy.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [[int(token) for token in generator.get_sequence(i)[widest:][:max_tokens]] for i in range(len(prompts))]
