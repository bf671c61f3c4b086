"""One request through its life: waiting, prefilling, decoding, finished."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_unseeded = random.Random()
"""Numbers for all requests without a seed, from the system's entropy."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Names and meanings are SGLang's; greedy decoding is `top_k` 1 at temperature 1."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 for the whole vocabulary."""
    min_p: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()
    """The model's own end-of-text ids included, unless the caller ignores them."""
    banned_until_min: frozenset[int] = frozenset()
    """Ids that get probability 0 until `min_new_tokens` are there."""
    min_new_tokens: int = 0
    seed: int | None = None

    @property
    def is_filtered(self) -> bool:
        """Whether sampling drops a part of the distribution."""
        return self.top_p < 1.0 or self.min_p > 0.0 or self.top_k > 1


@dataclass(slots=True, eq=False)
class Request:
    """The state of one sequence. Owned by the model thread from submission until `finish_reason` is set.

    `ids` are the prompt and what was generated; the keys and values of `ids[:num_computed]` are in the cache.
    `epoch` counts weight updates and says which weights computed them: if it is not the present one, they are not
    given to other requests.
    """

    rid: str
    ids: list[int]
    sampling: SamplingParams
    namespace: str = ""
    prompt_logprob_start: int | None = None
    """Position from which log-probabilities of the prompt are wanted; None for none."""
    listener: Callable[[Request], None] | None = None
    """Called after the request has progressed (if it streams) or finished; never on the model thread."""
    streams: bool = False

    num_prompt: int = 0
    num_computed: int = 0
    num_cached: int = 0
    num_retractions: int = 0
    epoch: int = -1
    is_decoding: bool = False
    kv: Any = None
    """The backend's own record of where the keys and values are."""
    claim: Any = None
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    finish_reason: dict[str, Any] | None = None
    error: str | None = None
    rng: random.Random = _unseeded
    created_s: float = field(default_factory=time.monotonic)
    finished_s: float = 0.0

    def __post_init__(self) -> None:
        self.num_prompt = len(self.ids)
        if self.sampling.seed is not None:
            self.rng = random.Random(self.sampling.seed)

    @property
    def num_output(self) -> int:
        """Number of generated tokens."""
        return len(self.ids) - self.num_prompt

    @property
    def num_reserved(self) -> int:
        """The most tokens that the sequence can come to hold."""
        return self.num_prompt + self.sampling.max_new_tokens

    def append(self, token: int, logprob: float, version: str) -> None:
        """Take one sampled token and decide whether it ends the request."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.sampling.stop_token_ids:
            self.finish({"type": "stop", "matched": token})
        elif self.num_output >= self.sampling.max_new_tokens:
            self.finish({"type": "length", "length": self.num_output})

    def finish(self, reason: dict[str, Any]) -> None:
        """End it; what was generated so far stands."""
        self.finish_reason = reason
        self.finished_s = time.monotonic()

    def abort(self, message: str) -> None:
        """End it because somebody asked for that."""
        self.finish({"type": "abort", "message": message, "status_code": None, "err_type": None})

    def fail(self, message: str) -> None:
        """End it because the engine could not go on with it: the caller gets an error, not a result."""
        self.error = message
        self.finish({"type": "abort", "message": message, "status_code": 500, "err_type": "InternalServerError"})

    def version_spans(self) -> list[dict[str, Any]]:
        """Runs of output tokens by the version of the weights that sampled them, as SGLang's `weight_versions`."""
        spans: list[dict[str, Any]] = []
        for index, version in enumerate(self.versions):
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": index, "end": index})
            spans[-1]["end"] = index + 1
        return spans
