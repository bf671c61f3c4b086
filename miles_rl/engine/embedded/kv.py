"""Where the keys and values of running sequences live, and attention over them.

Rows are grouped into pools by capacity, so that a batch of unequal lengths reads little padding; within a pool the
decoding sequences are the first rows without gaps, so that one attention call covers them without gathering. A row
that outgrows its pool is copied to the next, and holes are closed by moving the last row in: copies of a few
hundred KiB, cheaper than reading padding at every step.

Shapes: L layers, R rows, K key-value heads, G query heads per key-value head, C capacity in tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

_MIN_POOL_TOKENS = 4096
_MIN_POOL_ROWS = 8


@dataclass(frozen=True, slots=True)
class KvShape:
    """Sizes that keys and values have in one model."""

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

    def size(self, leading: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        """[*leading, 2K, num_tokens, D]."""
        return (*leading, 2 * self.num_kv_heads, num_tokens, self.head_dim)


class Row:
    """Place of one sequence: `pool`, `index` in it, and `length`, the number of tokens that are there."""

    __slots__ = ("index", "length", "pool")

    def __init__(self, pool: RowPool) -> None:
        self.pool, self.index, self.length = pool, -1, 0

    def read(self, start: int, end: int) -> torch.Tensor:
        """View of the keys and values of tokens `start:end`: [L, 2K, end - start, D]."""
        return self.pool.kv[:, self.index, :, start:end]


class RowPool:
    """Rows of one capacity: `kv` [L, R, 2K, C, D]. The first `num_decoding` rows are decoding, the next prefilling."""

    def __init__(self, shape: KvShape, capacity: int) -> None:
        self.shape, self.capacity = shape, capacity
        self.rows: list[Row] = []
        self.num_decoding = 0
        self._floor = min(_MIN_POOL_ROWS, _MIN_POOL_TOKENS // capacity)
        self._resize(0)

    def add(self, row: Row) -> None:
        """Take `row` in as a prefilling row; its contents are undefined."""
        if len(self.rows) == self.kv.shape[1]:
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
        if len(self.rows) * 4 < self.kv.shape[1] > self._floor:
            self._resize(max(self._floor, 2 * len(self.rows)))

    def promote(self, row: Row) -> None:
        """`row` has its whole prompt and decodes from now on."""
        first = self.rows[self.num_decoding]
        if first is not row:
            length = max(first.length, row.length)
            saved = self.kv[:, row.index, :, :length].clone()
            self._move(first.index, row.index)
            self.kv[:, self.num_decoding, :, :length] = saved
            self.rows[self.num_decoding], row.index = row, self.num_decoding
        self.num_decoding += 1

    def _move(self, source: int, target: int) -> None:
        if source != target:
            row = self.rows[source]
            self.kv[:, target, :, : row.length] = self.kv[:, source, :, : row.length]
            self.rows[target], row.index = row, target

    def _resize(self, num_rows: int) -> None:
        # Zeros, not uninitialised memory: masked padding is multiplied by 0, and 0 times a NaN is a NaN.
        size = self.shape.size((self.shape.num_layers, num_rows), self.capacity)
        kv = torch.zeros(size, dtype=self.shape.dtype, device=self.shape.device)
        if self.rows:
            kv[:, : len(self.rows)] = self.kv[:, : len(self.rows)]
        self.kv = kv
        self.layers = list(kv.unbind(0))
        self.arange = torch.arange(num_rows, device=self.shape.device)


class KvRows:
    """All running sequences' keys and values. `capacity` is the longest sequence in tokens."""

    def __init__(self, shape: KvShape, capacity: int) -> None:
        self.shape = shape
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
        old_pool, old_index = row.pool, row.index
        was_decoding = old_index < old_pool.num_decoding
        placeholder = Row(old_pool)
        placeholder.index, placeholder.length = old_index, row.length
        old_pool.rows[old_index] = placeholder
        self._pool_for(num_tokens).add(row)
        row.read(0, row.length).copy_(placeholder.read(0, row.length))
        old_pool.remove(placeholder)
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
    """The tensors behind a `PrefixCache`: [num_blocks, L, 2K, block_size, D]."""

    def __init__(self, shape: KvShape, num_blocks: int, block_size: int) -> None:
        self._size = block_size
        size = shape.size((num_blocks, shape.num_layers), block_size)
        self._blocks = torch.empty(size, dtype=shape.dtype, device=shape.device)
        self._device = shape.device

    def save(self, row: Row, blocks: Sequence[tuple[int, int]]) -> None:
        """Copy blocks out of a row: `(block number in the row, slot)`, with consecutive numbers."""
        if not blocks:
            return
        first, last = blocks[0][0], blocks[-1][0] + 1
        source = row.read(first * self._size, last * self._size)
        layers, heads, _, dim = source.shape
        source = source.reshape(layers, heads, last - first, self._size, dim).permute(2, 0, 1, 3, 4)
        self._blocks[torch.tensor([slot for _, slot in blocks], device=self._device)] = source

    def restore(self, row: Row, slots: Sequence[int]) -> None:
        """Copy the blocks in `slots` to the start of a row and set its length."""
        row.length = len(slots) * self._size
        if slots:
            blocks = self._blocks[torch.tensor(list(slots), device=self._device)].permute(1, 2, 0, 3, 4)
            row.read(0, row.length).copy_(blocks.flatten(2, 3))


@dataclass(frozen=True, slots=True)
class _Decode:
    pool: RowPool
    start: int
    positions: torch.Tensor
    num_tokens: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Prefill:
    row: Row
    start: int
    count: int
    mask: torch.Tensor | None


class Attention:
    """Attention of one pass: decoding rows pool by pool, then one segment per prefilling row.

    The flat order of tokens is the order of the calls to `decode` and `prefill`.
    """

    def __init__(self, rows: KvRows) -> None:
        self._rows, self._shape = rows, rows.shape
        self._decodes: list[_Decode] = []
        self._prefills: list[_Prefill] = []
        self.num_tokens = 0

    def decode(self, pool: RowPool) -> list[int]:
        """Add one token for each decoding row of the pool; returns their positions."""
        rows = pool.rows[: pool.num_decoding]
        lengths = [row.length for row in rows]
        longest = max(lengths) + 1
        positions = torch.tensor(lengths, device=self._shape.device)
        hidden = self._rows.positions[:longest] > positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=self._shape.dtype, device=self._shape.device)
        mask.masked_fill_(hidden, float("-inf"))
        self._decodes.append(_Decode(pool, self.num_tokens, positions, longest, mask[:, None, None]))
        self.num_tokens += len(rows)
        for row in rows:
            row.length += 1
        return lengths

    def prefill(self, row: Row, count: int) -> None:
        """Add the next `count` tokens of a row."""
        mask = None
        if row.length:
            columns = self._rows.positions[: row.length + count]
            mask = columns <= columns[row.length :, None]
        self._prefills.append(_Prefill(row, self.num_tokens, count, mask))
        self.num_tokens += count
        row.length += count

    def __call__(self, layer: int, queries: torch.Tensor, new_kv: torch.Tensor) -> torch.Tensor:
        """Store `new_kv` [N, 2K, D] and attend from `queries` [N, K * G, D]; returns [N, K * G * D]."""
        outputs = [self._decode_layer(part, layer, queries, new_kv) for part in self._decodes]
        outputs += [self._prefill_layer(part, layer, queries, new_kv) for part in self._prefills]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _decode_layer(self, part: _Decode, layer: int, queries: torch.Tensor, new_kv: torch.Tensor) -> torch.Tensor:
        shape, count = self._shape, part.positions.shape[0]
        kv, heads = part.pool.layers[layer], self._shape.num_kv_heads
        end = part.start + count
        kv[part.pool.arange[:count], :, part.positions] = new_kv[part.start : end]
        # The query heads of one key-value head are laid out as if they were query positions: no key is copied.
        grouped = queries[part.start : end].view(count, heads, shape.num_groups, shape.head_dim)
        keys, values = kv[:count, :heads, : part.num_tokens], kv[:count, heads:, : part.num_tokens]
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=part.mask).reshape(count, -1)

    def _prefill_layer(self, part: _Prefill, layer: int, queries: torch.Tensor, new_kv: torch.Tensor) -> torch.Tensor:
        shape, heads = self._shape, self._shape.num_kv_heads
        end, length = part.start + part.count, part.row.length
        kv = part.row.pool.layers[layer][part.row.index]
        kv[:, length - part.count : length] = new_kv[part.start : end].transpose(0, 1)
        grouped = queries[part.start : end].view(part.count, heads, shape.num_groups, shape.head_dim)
        keys, values = kv[:, None, :length].expand(-1, shape.num_groups, -1, -1).split(heads)
        output = F.scaled_dot_product_attention(
            grouped.permute(1, 2, 0, 3), keys, values, attn_mask=part.mask, is_causal=part.mask is None
        )
        return output.permute(2, 0, 1, 3).reshape(part.count, -1)
