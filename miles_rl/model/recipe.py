"""What determines a warm-started policy, and the key that stands for all of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from sandbox_env.suites.base import Demonstration

NUM_KEY_DEMONSTRATIONS = 8000
"""The key is read at every start of a run, so it takes a sample of the texts; any change of a family shows in it."""

RECIPE_VERSION = 1
"""Raise it when the way in which demonstrations become weights changes: every older warm start is then stale."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Shape of a dense Qwen3 model with tied embeddings. `context_length` in tokens."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int


@dataclass(frozen=True, slots=True)
class WarmStartOptions:
    """How the supervised stage learns: `num_demonstrations`, of which `mistake_rate` do not solve their task.

    The mistakes are what reinforcement learning is to remove: a policy that imitates them is right about as often
    as they are absent. `learning_rate` is the peak of one cycle.
    """

    num_demonstrations: int
    mistake_rate: float
    steps: int
    batch_size: int
    learning_rate: float
    seed: int

    def __post_init__(self) -> None:
        for name in ("num_demonstrations", "steps", "batch_size", "learning_rate"):
            if getattr(self, name) <= 0:
                raise ValueError(f"model.warm_start.{name}: {getattr(self, name)}; give more than 0")
        if not 0 <= self.mistake_rate <= 1:
            raise ValueError(f"model.warm_start.mistake_rate: {self.mistake_rate}; give 0 to 1")


def recipe_key(
    architecture: Architecture, vocab_size: int, options: WarmStartOptions, demonstrations: Iterable[Demonstration]
) -> str:
    """SHA-256 over everything that determines the policy, as 64 hex digits; `demonstrations` may be a sample."""
    digest = hashlib.sha256()
    shape = [RECIPE_VERSION, asdict(architecture), vocab_size, asdict(options)]
    digest.update(json.dumps(shape, sort_keys=True).encode())
    for demonstration in demonstrations:
        turns = [(turn.command, turn.observation, turn.exit_code) for turn in demonstration.turns]
        digest.update(json.dumps([demonstration.instruction, turns]).encode())
    return digest.hexdigest()
