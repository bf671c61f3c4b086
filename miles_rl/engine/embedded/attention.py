"""Attention of one pass over many sequences: decoding rows pool by pool, then prefilling rows one by one.

Two batched matrix products and a softmax. On a CPU, at the lengths of tool-using episodes, that takes half the time
of the fused kernel, which packs every key again at each step. With `RowCounts` the bits of a token's output depend on
its own query and on the keys and values before it alone.

Shapes: K key-value heads, G query heads for each, D head size, T tokens attended to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from miles_rl.engine.embedded.kv import TOKEN_MULTIPLE, KvRows, Row, RowPool
from miles_rl.engine.embedded.row_counts import RowCounts

_QUERY_BLOCK = 256
"""Prefilling queries taken at a time: bounds the scores in memory, and skips most of what causality hides."""
_KEY_BLOCK = 256
"""Keys whose values are added up in one product: more, and the kernels cut the sum at places that depend on it."""


@dataclass(frozen=True, slots=True)
class _Decode:
    """The decoding rows of a pool; their tokens are `start:start + count` of the pass."""

    pool: RowPool
    start: int
    count: int
    positions: torch.Tensor
    num_tokens: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Prefill:
    """`count` tokens of one row, the last of which is token `length - 1` of the sequence."""

    row: Row
    start: int
    count: int
    length: int
    masks: tuple[torch.Tensor, ...]


class Attention:
    """The flat order of a pass's tokens is the order of the calls to `decode` and `prefill`."""

    def __init__(self, rows: KvRows, counts: RowCounts | None = None) -> None:
        self._rows, self._shape, self._counts = rows, rows.shape, counts
        self._scale = rows.shape.head_dim**-0.5
        self._query_block = max(1, counts.most // rows.shape.num_groups) if counts else _QUERY_BLOCK
        self._padding: list[torch.Tensor] = []
        self._decodes: list[_Decode] = []
        self._prefills: list[_Prefill] = []
        self.num_tokens = 0

    def decode(self, pool: RowPool) -> list[int]:
        """Add one token for each decoding row of the pool; returns their positions."""
        rows = pool.rows[: pool.num_decoding]
        lengths = [row.length for row in rows]
        longest = self._num_keys(max(lengths) + 1)
        positions = torch.tensor(lengths, device=self._shape.device)
        mask = self._mask(self._rows.positions[:longest] > positions[:, None])
        mask = mask[:, None].repeat_interleave(self._shape.num_kv_heads, dim=0)
        self._decodes.append(_Decode(pool, self.num_tokens, len(rows), positions, longest, mask))
        self.num_tokens += len(rows)
        for row in rows:
            row.length += 1
        return lengths

    def prefill(self, row: Row, count: int) -> None:
        """Add the next `count` tokens of a row."""
        first, length = row.length, row.length + count
        columns = self._rows.positions
        masks: list[torch.Tensor] = []
        for begin in range(first, length, self._query_block):
            end = min(begin + self._query_block, length)
            mask = self._mask(columns[: self._num_keys(end)] > columns[begin:end, None])
            masks.append(mask.repeat(self._shape.num_groups, 1)[None])
        self._prefills.append(_Prefill(row, self.num_tokens, count, length, tuple(masks)))
        self.num_tokens += count
        row.length = length

    def pad(self, count: int) -> None:
        """Add tokens that belong to no sequence, after all others; their output is 0."""
        if count:
            size = self._shape.num_kv_heads * self._shape.num_groups * self._shape.head_dim
            self._padding = [torch.zeros((count, size), dtype=self._shape.dtype, device=self._shape.device)]

    def __call__(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Store `keys` and `values` [N, K, D] and attend from `queries` [N, K * G, D]; returns [N, K * G * D]."""
        outputs: list[torch.Tensor] = []
        for decode in self._decodes:
            part = slice(decode.start, decode.start + decode.count)
            outputs.append(self._decode(decode, layer, queries[part], keys[part], values[part]))
        for prefill in self._prefills:
            part = slice(prefill.start, prefill.start + prefill.count)
            outputs.append(self._prefill(prefill, layer, queries[part], keys[part], values[part]))
        outputs += self._padding
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _decode(
        self, part: _Decode, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        shape, count = self._shape, part.count
        all_keys, all_values = part.pool.layers[layer]
        rows = part.pool.arange[:count]
        all_keys[rows, :, :, part.positions] = keys
        all_values[rows, :, part.positions] = values
        pairs = count * shape.num_kv_heads
        output = self._attend(
            queries.reshape(pairs, shape.num_groups, shape.head_dim),
            all_keys[:count].view(pairs, shape.head_dim, -1)[:, :, : part.num_tokens],
            all_values[:count].view(pairs, -1, shape.head_dim)[:, : part.num_tokens],
            part.mask,
        )
        return output.reshape(count, -1)

    def _prefill(
        self, part: _Prefill, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        shape, count, first = self._shape, part.count, part.length - part.count
        row_keys, row_values = (pooled[part.row.index] for pooled in part.row.pool.layers[layer])
        row_keys[:, :, first : part.length] = keys.permute(1, 2, 0)
        row_values[:, first : part.length] = values.transpose(0, 1)
        grouped = queries.view(count, shape.num_kv_heads, shape.num_groups, shape.head_dim).permute(1, 2, 0, 3)
        outputs: list[torch.Tensor] = []
        for number, mask in enumerate(part.masks):
            begin = number * self._query_block
            block = grouped[:, :, begin : begin + self._query_block]
            length = mask.shape[-1]
            output = self._attend(block.flatten(1, 2), row_keys[:, :, :length], row_values[:, :length], mask)
            output = output.view(shape.num_kv_heads, shape.num_groups, -1, shape.head_dim)
            outputs.append(output.permute(2, 0, 1, 3).flatten(1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """[P, Q, D] from queries [P, Q, D], keys [P, D, T], values [P, T, D], mask [P or 1, Q or 1, T] to add."""
        if self._counts is not None:
            return self._attend_in_blocks(self._counts, queries, keys, values, mask)
        scores = torch.baddbmm(mask, queries, keys, alpha=self._scale)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
        return torch.bmm(weights.to(values.dtype), values)

    def _attend_in_blocks(
        self, counts: RowCounts, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """As `_attend`, in row counts and blocks of keys that keep the order of additions; T is a whole number of 32.

        The queries are scaled, as a kernel for many rows scales its input and one for few its output.
        """
        num_rows = queries.shape[1]
        surplus = counts.padded(num_rows) - num_rows
        queries = queries * self._scale
        if surplus:
            queries = F.pad(queries, (0, 0, 0, surplus))
            mask = F.pad(mask, (0, 0, 0, surplus)) if mask.shape[1] > 1 else mask
        weights = torch.softmax(torch.baddbmm(mask, queries, keys), dim=-1)
        if weights.shape[-1] <= _KEY_BLOCK:
            output = torch.bmm(weights, values)
            return output[:, :num_rows] if surplus else output
        output = torch.bmm(weights[:, :, :_KEY_BLOCK], values[:, :_KEY_BLOCK])
        for begin in range(_KEY_BLOCK, weights.shape[-1], _KEY_BLOCK):
            part = slice(begin, begin + _KEY_BLOCK)
            output.baddbmm_(weights[:, :, part], values[:, part])
        return output[:, :num_rows]

    def _num_keys(self, num_tokens: int) -> int:
        """Keys to attend to for `num_tokens`: the surplus is masked."""
        return num_tokens if self._counts is None else -(-num_tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE

    def _mask(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._shape.dtype, device=self._shape.device)
        return mask.masked_fill_(hidden, float("-inf"))
