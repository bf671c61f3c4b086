"""Whether, and how, this machine can give a reply the same bits in every batch.

If all products keep to row counts that agree, if the values of attention are added up in blocks shorter than those of
the kernels, and if masked padding adds exact zeros, then prefill in any pieces, decode, a reused prefix and every
batch come to the same bits; the rest of a pass works row by row. Which row counts agree depends on processor and
library, so it is measured as the engine starts, on the shapes of its model: tens of milliseconds for a small one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from miles_rl.engine.embedded.attention import Attention
from miles_rl.engine.embedded.kv import KvRows, KvShape, Row
from miles_rl.engine.embedded.row_counts import Product, RowCounts, multiply

CANDIDATES = (
    RowCounts(2, 1, 128),
    RowCounts(2, 1, 64),
    RowCounts(8, 8, 64),
    RowCounts(6, 6, 48),
    RowCounts(12, 12, 48),
    RowCounts(64, 64, 64),
)
"""Cheapest first."""
_SAMPLE = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 33, 48, 63, 64, 65, 96, 127, 128)
_PIECES = (1, 1, 3, 29, 30, 1, 128, 110)
_DECODED = (0, 6, 31, 32, 200, 255, 300)


def find_row_counts(products: Iterable[Product], shape: KvShape) -> RowCounts | None:
    """The cheapest row counts that agree for these products and for attention of this shape; None if none do."""
    distinct = list({(*product[0].shape, product[1] is None): product for product in products}.values())
    return next(
        (counts for counts in CANDIDATES if products_agree(counts, distinct) and attention_agrees(counts, shape)), None
    )


def products_agree(counts: RowCounts, products: Iterable[Product]) -> bool:
    """Whether a row of each product is the same in all `counts` tried, in all places and among all other rows."""
    generator = torch.Generator().manual_seed(0)
    allowed = sorted({counts.padded(count) for count in _SAMPLE if count <= counts.most})
    for product in products:
        x = torch.randn((2 * counts.most, product[0].shape[0]), generator=generator)
        wanted = torch.cat([multiply(part, product) for part in x.split(counts.most)])
        for number, count in enumerate(allowed):
            first = 17 * number % (counts.most + 1)
            if not torch.equal(multiply(x[first : first + count], product), wanted[first : first + count]):
                return False
    return True


def attention_agrees(counts: RowCounts, shape: KvShape) -> bool:
    """Whether a token's attention is the same in one pass over all, in pieces, and decoding beside others."""
    shape = replace(shape, num_layers=1)
    length, generator = sum(_PIECES), torch.Generator().manual_seed(0)
    heads = (shape.num_kv_heads * shape.num_groups, shape.num_kv_heads, shape.num_kv_heads)
    sequence = tuple(torch.randn((length, number, shape.head_dim), generator=generator) for number in heads)
    rows = KvRows(shape, length + 1)
    wanted = _prefill(rows, rows.add(length), counts, sequence, [length])
    if not torch.equal(_prefill(rows, rows.add(length), counts, sequence, _PIECES), wanted):
        return False
    for decoded in _DECODED:
        row = rows.add(decoded + 1)
        if decoded:
            _prefill(rows, row, counts, sequence, [decoded])
        row.pool.promote(row)
    attention = Attention(rows, counts)
    tokens = torch.tensor([token for pool in rows.decoding_pools() for token in attention.decode(pool)])
    queries, keys, values = (part[tokens] for part in sequence)
    return torch.equal(attention(0, queries, keys, values), wanted[tokens])


def _prefill(
    rows: KvRows, row: Row, counts: RowCounts, sequence: Sequence[torch.Tensor], pieces: Sequence[int]
) -> torch.Tensor:
    """Attention of all tokens of `sequence` (queries, keys, values), computed in pieces."""
    outputs: list[torch.Tensor] = []
    for count in pieces:
        attention, part = Attention(rows, counts), slice(row.length, row.length + count)
        attention.prefill(row, count)
        queries, keys, values = (tensor[part] for tensor in sequence)
        outputs.append(attention(0, queries, keys, values))
    return torch.cat(outputs)
