"""The systems that are compared get the models that they are said to have."""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from tiny_models import tiny_llama

from specserve.bench.systems import TransformersGenerate
from specserve.models import _reduced_head


def test_transformers_assistant_guesses_with_its_own_reduced_head(tmp_path) -> None:
    """A draft with a head for a part of the vocabulary is not judged by the embedding in its place."""
    folder, draft = tmp_path / "target", tmp_path / "draft"
    tiny_llama(folder, seed=1)
    tiny_llama(draft, seed=1)
    weights = load_file(draft / "model.safetensors")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    ids = torch.arange(0, len(head), 2)
    _reduced_head.write(draft, head[ids], ids)
    plain, assisted = TransformersGenerate(folder), TransformersGenerate(folder, assistant=draft)
    assistant = assisted._options["assistant_model"]
    assert isinstance(assistant.get_output_embeddings(), _reduced_head.ReducedHead)
    prompts = [[5, 6, 7, 8]]
    assert assisted.run(prompts, 8, 3, 1).answers == plain.run(prompts, 8, 0, 1).answers
