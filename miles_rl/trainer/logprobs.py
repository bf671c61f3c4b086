"""Log-probabilities of chosen tokens without the logits of a whole batch.

The logits of n tokens over a vocabulary of V are n x V numbers in float32: 60 GiB for a long batch of a large model,
more than all the rest of a step. Here at most `chunk_tokens` rows of them exist at a time; the backward pass computes
each chunk again instead of keeping it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """How hidden states become logits: softcap(scale * (h W' + b)) / temperature, the product in `compute_dtype`."""

    chunk_tokens: int
    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None
    compute_dtype: torch.dtype = torch.float32


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    spec: HeadSpec,
    *,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability [n] of `targets` [n] and entropy [n] in nats, float32, of `hidden` [n, D] under W [V, D], b [V].

    Both are after the temperature. Differentiable in `hidden`, `weight` and `bias`; the entropy only if asked for.
    """
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, bias, targets, spec, entropy_gradient)  # pyright: ignore[reportGeneralTypeIssues]
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        spec: HeadSpec,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cast = weight.to(spec.compute_dtype)
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs = hidden.new_empty(len(hidden), dtype=dtype)
        entropy = hidden.new_empty(len(hidden), dtype=dtype)
        for start in range(0, len(hidden), spec.chunk_tokens):
            chunk = slice(start, start + spec.chunk_tokens)
            log_softmax = _scaled(_capped(_logits(hidden[chunk], cast, bias, spec), spec), spec)
            logprobs[chunk] = log_softmax.gather(-1, targets[chunk, None])[:, 0]
            entropy[chunk] = _entropy(log_softmax.exp(), log_softmax)
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.spec, ctx.entropy_gradient = spec, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        spec: HeadSpec = ctx.spec
        cast = weight.to(spec.compute_dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        for start in range(0, len(hidden), spec.chunk_tokens):
            chunk = slice(start, start + spec.chunk_tokens)
            grad_entropy = grads[1][chunk, None] if ctx.entropy_gradient else None
            grad = _grad_logits(hidden[chunk], cast, bias, targets[chunk], grads[0][chunk, None], grad_entropy, spec)
            grad = grad.to(spec.compute_dtype)
            grad_hidden[chunk] = grad @ cast
            grad_weight += grad.T @ hidden[chunk].to(spec.compute_dtype)
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, spec: HeadSpec) -> torch.Tensor:
    cast_bias = None if bias is None else bias.to(spec.compute_dtype)
    logits = functional.linear(hidden.to(spec.compute_dtype), weight, cast_bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits if spec.scale == 1 else logits.mul_(spec.scale)


def _capped(logits: torch.Tensor, spec: HeadSpec) -> torch.Tensor:
    return logits if spec.softcap is None else logits.div_(spec.softcap).tanh_().mul_(spec.softcap)


def _scaled(logits: torch.Tensor, spec: HeadSpec) -> torch.Tensor:
    return torch.log_softmax(logits if spec.temperature == 1 else logits / spec.temperature, dim=-1)


def _entropy(softmax: torch.Tensor, log_softmax: torch.Tensor) -> torch.Tensor:
    return -torch.linalg.vecdot(softmax, log_softmax)


def _grad_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    grad_logprobs: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    spec: HeadSpec,
) -> torch.Tensor:
    """Gradient [c, V] of what the head's product gave: of log p it is onehot - p, of the entropy -p (log p + H)."""
    capped = _capped(_logits(hidden, weight, bias, spec), spec)
    log_softmax = _scaled(capped, spec)
    grad = log_softmax.exp()
    if grad_entropy is None:
        grad.mul_(-grad_logprobs)
    else:
        entropy = _entropy(grad, log_softmax)[:, None]
        grad.mul_(log_softmax.add_(entropy).mul_(-grad_entropy).sub_(grad_logprobs))
    grad.scatter_add_(-1, targets[:, None], grad_logprobs)
    if spec.softcap is not None:
        grad.mul_(1 - (capped / spec.softcap).square())
    factor = spec.scale / spec.temperature
    return grad if factor == 1 else grad.mul_(factor)
