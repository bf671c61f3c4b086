"""Chooses tokens, and states how likely the model found them.

The log-probability is `log_softmax(logits / temperature)` at the chosen token over the whole vocabulary: after the
temperature, before top-k, top-p and min-p, as SGLang reports it. Greedy requests (temperature 0) report it at
temperature 1. Tokens are drawn by inverting the cumulative distribution with one uniform number of the request's own
generator, so that a seed gives the same tokens whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from miles_rl.engine.embedded.request import Request


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> tuple[list[int], list[float]]:
    """One token and its log-probability for each row of `logits` [N, V]. A row with a NaN gives a NaN."""
    logits = _ban(logits.float(), requests)
    if any(request.sampling.temperature != 1.0 for request in requests):
        temperatures = [request.sampling.temperature for request in requests]
        logits = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    greedy = [request.sampling.top_k == 1 for request in requests]
    if all(greedy):
        tokens = logprobs.argmax(dim=-1, keepdim=True)
    else:
        tokens = _draw(logprobs, requests)
        if any(greedy):
            mask = torch.tensor(greedy, device=logits.device)[:, None]
            tokens = torch.where(mask, logprobs.argmax(dim=-1, keepdim=True), tokens)
    chosen = logprobs.gather(1, tokens)
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


def _draw(logprobs: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    probs = logprobs.exp()
    filtered = [index for index, request in enumerate(requests) if request.sampling.is_filtered]
    if filtered:
        probs[filtered] = _filter(probs[filtered], [requests[index] for index in filtered])
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    # 52 bits keep the product below the total, so a token with probability 0 is never hit.
    uniforms = [request.rng.getrandbits(52) * 2.0**-52 for request in requests]
    targets = torch.tensor(uniforms, dtype=torch.float64, device=probs.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).clamp_(max=probs.shape[-1] - 1)


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
