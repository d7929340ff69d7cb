"""transformers' `generate`: one static batch, and one at a time with an assistant or with prompt lookup.

It is a requirement of specserve, so it runs in the same environment, and guesses with the draft's own reduced head.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specserve.bench.peer_servers._launch import Asked, Generate, Tokens

DISTRIBUTION = "transformers"
REQUIREMENTS: tuple[str, ...] = ()
MODES = ("plain", "draft", "ngram")


def generate(asked: Asked) -> Generate:
    """One batch where nothing is drafted; transformers refuses to draft for more than one prompt."""
    import torch

    from specserve.bench.systems import TransformersGenerate

    torch.set_num_threads(asked.threads)
    assistant = Path(asked.draft) if asked.mode == "draft" else None
    lookup = asked.depth if asked.mode == "ngram" else None
    model = TransformersGenerate(Path(asked.target), assistant=assistant, lookup=lookup, batched=asked.mode == "plain")

    def answers(prompts: Any, max_tokens: int) -> list[Tokens]:
        found = model.run(prompts, max_tokens, asked.depth, len(prompts)).answers
        return [list(answer) for answer in found or ()]

    return answers
