"""Chooses tokens, and states how likely the model found them.

The log-probability is `log_softmax(logits / temperature)` at the chosen token over the whole vocabulary: after the
temperature, before top-k, top-p and min-p, as SGLang reports it. Greedy requests (temperature 0) report it at
temperature 1. Tokens are drawn by inverting the cumulative distribution with one uniform number of the request's own
generator, so that a seed gives the same tokens whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from miles_rl.engine.embedded.request import Request

_BLOCK = 64
_BELOW_ONE = 1.0 - 2.0**-52


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> tuple[list[int], list[float]]:
    """One token and its log-probability for each row of `logits` [N, V]. A row with a NaN gives a NaN."""
    logits = _ban(logits.float(), requests)
    if any(request.sampling.temperature != 1.0 for request in requests):
        temperatures = [request.sampling.temperature for request in requests]
        logits = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    largest = logits.amax(dim=-1, keepdim=True)
    weights = (logits - largest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    greedy = [request.sampling.top_k == 1 for request in requests]
    if all(greedy):
        tokens = logits.argmax(dim=-1, keepdim=True)
    else:
        tokens = _draw(_filtered(weights, total, requests), requests)
        if any(greedy):
            mask = torch.tensor(greedy, device=logits.device)[:, None]
            tokens = torch.where(mask, logits.argmax(dim=-1, keepdim=True), tokens)
    chosen = logits.gather(1, tokens) - largest - total.log()
    return tokens[:, 0].tolist(), chosen[:, 0].tolist()


def _ban(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Stop tokens cannot be drawn before `min_new_tokens`; the distribution is then over the others."""
    rows: list[int] = []
    columns: list[int] = []
    for index, request in enumerate(requests):
        if request.sampling.min_new_tokens > request.num_output:
            rows += [index] * len(request.sampling.banned_until_min)
            columns += request.sampling.banned_until_min
    if rows:
        logits = logits.clone()
        logits[rows, columns] = float("-inf")
    return logits


def _draw(weights: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """A column [N, 1] of each row of `weights` [N, V], with probability in proportion.

    First a block of columns, then one in it: of a large vocabulary only the sums of blocks are accumulated.
    """
    count, size = weights.shape
    blocks = F.pad(weights, (0, -size % _BLOCK)).view(count, -1, _BLOCK)
    # 52 bits keep a product below the total, so that a weight of 0 is never hit.
    uniforms = [request.rng.getrandbits(52) * 2.0**-52 for request in requests]
    uniform = torch.tensor(uniforms, dtype=torch.float64, device=weights.device)[:, None]
    sums = blocks.sum(dim=-1).double()
    block, rest = _invert(sums, uniform)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double()
    # The clamp is for rows with a NaN, whose tokens are thrown away.
    return (block * _BLOCK + _invert(inside, rest)[0]).clamp_(max=size - 1)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where `uniform` [N, 1] in [0, 1) falls among `weights` [N, M], and how far into that weight, in [0, 1)."""
    cumulative = weights.cumsum(dim=-1)
    target = uniform * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[-1] - 1)
    weight = weights.gather(1, index)
    rest = (target - cumulative.gather(1, index) + weight) / weight
    return index, rest.clamp_(0.0, _BELOW_ONE)


def _filtered(weights: torch.Tensor, total: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    rows = [index for index, request in enumerate(requests) if request.sampling.is_filtered]
    if rows:
        weights[rows] = _filter(weights[rows] / total[rows], [requests[index] for index in rows])
    return weights


def _filter(probs: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Zero what top-k, top-p and min-p leave out, each judged on the unfiltered distribution as in SGLang."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=probs.device)[:, None]

    ordered, order = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    ranks = torch.arange(probs.shape[-1], device=probs.device)[None]
    drop = before > column([request.sampling.top_p for request in requests])
    drop |= ranks >= column([request.sampling.top_k or probs.shape[-1] for request in requests])
    drop |= ordered < ordered[:, :1] * column([request.sampling.min_p for request in requests])
    ordered.masked_fill_(drop, 0.0)
    return torch.zeros_like(probs).scatter_(1, order, ordered)
