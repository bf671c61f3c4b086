"""Numbers of rows at which matrix products give a row the same bits, whatever the other rows are.

A product on a CPU takes another kernel for another number of rows, and the kernels round differently: the same
request then gets other log-probabilities, and sooner or later other tokens, in another batch. Some sets of row counts
do share one order of additions, like all from 2 to 128 under AVX-512, or the multiples of 6 up to 48 under AVX2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Product = tuple[torch.Tensor, torch.Tensor | None]
"""A projection [in, out] and its bias [out]."""


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Numbers of rows that a product may have: multiples of `multiple` from `least` to `most`."""

    least: int
    multiple: int
    most: int

    def padded(self, count: int) -> int:
        """The fewest rows, at least `count`, that split into parts of `most` and a last one that is allowed."""
        rest = count % self.most
        if not rest:
            return count
        return count - rest + max(self.least, -(-rest // self.multiple) * self.multiple)


def multiply(x: torch.Tensor, product: Product) -> torch.Tensor:
    """`x` [N, in] through a projection, in one call: [N, out]."""
    projection, bias = product
    return x @ projection if bias is None else torch.addmm(bias, x, projection)
