"""A causal language model of transformers, as the trainer uses it: token ids in, log-probabilities of tokens out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from miles_rl.batch.micro_batch import MicroBatch
from miles_rl.trainer.logprobs import HeadSpec, token_logprobs

PROBE_TOKENS = 8
PROBE_TOLERANCE = 1e-4


class PolicyModel:
    """Weights in float32; with `compute_dtype` bfloat16 the products are taken in bfloat16 (autocast).

    The model is in evaluation mode for training too: dropout would make its log-probabilities differ from those of
    the engine that sampled. Raises `FileNotFoundError` if `model_dir` is no Hugging Face folder, `ValueError` if the
    architecture computes its logits in a way that the chunked head does not know.
    """

    def __init__(
        self,
        model_dir: str,
        *,
        device: torch.device,
        compute_dtype: torch.dtype,
        temperature: float,
        chunk_tokens: int,
        trainable: bool = True,
    ) -> None:
        if not (Path(model_dir) / "config.json").is_file():
            raise FileNotFoundError(f"trainer: {model_dir} is no Hugging Face folder: it has no config.json")
        transformers.utils.logging.disable_progress_bar()  # the run has a display of its own
        module: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
        self.module: Any = module.to(device).eval().requires_grad_(trainable)
        self.source_dir = Path(model_dir)
        self.device = device
        self._compute_dtype = compute_dtype
        self._head: nn.Linear = self.module.get_output_embeddings()
        self._spec = _head_spec(self.module.config, chunk_tokens, temperature, compute_dtype)
        self._probe()

    def logprobs(self, micro_batch: MicroBatch, *, entropy_gradient: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy [n] of each policy token of `micro_batch`, in the order of its `targets`."""
        with self._autocast():
            hidden = self._hidden(micro_batch.input_ids, micro_batch.position_ids)
        return token_logprobs(  # outside autocast, which would take sums over the vocabulary in bfloat16
            hidden[micro_batch.lines, micro_batch.columns],
            self._head.weight,
            self._head.bias,
            micro_batch.targets,
            self._spec,
            entropy_gradient=entropy_gradient,
        )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, under its name; a tied head goes by the name of the embedding."""
        yield from self.module.named_parameters()

    def _hidden(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
        extra = {} if position_ids is None else {"position_ids": position_ids}
        return self.module.base_model(input_ids=input_ids, use_cache=False, **extra).last_hidden_state

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._compute_dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._compute_dtype)

    @torch.no_grad()
    def _probe(self) -> None:
        """Compare the head of our own with the model's logits on a few tokens: an unknown scaling must not pass."""
        ids = torch.arange(PROBE_TOKENS, device=self.device)[None] % self.module.config.get_text_config().vocab_size
        logits = self.module(input_ids=ids, use_cache=False).logits[0].float()
        expected = torch.log_softmax(logits / self._spec.temperature, dim=-1)
        spec = HeadSpec(PROBE_TOKENS, self._spec.temperature, self._spec.scale, self._spec.softcap)
        hidden, targets = self._hidden(ids, None)[0], expected.argmax(dim=-1)
        got, _ = token_logprobs(hidden, self._head.weight, self._head.bias, targets, spec)
        error = float((got - expected.gather(-1, targets[:, None])[:, 0]).abs().max())
        if not error <= PROBE_TOLERANCE:
            raise ValueError(
                f"trainer: {type(self.module).__name__} computes its logits in a way that the chunked head does not"
                f" know (log-probabilities off by {error:.2g}); give another model"
            )


def _head_spec(config: Any, chunk_tokens: int, temperature: float, compute_dtype: torch.dtype) -> HeadSpec:
    text = config.get_text_config()
    scale = float(getattr(text, "logit_scale", None) or 1.0) / float(getattr(text, "logits_scaling", None) or 1.0)
    softcap = getattr(text, "final_logit_softcapping", None)
    return HeadSpec(chunk_tokens, temperature, scale, None if softcap is None else float(softcap), compute_dtype)
