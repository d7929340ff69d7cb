"""The decisions of rules as one C call (`native/chains.h`): for a lone row the many small tensor operations of a rule
cost more than reading the row. None where there is no kernel for these tensors; the rule's own file then decides.

Rules in tensors and rules in C say the same: what is compared is computed in the same types, and only sums over ids
may differ in their last bits, by their order.
"""

from __future__ import annotations

import torch

from specserve.errors import ProtocolError
from specserve.native import addresses
from specserve.sampling._kernels import Kernel, checked, kernel, packed, threads_for
from specserve.verification._draft_rows import DraftRows

_OUT_OF_RANGE = 1

Verdict = tuple[torch.Tensor, torch.Tensor]


def judge_ratios(
    rule: str,
    target: torch.Tensor,
    draft: DraftRows,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    accept: torch.Tensor,
    choose: torch.Tensor,
) -> Verdict | None:
    """`rejection` or `block`. Raises ProtocolError for ids outside of the vocabulary."""
    run = _kernel(rule, target)
    if run is None or draft.probs.dtype != target.dtype:
        return None
    target, ids, probs = packed(target, target.dtype), packed(draft.ids, torch.int64), packed(draft.probs, target.dtype)
    accept, choose = packed(accept, torch.float64), packed(choose, torch.float64)
    batch, places, _ = target.shape
    offered = batch * (places - 1) * ids.shape[2]
    own = (
        ids.shape[2],
        target.data_ptr(),
        addresses.of_tensor("draft ids", ids, torch.int64, offered),
        addresses.of_tensor("draft probabilities", probs, target.dtype, offered),
    )
    noise = (
        addresses.of_tensor("accept noise", accept, torch.float64, batch * (places - 1)),
        addresses.of_tensor("choose noise", choose, torch.float64, batch * places),
    )
    return _judged(run, target, own, tokens, lengths, noise)


def judge_exact(
    target: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor, choose: torch.Tensor
) -> Verdict | None:
    """`exact`. Raises ProtocolError for ids outside of the vocabulary."""
    return _judge_rows("exact", target, tokens, lengths, choose, torch.float64)


def judge_coupled(
    target: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor, keys: torch.Tensor
) -> Verdict | None:
    """`coupled`. Raises ProtocolError for ids outside of the vocabulary."""
    return _judge_rows("coupled", target, tokens, lengths, keys, torch.int32)


def judge_typical(
    target: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor, choose: torch.Tensor, floor: float, share: float
) -> Verdict | None:
    """`typical`. Raises ProtocolError for ids outside of the vocabulary."""
    return _judge_rows("typical", target, tokens, lengths, choose, torch.float64, floor, share)


def _judge_rows(
    rule: str,
    target: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    noise: torch.Tensor,
    noise_dtype: torch.dtype,
    *limits: float,
) -> Verdict | None:
    """A rule that reads the target's rows and no draft's; limits are numbers of its own."""
    run = _kernel(rule, target)
    if run is None:
        return None
    target, noise = packed(target, target.dtype), packed(noise, noise_dtype)
    each = target.shape[0] * target.shape[1] * (4 if noise_dtype is torch.int32 else 1)  # keys are four words
    given = addresses.of_tensor("noise", noise, noise_dtype, each)
    return _judged(run, target, (target.data_ptr(),), tokens, lengths, (given, *limits))


def _kernel(rule: str, target: torch.Tensor) -> Kernel | None:
    return kernel(rule, target.dtype) if target.is_cpu else None


def _judged(
    run: Kernel,
    target: torch.Tensor,
    dists: tuple[int, ...],
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    noise: tuple[float, ...],
) -> Verdict:
    """Run a kernel of which these are the arguments that lie between those that all rules have."""
    batch, places, vocab = target.shape
    tokens, lengths = packed(tokens, torch.int64), packed(lengths, torch.int64)
    into = torch.empty(2, batch, dtype=torch.int64)
    chains = (
        addresses.of_tensor("drafted tokens", tokens, torch.int64, batch * (places - 1)),
        addresses.of_tensor("lengths", lengths, torch.int64, batch),
    )
    status = run(batch, places - 1, vocab, *dists, *chains, *noise, into.data_ptr(), threads_for(target))
    if status == _OUT_OF_RANGE:
        raise ProtocolError(
            f"a drafted chain holds ids outside of the vocabulary of {vocab}, or is longer than it says"
        )
    checked(status)
    kept, following = into.unbind()
    return kept, following
