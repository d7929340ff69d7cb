"""The draft worker's slots: tensors allocated once, at start, addressed by the slot ids that the coordinator leases.

A slot holds the dist that its drafted token was drawn from and, where the speculator asks for it, a hidden state.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from specserve import native
from specserve.drafting import _kernels
from specserve.drafting._kernels import Chances
from specserve.errors import ProtocolError
from specserve.sampling import host, wire
from specserve.sampling.dists import draw
from specserve.sampling.race import first_ids, race, race_ranking, race_scores, race_sparse
from specserve.transport.messages import Array, Dists


class DistStore(Protocol):
    """Dists by slot, in the form in which they are shipped. Slots are int64 [m] on the store's device."""

    def put(self, slots: torch.Tensor, dist: torch.Tensor) -> None:
        """Truncate and round dist [m, V], and keep it."""
        ...

    def draw(self, slots: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """One token per slot, int64 [m], drawn from exactly what is kept there, by uniforms [m]."""
        ...

    def draw_siblings(self, slots: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """int64 [m, w]: tokens drawn one after the other, by uniforms [m, w], each from what those before left there.

        The first is that of `draw`. −1 where nothing is left.
        """
        ...

    def race(self, slots: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """One token per slot, int64 [m], that wins by what is kept there, under keys int32 [m, 4] of its noise."""
        ...

    def likeliest(self, slots: torch.Tensor, count: int, keys: torch.Tensor | None) -> torch.Tensor:
        """int64 [m, count]: ids by what is kept there, likeliest first, −1 where fewer have mass.

        With keys int32 [m, 4], by how they finish in the race instead.
        """
        ...

    def pick(
        self, logits: torch.Tensor, vocab_size: int, chances: Chances, tokens: Array, ranked: Array
    ) -> tuple[list[int], list[float]] | None:
        """See `Workspace.pick`; ranked int64 [slots, ranks] takes what else was likely. None where it cannot be had."""
        ...

    def peaks(self, slots: torch.Tensor) -> torch.Tensor:
        """float32 [m]: the largest probability that is kept there."""
        ...

    def ship(self, slots: torch.Tensor) -> Dists:
        """What is kept in these slots, one row each."""
        ...


class SparseDists:
    """The k likeliest ids of each dist: 6 k bytes per slot."""

    def __init__(self, slots: int, k: int, device: torch.device) -> None:
        self._ids = torch.zeros(slots, k, dtype=torch.int32, device=device)
        self._probs = torch.zeros(slots, k, dtype=torch.float16, device=device)

    def put(self, slots: torch.Tensor, dist: torch.Tensor) -> None:
        """Truncate and round dist [m, V], and keep it."""
        self._ids[slots], self._probs[slots] = wire.sparsify(dist, self._ids.shape[1])

    def draw(self, slots: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """One token per slot, drawn from what is kept there."""
        picked = draw(wire.normalise(self._probs[slots]), noise)
        return self._ids[slots].gather(1, picked[:, None]).squeeze(1).long()

    def draw_siblings(self, slots: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Tokens per slot, drawn without replacement."""
        picked = _without_replacement(self._probs[slots], noise)
        return torch.where(picked >= 0, self._ids[slots].long().gather(1, picked.clamp(min=0)), -1)

    def race(self, slots: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """One token per slot that wins by what is kept there."""
        return race_sparse(self._ids[slots], wire.normalise(self._probs[slots]), keys)

    def likeliest(self, slots: torch.Tensor, count: int, keys: torch.Tensor | None) -> torch.Tensor:
        """The first ids by what is kept there, or by their race."""
        ids, probs = self._ids[slots].long(), self._probs[slots]
        if keys is not None:
            return first_ids(ids, race_scores(ids, wire.normalise(probs), keys), count)
        front = torch.where(probs > 0, ids, -1)[:, :count]  # they are kept likeliest first
        return torch.nn.functional.pad(front, (0, count - front.shape[1]), value=-1)

    def pick(
        self, logits: torch.Tensor, vocab_size: int, chances: Chances, tokens: Array, ranked: Array
    ) -> tuple[list[int], list[float]] | None:
        """Where logits and slots are on a CPU, in one call."""
        return _kernels.pick(logits, vocab_size, chances, tokens, (self._ids, self._probs, ranked))

    def peaks(self, slots: torch.Tensor) -> torch.Tensor:
        """Of the likeliest id, which is kept first."""
        return self._probs[slots, 0].float()

    def ship(self, slots: torch.Tensor) -> Dists:
        """What is kept in these slots."""
        return wire.encode_sparse(self._ids[slots], self._probs[slots])


class DenseDists:
    """Whole dists: 2 V bytes per slot."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._probs = torch.zeros(slots, vocab_size, dtype=torch.float16, device=device)

    def put(self, slots: torch.Tensor, dist: torch.Tensor) -> None:
        """Round dist [m, V] and keep its part below the shared vocabulary's end; there is no mass above."""
        self._probs[slots] = dist[:, : self._probs.shape[1]].half()

    def draw(self, slots: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """One token per slot, drawn from what is kept there."""
        return draw(wire.normalise(self._probs[slots]), noise)

    def draw_siblings(self, slots: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Tokens per slot, drawn without replacement."""
        return _without_replacement(self._probs[slots], noise)

    def race(self, slots: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """One token per slot that wins by what is kept there."""
        return race(wire.normalise(self._probs[slots]), keys)

    def likeliest(self, slots: torch.Tensor, count: int, keys: torch.Tensor | None) -> torch.Tensor:
        """The first ids by what is kept there, or by their race."""
        dist = wire.normalise(self._probs[slots])
        if keys is not None:
            return race_ranking(dist, keys, count)
        ids = torch.arange(dist.shape[1], device=dist.device).expand(len(dist), -1)
        return first_ids(ids, dist, count)

    def pick(
        self, logits: torch.Tensor, vocab_size: int, chances: Chances, tokens: Array, ranked: Array
    ) -> tuple[list[int], list[float]] | None:
        """There is no kernel that keeps whole dists."""
        del logits, vocab_size, chances, tokens, ranked
        return None

    def peaks(self, slots: torch.Tensor) -> torch.Tensor:
        """Of the likeliest id."""
        return self._probs[slots].amax(-1).float()

    def ship(self, slots: torch.Tensor) -> Dists:
        """What is kept in these slots."""
        return wire.encode_dense(self._probs[slots])


def _without_replacement(probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """int64 [m, w]: places in probs float16 [m, k] that uniforms [m, w] draw one after the other; −1 for none left."""
    left, drawn = probs.clone(), []
    for uniforms in noise.unbind(1):
        possible = left.any(-1)
        picked = draw(wire.normalise(torch.where(possible[:, None], left, probs)), uniforms)
        left.scatter_(1, picked[:, None], 0)
        drawn.append(torch.where(possible, picked, -1))
    return torch.stack(drawn, 1)


class Workspace:
    """All slots of one draft worker. hidden_size 0 keeps no hidden states, ranks 0 no rankings.

    notes_sureness: it is kept how sure the draft was of each token.
    """

    def __init__(
        self,
        slots: int,
        dists: DistStore,
        device: torch.device,
        hidden_size: int = 0,
        ranks: int = 0,
        *,
        notes_sureness: bool = False,
    ) -> None:
        native.library()  # where it must be compiled first, before the first plan
        self.notes_sureness = notes_sureness
        self._sureness = np.zeros(slots if notes_sureness else 0, dtype=np.float32)
        self._slots = slots
        self.ranks = ranks
        self._ranked = np.full((slots, ranks), -1, dtype=np.int64)
        self._device = device
        self._dists = dists
        self._hidden = torch.zeros(slots, hidden_size, device=device)

    def put(self, slots: Array, dist: torch.Tensor) -> None:
        """Keep dist [m, V] at slots [m]. Raises ProtocolError for a slot that there is not."""
        self._dists.put(self._checked(slots), dist)

    def draw(self, slots: Array, noise: torch.Tensor) -> torch.Tensor:
        """One token per slot, int64 [m], drawn from what is kept there. Raises ProtocolError likewise."""
        return self._dists.draw(self._checked(slots), host.send(noise, self._device))

    def draw_siblings(self, slots: Array, noise: torch.Tensor) -> torch.Tensor:
        """int64 [m, w] by uniforms [m, w]: see `DistStore`. Raises ProtocolError likewise."""
        return self._dists.draw_siblings(self._checked(slots), host.send(noise, self._device))

    def race(self, slots: Array, keys: torch.Tensor) -> torch.Tensor:
        """One token per slot, int64 [m], that wins by what is kept there. Raises ProtocolError likewise."""
        return self._dists.race(self._checked(slots), host.send(keys, self._device))

    def ship(self, slots: Array) -> Dists:
        """The kept dists of slots [m] as bytes, in that order. Raises ProtocolError likewise."""
        return self._dists.ship(self._checked(slots))

    def likeliest(self, slots: Array, keys: torch.Tensor | None = None) -> torch.Tensor:
        """int64 [m, ranks]: ids in the order of the kept dists or, with keys [m, 4], of their race; −1 for none."""
        return self._dists.likeliest(
            self._checked(slots), self.ranks, None if keys is None else host.send(keys, self._device)
        )

    def finishers(self, slots: Array, count: int, keys: torch.Tensor) -> torch.Tensor:
        """int64 [m, count]: the first ids of the kept dists' race under keys [m, 4], the winner first; −1 for none."""
        return self._dists.likeliest(self._checked(slots), count, host.send(keys, self._device))

    def pick(
        self, logits: torch.Tensor, vocab_size: int, chances: Chances, tokens: Array
    ) -> tuple[list[int], list[float]] | None:
        """Pick, keep and rank in one call, as `put`, `draw` or `race`, and `rank` do one after the other.

        logits float32 [m, V], of which ids below vocab_size count. tokens int64 [m, 3]: which chain of `chances` each
        row is about, which of its tokens, and that one's slot, no slot twice. Returns the m ids and the rows' largest
        logits, NaN where there is one; None where there is no kernel for that. Raises ProtocolError likewise.
        """
        try:
            return self._dists.pick(logits, vocab_size, chances, tokens, self._ranked)
        except IndexError:
            self._check(tokens[:, 2])  # C looks at all of them anyway, and in no time
            raise

    def rank(self, slots: Array, ids: Array) -> None:
        """Keep int64 [m, ranks], or as many as there are, beside slots [m]: what else was likely at their tokens."""
        self._check(slots)
        self._ranked[slots, : ids.shape[1]] = ids

    def ranked(self, slots: Array) -> list[list[int]]:
        """What `rank` kept beside these slots. Raises ProtocolError likewise."""
        self._check(slots)
        found: list[list[int]] = self._ranked[slots].tolist()
        return found

    def peaks(self, slots: Array) -> Array:
        """float32 [m]: the largest probabilities kept at slots [m]. Raises ProtocolError likewise."""
        found: Array = host.read(self._dists.peaks(self._checked(slots)))[0]
        return found

    def note_sureness(self, slots: Array, chances: Array) -> None:
        """Keep float32 [m] beside slots [m]: how likely their tokens seem to be kept. Raises ProtocolError likewise."""
        self._check(slots)
        self._sureness[slots] = chances

    def sureness(self, slots: Array) -> Array:
        """What `note_sureness` kept beside these slots, float32 [m]. Raises ProtocolError likewise."""
        self._check(slots)
        return self._sureness[slots]

    def put_hidden(self, slots: Array, hidden: torch.Tensor) -> None:
        """Scatter hidden states [m, hidden_size] to slots [m]. Raises ProtocolError likewise."""
        self._hidden[self._checked(slots)] = hidden.to(self._hidden)

    def hidden(self, slots: Array) -> torch.Tensor:
        """Gather hidden states float32 [m, hidden_size] of slots [m]. Raises ProtocolError likewise."""
        return self._hidden[self._checked(slots)]

    def _check(self, slots: Array) -> None:
        if len(slots) and (slots.min() < 0 or slots.max() >= self._slots):
            raise ProtocolError(f"slots {slots.tolist()} are not all among the workspace's {self._slots}")

    def _checked(self, slots: Array) -> torch.Tensor:
        self._check(slots)
        return host.send(slots.astype(np.int64), self._device)
