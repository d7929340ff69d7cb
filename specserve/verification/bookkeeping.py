"""Where exact matching ends in a packed batch, and what goes into the next forward (Megatron-LM's two functions).

A batch is packed: the rows of logits of one request follow each other, the first one belongs to its newest committed
token (the base), the others to its drafted tokens. Megatron packs D decode rows of S + 1 first and P prefill rows of
one after them; `fixed_stride` are the lengths of that layout. Here rows may have any lengths.

Two of Megatron's rules differ on purpose: every row of the buffers is written in every call, so nothing of an earlier
step can be read; and rows need not be due (a prompt that goes on), which choose no token. And they are functions of the
host: a dozen small operations beside a model's step cost more than reading the chosen ids, which it has to do anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NO_TOKEN = -1


def fixed_stride(decode_rows: int, prefill_rows: int, depth: int) -> Ints:
    """int64 [D + P]: the row lengths of Megatron's layout, depth + 1 for decode rows and 1 for prefill rows."""
    return np.array([depth + 1] * decode_rows + [1] * prefill_rows, dtype=np.int64)


def verify_speculative_tokens(input_tokens: Ints, output_tokens: Ints, lengths: Ints) -> tuple[Ints, Bools]:
    """Where each row's last accepted token stands, int64 [n], and which tokens are accepted, bool [L].

    input_tokens, output_tokens int64 [L] or [1, L], packed: what the target read, and what it chose after each of them;
    lengths int64 [n], at least 1 each, L in all. A row's first token is accepted. A later one is, while all before it
    in its row are and it is what the target chose after the one before it.
    """
    read, chosen = input_tokens.ravel(), output_tokens.ravel()
    ends = lengths.cumsum()
    begins = ends - lengths
    # A base is compared with nothing: what stands before it belongs to another request.
    refused = read != np.roll(chosen, 1)
    refused[begins] = False
    refusals = refused.cumsum()
    unrefused = refusals[begins]
    # Refusals never fall, so a row's accepted tokens end where they first rise above what its base has.
    last = np.minimum(np.searchsorted(refusals, unrefused, side="right"), ends) - 1
    return last, refusals == np.repeat(unrefused, lengths)


@dataclass(frozen=True, slots=True)
class NextPass:
    """Buffers for n rows or more; S is the number of drafted tokens that are wanted, 0 where their ids are known.

    sampled int64 [n] the token after each row's last accepted one, −1 where none was due; last_accepted int64 [n]
    where that one stands in the sequence that the target read; accepted int64 [n, S] the drafted tokens that were
    accepted, −1 past them; counts int64 [n] how many these are.
    """

    sampled: Ints
    last_accepted: Ints
    accepted: Ints
    counts: Ints

    @staticmethod
    def empty(rows: int, depth: int) -> NextPass:
        """Buffers that hold nothing yet."""
        sampled, last_accepted, counts = np.empty((3, rows), dtype=np.int64)
        return NextPass(sampled, last_accepted, np.empty((rows, depth), dtype=np.int64), counts)


def prepare_next_forward_pass(
    input_tokens: Ints,
    output_tokens: Ints,
    lengths: Ints,
    due: Bools,
    logit_positions: Ints,
    last: Ints,
    buffers: NextPass,
) -> None:
    """Write the first n rows of `buffers`, all of each; rows beyond are left as they are.

    input_tokens, output_tokens and lengths as in `verify_speculative_tokens`, whose first result is `last`. due bool
    [n]: rows that choose a token. logit_positions int64 [L]: where in the sequence that the target read each packed
    token stands (not the same where logits of prompts are wanted at their ends only).
    """
    read, chosen = input_tokens.ravel(), output_tokens.ravel()
    n, begins = len(lengths), lengths.cumsum() - lengths
    buffers.sampled[:n] = np.where(due, chosen[last], NO_TOKEN)
    buffers.last_accepted[:n] = logit_positions[last]
    buffers.counts[:n] = last - begins
    if not n or not buffers.accepted.shape[1]:
        return
    steps = np.arange(1, buffers.accepted.shape[1] + 1)
    places = np.minimum(begins[:, None] + steps, len(read) - 1)
    buffers.accepted[:n] = np.where(steps > buffers.counts[:n, None], NO_TOKEN, read[places])
