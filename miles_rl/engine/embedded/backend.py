"""What the engine's core asks of a model, whichever way it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from miles_rl.engine.embedded.request import Request


class Admission(Enum):
    """Answer to a request that wants to run."""

    ADMITTED = "admitted"
    FULL = "full"
    """No room: neither this one nor, to be fair, those behind it."""
    LATER = "later"
    """Another request is computing the same prefix; those behind it may go ahead."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Logits [N, vocab_size] of the next token of each of `requests` [N]; on the model's device, any float dtype."""

    requests: list[Request]
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """How full the prefix cache is, in tokens."""

    num_used_tokens: int
    max_tokens: int


class Backend(Protocol):
    """One model and the keys and values of its sequences. Only the model thread calls it, except `stage`."""

    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]
    deterministic: bool
    """Whether a reply's bits depend on the weights, its own request and its seed alone, whatever else runs."""

    def admit(self, request: Request) -> Admission:
        """Give the request a place and what the prefix cache has of it; unless admitted, ask again later."""
        ...

    def forward(self, prefill: Sequence[tuple[Request, int]]) -> StepOutput:
        """One pass over the last token of every decoding request and the next n tokens of each `(request, n)`.

        Requests whose prompt is complete after it are decoding from then on, and are in the output.
        """
        ...

    def release(self, request: Request) -> None:
        """Take the place back. What was computed may serve later requests, if the weights in force computed all."""
        ...

    def clear_cache(self) -> None:
        """Forget every reusable key and value; running requests keep theirs."""
        ...

    def cache_figures(self) -> CacheFigures:
        """How full the prefix cache is."""
        ...

    def stage(self, model_dir: str) -> Any:
        """Read and check new weights beside the ones in force; any thread. Raises `WeightsError`."""
        ...

    def install(self, staged: Any) -> None:
        """Put staged weights in force at once. Running requests keep their keys and values; no other ever gets them."""
        ...

    def checksum(self) -> str:
        """Checksum of the weights in force (`miles_rl.weights.checksum`), under the names in their files."""
        ...
