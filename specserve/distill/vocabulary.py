"""Which ids a draft may say. On a CPU the head is most of a draft step, and rare ids are most of the head."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from specserve.distill.corpus import Example


def likeliest_ids(examples: Iterable[Example], vocab_size: int, wanted: int) -> torch.Tensor:
    """The ids met most often in taught text, int64 [min(wanted, vocab_size)], ascending; among equals the lower ones.

    Byte-pair vocabularies are numbered by how early, so how often, a pair was merged.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for example in examples:
        counts += torch.bincount(example.tokens[example.start :], minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:wanted].sort().values


def covered(examples: Iterable[Example], ids: torch.Tensor, vocab_size: int) -> float:
    """The share of answer tokens that are among these ids."""
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[ids] = True
    answers = torch.cat([example.tokens[example.answer :] for example in examples])
    return float(known[answers].float().mean())
