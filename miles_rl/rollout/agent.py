"""How the agent plays an episode: sampling, token budgets, turns and clocks. The same in training and evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sandbox_env.episode import EpisodeLimits

CLOCKS = ("wall_clock_s", "command_timeout_s", "request_timeout_s", "lease_timeout_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """Options of the agent. Tokens are counted over the whole conversation for `session_tokens`, per reply for
    `turn_tokens`. `wall_clock_s` runs from the moment the sandbox is ready. `ValueError` for impossible values.
    """

    temperature: float
    top_p: float
    top_k: int
    turn_tokens: int
    session_tokens: int
    max_turns: int
    wall_clock_s: float
    command_timeout_s: float
    observation_chars: int
    request_timeout_s: float
    lease_timeout_s: float
    seed: int
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        for name in ("turn_tokens", "session_tokens", "max_turns", "observation_chars", *CLOCKS):
            if getattr(self, name) <= 0:
                raise ValueError(f"rollout.agent.{name}: {getattr(self, name)}; give more than 0")
        if self.temperature <= 0:
            raise ValueError(f"rollout.agent.temperature: {self.temperature}; give more than 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"rollout.agent.top_p: {self.top_p}; give a value above 0 and at most 1")

    @property
    def limits(self) -> EpisodeLimits:
        """The bounds that the episode itself enforces."""
        return EpisodeLimits(self.max_turns, self.wall_clock_s, self.command_timeout_s, self.observation_chars)

    def sampling_params(self, request_id: str, max_new_tokens: int, stop_token_ids: list[int]) -> Mapping[str, Any]:
        """The `sampling_params` of one request: the same seed, request and weights give the same reply."""
        digest = hashlib.sha256(f"{self.seed}/{request_id}".encode()).digest()
        return {
            "sampling_seed": int.from_bytes(digest[:4], "big") >> 1,
            "max_new_tokens": max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop_token_ids": stop_token_ids,
        }

    def messages(self, instruction: str) -> list[dict[str, str]]:
        """The conversation that opens an episode."""
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": instruction.strip()}]
