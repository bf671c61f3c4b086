"""What one forward pass reads: some rows of a batch, padded or packed, and where their policy tokens are predicted.

Two layouts, one result. `padded` puts one trajectory per line, filled up on the right: with causal attention nothing
that comes later reaches back, so no attention mask is needed and any causal model is exact. `packed` puts trajectories
end to end on one line and restarts the positions at each: the model must keep them apart by `position_ids`, as
transformers' attention does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from miles_rl.batch.layout import Layout
from miles_rl.batch.partition import by_packed_size, by_padded_size
from miles_rl.batch.rows import Rows


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """R trajectories of a batch as model input [L, W]; n policy tokens.

    `rows` [R] are their numbers in the batch, in the order of `mask` [R, P], P the most policy tokens of one of them.
    `input_ids` [L, W]; `position_ids` [L, W], None where they just count up. `lines` and `columns` [n] say where in
    [L, W] the logits stand that predict each policy token, and `targets` [n] which token it is, both in the row-major
    order of `mask`.
    """

    rows: torch.Tensor
    mask: torch.Tensor
    input_ids: torch.Tensor
    position_ids: torch.Tensor | None
    lines: torch.Tensor
    columns: torch.Tensor
    targets: torch.Tensor

    def to(self, device: torch.device) -> MicroBatch:
        """The same on `device`."""
        positions = None if self.position_ids is None else self.position_ids.to(device)
        return MicroBatch(
            rows=self.rows.to(device),
            mask=self.mask.to(device),
            input_ids=self.input_ids.to(device),
            position_ids=positions,
            lines=self.lines.to(device),
            columns=self.columns.to(device),
            targets=self.targets.to(device),
        )

    def scatter(self, flat: torch.Tensor) -> torch.Tensor:
        """`flat` [n], one value per policy token, as [R, P] with 0 outside the mask. Differentiable."""
        return flat.new_zeros(self.mask.shape).masked_scatter(self.mask, flat)

    def gather(self, batch_values: torch.Tensor) -> torch.Tensor:
        """These rows of `batch_values` [B, P of the batch], as [R, P]."""
        return batch_values[self.rows, : self.mask.shape[1]]


def split(rows: Rows, chosen: Sequence[int], layout: Layout, max_tokens: int) -> list[MicroBatch]:
    """Micro-batches of at most about `max_tokens` input tokens that hold the `chosen` rows, each once."""
    lengths = [len(rows.inputs[i]) for i in chosen]
    partition = by_padded_size if layout == "padded" else by_packed_size
    return [build(rows, [chosen[i] for i in part], layout) for part in partition(lengths, max_tokens)]


def build(rows: Rows, chosen: Sequence[int], layout: Layout) -> MicroBatch:
    """The micro-batch of the `chosen` rows in `layout`, on the CPU."""
    inputs = [rows.inputs[i] for i in chosen]
    positions = [rows.positions[i] for i in chosen]
    counts = [len(p) for p in positions]
    position_ids = None
    if layout == "padded":
        input_ids = np.zeros((len(chosen), max(map(len, inputs))), np.int64)
        for line, tokens in enumerate(inputs):
            input_ids[line, : len(tokens)] = tokens
        lines = np.repeat(np.arange(len(chosen)), counts)
        columns = np.concatenate(positions)
    else:
        starts = np.cumsum([0, *map(len, inputs[:-1])])
        input_ids = np.concatenate(inputs)[None]
        position_ids = torch.as_tensor(np.concatenate([np.arange(len(tokens)) for tokens in inputs])[None])
        lines = np.zeros(sum(counts), np.int64)
        columns = np.concatenate([p + start for p, start in zip(positions, starts, strict=True)])
    index = torch.tensor(list(chosen), dtype=torch.int64)
    mask = rows.mask[index, : max(counts)]
    return MicroBatch(
        rows=index,
        mask=mask,
        input_ids=torch.as_tensor(input_ids),
        position_ids=position_ids,
        lines=torch.as_tensor(lines.astype(np.int64)),
        columns=torch.as_tensor(columns),
        targets=rows.targets[index, : max(counts)][mask],
    )
