"""Where the keys and values of sequences live.

Rows are grouped into pools by capacity, so that a batch of unequal lengths reads little padding; within a pool the
decoding sequences are the first rows without gaps, so that attention covers them without gathering. A row that
outgrows its pool is copied to the next, and holes are closed by moving the last row in: copies of a few hundred KiB,
cheaper than reading padding at every step. Keys are stored transposed: that makes the products of a decoding step
twice as fast on a CPU.

Shapes: L layers, R rows, K key-value heads, C capacity in tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

TOKEN_MULTIPLE = 32
"""Capacities are whole numbers of this, so that masked padding can follow any sequence."""
_MIN_POOL_TOKENS = 4096
_MIN_POOL_ROWS = 8
_MAX_IDLE_POOL_BYTES = 32 << 20
"""A pool that is mostly empty is made smaller only above this: growing again costs time."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """Sizes that keys and values have in one model; `num_groups` query heads share one key-value head."""

    num_layers: int
    num_kv_heads: int
    num_groups: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Size of the keys and values of one token in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def allocate(self, leading: tuple[int, ...], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [*leading, K, D, num_tokens] and values [*leading, K, num_tokens, D], zero.

        Not uninitialised: masked padding is multiplied by 0, and 0 times a NaN is a NaN.
        """
        options = {"dtype": self.dtype, "device": self.device}
        keys = torch.zeros((*leading, self.num_kv_heads, self.head_dim, num_tokens), **options)
        return keys, torch.zeros((*leading, self.num_kv_heads, num_tokens, self.head_dim), **options)


class Row:
    """Place of one sequence: `pool`, `index` in it, and `length`, the number of tokens that are there."""

    __slots__ = ("index", "length", "pool")

    def __init__(self, pool: RowPool) -> None:
        self.pool, self.index, self.length = pool, -1, 0

    def view(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [L, K, D, n] and values [L, K, n, D] of the n tokens `start:end`, to read or to write."""
        return self.pool.view(self.index, start, end)


class RowPool:
    """Rows of one capacity. The first `num_decoding` rows are decoding, the others prefilling.

    `keys` [L, R, K, D, C] and `values` [L, R, K, C, D]; `layers` holds both for each layer.
    """

    def __init__(self, shape: KvShape, capacity: int) -> None:
        self.shape, self.capacity = shape, capacity
        self.rows: list[Row] = []
        self.num_decoding = 0
        self._floor = min(_MIN_POOL_ROWS, _MIN_POOL_TOKENS // capacity)
        self._resize(0)

    def view(self, index: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of tokens `start:end` of the row at `index`, in all layers."""
        return self.keys[:, index, :, :, start:end], self.values[:, index, :, start:end]

    def add(self, row: Row) -> None:
        """Take `row` in as a prefilling row; its contents are undefined."""
        if len(self.rows) == self.keys.shape[1]:
            self._resize(max(1, self._floor, 2 * len(self.rows)))
        row.pool, row.index = self, len(self.rows)
        self.rows.append(row)

    def remove(self, row: Row) -> None:
        """Give the place back and close the gap."""
        hole = row.index
        if hole < self.num_decoding:
            self.num_decoding -= 1
            self._move(self.num_decoding, hole)
            hole = self.num_decoding
        self._move(len(self.rows) - 1, hole)
        self.rows.pop()
        row.index = -1
        size = self.keys.shape[1] * self.capacity * self.shape.bytes_per_token
        if len(self.rows) * 4 < self.keys.shape[1] > self._floor and size > _MAX_IDLE_POOL_BYTES:
            self._resize(max(self._floor, 2 * len(self.rows)))

    def promote(self, row: Row) -> None:
        """`row` has its whole prompt and decodes from now on."""
        first = self.rows[self.num_decoding]
        if first is not row:
            saved = tuple(part.clone() for part in row.view(0, row.length))
            self._move(first.index, row.index)
            self.rows[self.num_decoding], row.index = row, self.num_decoding
            for part, contents in zip(row.view(0, row.length), saved, strict=True):
                part.copy_(contents)
        self.num_decoding += 1

    def _move(self, source: int, target: int) -> None:
        if source != target:
            row = self.rows[source]
            for to, contents in zip(self.view(target, 0, row.length), self.view(source, 0, row.length), strict=True):
                to.copy_(contents)
            self.rows[target], row.index = row, target

    def _resize(self, num_rows: int) -> None:
        keys, values = self.shape.allocate((self.shape.num_layers, num_rows), self.capacity)
        if self.rows:
            keys[:, : len(self.rows)] = self.keys[:, : len(self.rows)]
            values[:, : len(self.rows)] = self.values[:, : len(self.rows)]
        self.keys, self.values = keys, values
        self.layers = list(zip(keys.unbind(0), values.unbind(0), strict=True))
        self.arange = torch.arange(num_rows, device=self.shape.device)


class KvRows:
    """All running sequences' keys and values. `capacity` is the longest sequence in tokens, here rounded up."""

    def __init__(self, shape: KvShape, capacity: int) -> None:
        self.shape = shape
        capacity = -(-capacity // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
        sizes = sorted({size for power in range(7, 40) for size in (1 << power, 3 << (power - 1)) if size < capacity})
        self._pools = {size: RowPool(shape, size) for size in (*sizes, capacity)}
        self.positions = torch.arange(capacity, device=shape.device)

    def add(self, num_tokens: int) -> Row:
        """A new prefilling row with room for `num_tokens`."""
        row = Row(self._pool_for(num_tokens))
        row.pool.add(row)
        return row

    def remove(self, row: Row) -> None:
        """Give a row back."""
        row.pool.remove(row)

    def ensure(self, row: Row, num_tokens: int) -> None:
        """Make room for `num_tokens` in all, moving the row to another pool if it must."""
        if num_tokens <= row.pool.capacity:
            return
        old_pool = row.pool
        left_behind = Row(old_pool)
        left_behind.index, left_behind.length = row.index, row.length
        old_pool.rows[row.index] = left_behind
        was_decoding = row.index < old_pool.num_decoding
        self._pool_for(num_tokens).add(row)
        for to, contents in zip(row.view(0, row.length), left_behind.view(0, row.length), strict=True):
            to.copy_(contents)
        old_pool.remove(left_behind)
        if was_decoding:
            row.pool.promote(row)

    def decoding_pools(self) -> Iterator[RowPool]:
        """Pools that hold at least one decoding row, smallest capacity first."""
        return (pool for pool in self._pools.values() if pool.num_decoding)

    def _pool_for(self, num_tokens: int) -> RowPool:
        for capacity, pool in self._pools.items():
            if capacity >= num_tokens:
                return pool
        raise ValueError(f"a sequence of {num_tokens} tokens is longer than the capacity")


class BlockStore:
    """The tensors behind a `PrefixCache`: keys [num_blocks, L, K, D, block_size], values [..., block_size, D]."""

    def __init__(self, shape: KvShape, num_blocks: int, block_size: int) -> None:
        self._size, self._device = block_size, shape.device
        self._keys, self._values = shape.allocate((num_blocks, shape.num_layers), block_size)

    def save(self, row: Row, blocks: Sequence[tuple[int, int]]) -> None:
        """Copy blocks out of a row: `(block number in the row, slot)`, with consecutive numbers."""
        if not blocks:
            return
        first, last = blocks[0][0], blocks[-1][0] + 1
        keys, values = row.view(first * self._size, last * self._size)
        slots = torch.tensor([slot for _, slot in blocks], device=self._device)
        self._keys[slots] = keys.unflatten(3, (last - first, self._size)).permute(3, 0, 1, 2, 4)
        self._values[slots] = values.unflatten(2, (last - first, self._size)).permute(2, 0, 1, 3, 4)

    def restore(self, row: Row, slots: Sequence[int]) -> None:
        """Copy the blocks in `slots` to the start of a row and set its length."""
        row.length = len(slots) * self._size
        if slots:
            chosen = torch.tensor(list(slots), device=self._device)
            keys, values = row.view(0, row.length)
            keys.copy_(self._keys[chosen].permute(1, 2, 3, 0, 4).flatten(3, 4))
            values.copy_(self._values[chosen].permute(1, 2, 0, 3, 4).flatten(2, 3))
