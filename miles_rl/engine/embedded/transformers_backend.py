"""Any causal language model of transformers, one sequence at a time: slower, and right for every architecture.

Each request has the cache object that the model itself makes. A finished request's cache is kept whole and handed to
the first request whose ids extend it, which takes it over: that holds for recurrent and sliding-window states too,
which cannot be cut. A model without a cache is computed anew for every token.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from miles_rl.engine.embedded.backend import Admission, CacheFigures, StepOutput
from miles_rl.engine.embedded.request import Request
from miles_rl.engine.embedded.weights import (
    WeightsError,
    choose_dtype,
    context_length,
    eos_token_ids,
    read_config,
    read_tensors,
)
from miles_rl.weights.checksum import checksum

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class StagedModel:
    """A model with new weights; `file_checksum` is set if its own tensors are not those of its files."""

    model: PreTrainedModel
    names: tuple[str, ...]
    file_checksum: str | None


@dataclass(slots=True)
class _State:
    """Cache of one running request; None before the first pass and for models without one."""

    cache: Any = None


@dataclass(slots=True)
class _Kept:
    """Caches of finished sequences by namespace and ids, oldest first, at most `max_tokens` in all."""

    max_tokens: int
    num_tokens: int = 0
    entries: OrderedDict[tuple[str, tuple[int, ...]], Any] = field(default_factory=OrderedDict)

    def put(self, namespace: str, ids: Sequence[int], cache: Any) -> None:
        self.take(namespace, ids, len(ids), whole=True)
        self.entries[namespace, tuple(ids)] = cache
        self.num_tokens += len(ids)
        while self.num_tokens > self.max_tokens:
            (_, oldest), _ = self.entries.popitem(last=False)
            self.num_tokens -= len(oldest)

    def take(self, namespace: str, ids: Sequence[int], limit: int, whole: bool = False) -> tuple[int, Any]:
        """Remove and return the longest kept sequence that begins `ids[:limit]`, as (its length, its cache)."""
        fits = [
            key
            for key in self.entries
            if key[0] == namespace and len(key[1]) <= limit and key[1] == tuple(ids[: len(key[1])])
        ]
        best = max(fits, key=lambda key: len(key[1]), default=None)
        if best is None or (whole and len(best[1]) != limit):
            return 0, None
        self.num_tokens -= len(best[1])
        return len(best[1]), self.entries.pop(best)

    def clear(self) -> None:
        self.entries.clear()
        self.num_tokens = 0


class TransformersBackend:
    """Implements `Backend`. Options as for `Qwen3Backend`; sizes of keys and values are estimates here."""

    deterministic = False

    def __init__(
        self,
        model_dir: str,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        max_context: int | None = None,
        running_kv_gib: float = 1.0,
        prefix_cache_gib: float = 0.25,
    ) -> None:
        transformers_logging.disable_progress_bar()
        raw = read_config(model_dir)
        try:
            self._config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
            with torch.device("meta"):
                self._class = type(AutoModelForCausalLM.from_config(self._config))
        except (ValueError, KeyError, OSError) as error:
            raise WeightsError(f"{model_dir}: transformers knows no causal language model for it: {error}") from error
        text: Mapping[str, Any] = self._config.get_text_config().to_dict()
        self._dtype, self._device = choose_dtype(dtype, {**text, **raw}), torch.device(device)
        self.vocab_size = int(text["vocab_size"])
        self.eos_token_ids = eos_token_ids(model_dir, {**text, **raw})
        bytes_per_token = _bytes_per_token(text, self._dtype)
        self._max_running_tokens = int(running_kv_gib * _GIB / bytes_per_token)
        self.context_length = min(context_length({**text, **raw}), max_context or 1 << 30, self._max_running_tokens)
        self._kept = _Kept(int(prefix_cache_gib * _GIB / bytes_per_token))
        self._running: list[Request] = []
        self._epoch = 0
        parameters = inspect.signature(self._class.forward).parameters
        self._has_cache = "past_key_values" in parameters
        self._keeps_logits = "logits_to_keep" in parameters
        self._staged = self.stage(model_dir)

    def admit(self, request: Request) -> Admission:
        """See `Backend`."""
        if sum(r.num_reserved for r in self._running) + request.num_reserved > self._max_running_tokens:
            return Admission.FULL
        limit = len(request.ids) - 1
        if request.prompt_logprob_start is not None:
            limit = min(limit, request.prompt_logprob_start)
        request.num_computed, cache = self._kept.take(request.namespace, request.ids, limit)
        request.kv, request.epoch = _State(cache), self._epoch
        self._running.append(request)
        return Admission.ADMITTED

    @torch.inference_mode()
    def forward(self, prefill: Sequence[tuple[Request, int]]) -> StepOutput:
        """See `Backend`."""
        work = [(request, 1) for request in self._running if request.is_decoding]
        requests: list[Request] = []
        logits: list[torch.Tensor] = []
        for request, count in [*work, *prefill]:
            output = self._pass(request, count)
            request.num_computed += count
            if request.num_computed == len(request.ids):
                request.is_decoding = True
                requests.append(request)
                logits.append(output[-1:])
        empty = torch.empty((0, self.vocab_size), device=self._device)
        return StepOutput(requests, torch.cat(logits) if logits else empty)

    def release(self, request: Request) -> None:
        """See `Backend`."""
        self._running.remove(request)
        if request.epoch == self._epoch and request.kv.cache is not None:
            self._kept.put(request.namespace, request.ids[: request.num_computed], request.kv.cache)
        request.kv, request.is_decoding = None, False

    def clear_cache(self) -> None:
        """See `Backend`."""
        self._kept.clear()

    def cache_figures(self) -> CacheFigures:
        """See `Backend`."""
        return CacheFigures(self._kept.num_tokens, self._kept.max_tokens)

    def stage(self, model_dir: str) -> StagedModel:
        """See `Backend`. Both sets of weights are in memory until `install`."""
        tensors = read_tensors(model_dir)
        try:
            model, info = self._class.from_pretrained(
                None, config=self._config, state_dict=dict(tensors), dtype=self._dtype, output_loading_info=True
            )
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise WeightsError(f"{model_dir}: {error}") from error
        for problem in ("missing_keys", "mismatched_keys"):
            if info[problem]:
                raise WeightsError(f"{model_dir}: {problem.replace('_', ' ')}: {sorted(map(str, info[problem]))[:3]}")
        model = model.to(self._device).eval()
        own = model.state_dict()
        # Some architectures merge tensors while loading; what the files held is then all that has a checksum.
        same = all(name in own and own[name].shape == tensor.shape for name, tensor in tensors.items())
        return StagedModel(model, tuple(tensors), None if same else checksum(tensors.items()))

    def install(self, staged: StagedModel) -> None:
        """See `Backend`."""
        self._staged = staged
        self._epoch += 1
        self.clear_cache()

    def checksum(self) -> str:
        """See `Backend`."""
        if self._staged.file_checksum is not None:
            return self._staged.file_checksum
        own = self._staged.model.state_dict()
        return checksum((name, own[name]) for name in self._staged.names)

    def _pass(self, request: Request, count: int) -> torch.Tensor:
        """Logits of the last of `count` new tokens, or of all where prompt log-probabilities are wanted: [n, V]."""
        start = request.num_computed
        scored = request.prompt_logprob_start is not None and start < request.num_prompt
        if self._has_cache:
            ids = request.ids[start : start + count]
            options: dict[str, Any] = {"use_cache": True, "past_key_values": request.kv.cache}
        else:
            ids, options = request.ids[: start + count], {}
        if self._keeps_logits and not scored:
            options["logits_to_keep"] = 1
        output = self._staged.model(input_ids=torch.tensor([ids], device=self._device), **options)
        if self._has_cache:
            request.kv.cache = output.past_key_values
        logits = output.logits[0, -count:]
        if scored:
            self._score_prompt(request, logits, start, count)
        return logits

    def _score_prompt(self, request: Request, logits: torch.Tensor, start: int, count: int) -> None:
        first = max(start, request.prompt_logprob_start or 0)
        last = min(start + count, request.num_prompt - 1)
        if first < last:
            logprobs = torch.log_softmax(logits[first - start : last - start].float(), -1)
            targets = torch.tensor(request.ids[first + 1 : last + 1], device=self._device)
            request.prompt_logprobs += logprobs.gather(1, targets[:, None])[:, 0].tolist()


def _bytes_per_token(config: Mapping[str, Any], dtype: torch.dtype) -> int:
    """Keys and values of one token, if the model is an ordinary transformer."""
    heads = config.get("num_attention_heads") or config.get("n_head") or 1
    hidden = config.get("hidden_size") or config.get("n_embd") or 1
    layers = config.get("num_hidden_layers") or config.get("n_layer") or 1
    kv_heads = config.get("num_key_value_heads") or heads
    return max(1, 2 * layers * kv_heads * (config.get("head_dim") or hidden // heads) * dtype.itemsize)
