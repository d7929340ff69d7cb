"""Where training begins: the matrix that is best for the squared distance, found at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_RIDGE = 3e-3  # of the mean diagonal of the Gram matrix


def fitted(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The M [b, a] that minimises ‖x · Mᵀ − y‖² + ridge ‖M‖² over pairs of x [n, a] and y [n, b]; float64.

    Raises ValueError when there is no pair.
    """
    gram = cross = None
    for pair in pairs:
        x, y = (each.double() for each in pair)
        gram = x.T @ x if gram is None else gram.addmm_(x.T, x)
        cross = x.T @ y if cross is None else cross.addmm_(x.T, y)
    if gram is None or cross is None:
        raise ValueError("nothing to fit a matrix to")
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
    found: torch.Tensor = torch.linalg.solve(gram, cross)
    return found.T
