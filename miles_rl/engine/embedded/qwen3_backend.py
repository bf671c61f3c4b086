"""The fast path: a hand-written Qwen3 over pooled rows of keys and values, with a block prefix cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from miles_rl.engine.embedded.attention import Attention
from miles_rl.engine.embedded.backend import Admission, CacheFigures, StepOutput
from miles_rl.engine.embedded.determinism import find_row_counts
from miles_rl.engine.embedded.kv import BlockStore, KvRows
from miles_rl.engine.embedded.prefix_cache import PrefixCache
from miles_rl.engine.embedded.qwen3 import Qwen3, Qwen3Config
from miles_rl.engine.embedded.request import Request
from miles_rl.engine.embedded.row_counts import RowCounts
from miles_rl.engine.embedded.weights import (
    WeightsError,
    choose_dtype,
    context_length,
    eos_token_ids,
    read_config,
    read_tensors,
)
from miles_rl.weights.checksum import checksum

BLOCK_SIZE = 16
_GIB = 1 << 30
_LOGIT_ROWS = 256
_log = logging.getLogger(__name__)


class Qwen3Backend:
    """Implements `Backend`.

    `running_kv_gib` bounds the keys and values of running requests (admission waits), `prefix_cache_gib` those kept
    for later ones (the least recently used go). Both on the model's device. `deterministic` gives a reply the same
    bits whatever else runs: None where this machine can, True raises `WeightsError` where it cannot.
    """

    def __init__(
        self,
        model_dir: str,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        max_context: int | None = None,
        running_kv_gib: float = 1.0,
        prefix_cache_gib: float = 0.25,
        deterministic: bool | None = None,
    ) -> None:
        config = read_config(model_dir)
        self._config = Qwen3Config.parse(config)
        self._dtype, self._device = choose_dtype(dtype, config), torch.device(device)
        self.vocab_size = self._config.vocab_size
        self.eos_token_ids = eos_token_ids(model_dir, config)
        shape = self._config.kv_shape(self._dtype, self._device)
        self._max_running_tokens = int(running_kv_gib * _GIB / shape.bytes_per_token)
        self.context_length = min(context_length(config), max_context or 1 << 30, self._max_running_tokens)
        self._num_reserved = 0
        num_blocks = int(prefix_cache_gib * _GIB / shape.bytes_per_token) // BLOCK_SIZE
        self._cache = PrefixCache(num_blocks, BLOCK_SIZE)
        self._store = BlockStore(shape, num_blocks, BLOCK_SIZE)
        self._rows = KvRows(shape, self.context_length)
        self._counts: RowCounts | None = None
        self._model = self.stage(model_dir)
        if deterministic is not False:
            self._make_deterministic(required=deterministic is True)
        self.deterministic = self._counts is not None
        self._by_row: dict[object, Request] = {}
        self._epoch = 0

    @torch.inference_mode()
    def admit(self, request: Request) -> Admission:
        """See `Backend`. Waits for memory, and for another request that is computing the same prefix just now."""
        if self._num_reserved + request.num_reserved > self._max_running_tokens:
            return Admission.FULL
        limit = len(request.ids) - 1
        if request.prompt_logprob_start is not None:
            limit = min(limit, request.prompt_logprob_start)
        free, request.claim = self._cache.claim(request.ids, limit, request.namespace)
        if not free:
            return Admission.LATER
        slots = self._cache.match(request.ids, limit, request.namespace)
        request.kv = self._rows.add(len(request.ids) + 1)
        self._by_row[request.kv] = request
        self._store.restore(request.kv, slots)
        request.num_computed, request.epoch = request.kv.length, self._epoch
        self._num_reserved += request.num_reserved
        return Admission.ADMITTED

    @torch.inference_mode()
    def forward(self, prefill: Sequence[tuple[Request, int]]) -> StepOutput:
        """See `Backend`."""
        attention = Attention(self._rows, self._counts)
        ids: list[int] = []
        positions: list[int] = []
        decoding = self._plan_decoding(attention, ids, positions)
        requests, outputs = list(decoding), list(range(len(decoding)))
        for request, count in prefill:
            start = request.num_computed
            attention.prefill(request.kv, count)
            ids += request.ids[start : start + count]
            positions += range(start, start + count)
            if start + count == len(request.ids):
                requests.append(request)
                outputs.append(len(ids) - 1)
        surplus = self._counts.padded(len(ids)) - len(ids) if self._counts is not None else 0
        attention.pad(surplus)
        ids += [0] * surplus
        positions += [0] * surplus
        hidden = self._model.hidden(self._tensor(ids), self._tensor(positions), max(positions) + 1, attention)
        self._score_prompts(prefill, hidden, len(decoding))
        for request in decoding:
            request.num_computed += 1
        for request, count in prefill:
            self._after_prefill(request, count)
        if len(outputs) + surplus < len(ids):
            hidden = hidden[self._tensor(outputs)]
        logits = self._model.logits(hidden)
        return StepOutput(requests, logits[: len(requests)] if surplus else logits)

    @torch.inference_mode()
    def release(self, request: Request) -> None:
        """See `Backend`."""
        self._keep(request)
        self._cache.drop_claim(request.claim)
        request.claim = None
        self._rows.remove(request.kv)
        del self._by_row[request.kv]
        request.kv, request.is_decoding = None, False
        self._num_reserved -= request.num_reserved

    def clear_cache(self) -> None:
        """See `Backend`."""
        self._cache.clear()
        for request in self._by_row.values():
            request.claim = None

    def cache_figures(self) -> CacheFigures:
        """See `Backend`."""
        return CacheFigures(len(self._cache) * BLOCK_SIZE, self._cache.num_blocks * BLOCK_SIZE)

    def stage(self, model_dir: str) -> Qwen3:
        """See `Backend`. Both sets of weights are in memory until `install`."""
        if not Path(model_dir).is_dir():
            raise WeightsError(f"{model_dir}: no such folder")
        return Qwen3(self._config, read_tensors(model_dir), self._dtype, self._device, self._counts)

    def install(self, staged: Qwen3) -> None:
        """See `Backend`."""
        self._model = staged
        self._epoch += 1
        self.clear_cache()

    def checksum(self) -> str:
        """See `Backend`."""
        return checksum(self._model.named_tensors())

    def _make_deterministic(self, required: bool) -> None:
        """Make the arithmetic independent of the batch, or say why not; that is an error if it is `required`."""
        reason = None
        if self._device.type != "cpu" or self._dtype is not torch.float32:
            reason = f"needs the CPU and float32, not {self._device} and {str(self._dtype).removeprefix('torch.')}"
        elif torch.get_num_threads() > 1:
            reason = f"needs one torch thread, not {torch.get_num_threads()}"
        else:
            self._counts = find_row_counts(self._model.products(), self._rows.shape)
            if self._counts is None:
                reason = "the matrix products of this machine depend on the batch at all sizes tried"
        if reason is not None:
            if required:
                raise WeightsError(f"engine.deterministic: true; {reason}; set engine.deterministic=false")
            _log.info("replies may depend on the batch: %s", reason)
        self._model.counts = self._counts

    def _plan_decoding(self, attention: Attention, ids: list[int], positions: list[int]) -> list[Request]:
        full = [row for pool in self._rows.decoding_pools() for row in pool.rows[: pool.num_decoding]]
        for row in full:
            self._rows.ensure(row, row.length + 1)
        decoding: list[Request] = []
        for pool in self._rows.decoding_pools():
            decoding += [self._by_row[row] for row in pool.rows[: pool.num_decoding]]
            positions += attention.decode(pool)
        ids += [request.ids[-1] for request in decoding]
        return decoding

    def _score_prompts(self, prefill: Sequence[tuple[Request, int]], hidden: torch.Tensor, offset: int) -> None:
        """Log-probabilities of prompt tokens, at temperature 1, for the requests that asked for them."""
        for request, count in prefill:
            first = max(request.num_computed, request.prompt_logprob_start or 0)
            last = min(request.num_computed + count, request.num_prompt - 1)
            if request.prompt_logprob_start is not None and first < last:
                rows = hidden[offset + first - request.num_computed : offset + last - request.num_computed]
                targets = self._tensor(request.ids[first + 1 : last + 1])
                for part, part_targets in zip(rows.split(_LOGIT_ROWS), targets.split(_LOGIT_ROWS), strict=True):
                    logprobs = torch.log_softmax(self._model.logits(part).float(), -1)
                    request.prompt_logprobs += logprobs.gather(1, part_targets[:, None])[:, 0].tolist()
            offset += count

    def _after_prefill(self, request: Request, count: int) -> None:
        request.num_computed += count
        if request.num_computed == len(request.ids):
            request.is_decoding = True
            request.kv.pool.promote(request.kv)
            self._keep(request)
            self._cache.drop_claim(request.claim)
            request.claim = None

    def _keep(self, request: Request) -> None:
        """Let others reuse what the request computed, unless older weights had a part in it."""
        if request.epoch != self._epoch:
            return
        blocks = self._cache.insert(request.ids, request.num_computed, request.namespace)
        self._store.save(request.kv, blocks)

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
