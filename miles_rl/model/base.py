"""The policy contract: where the first weights come from. One class here and one YAML in `conf/model` add a source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sandbox_env.suites.base import Suite

Progress = Callable[[int, int, float], None]
"""Called with `step, steps, loss` while a policy is being trained."""


class PolicySource(Protocol):
    """Names the folder that a run starts from. Constructed from config."""

    def prepare(self, suite: Suite, progress: Progress | None = None) -> str:
        """A Hugging Face folder with config, weights, and a tokenizer with a chat template; made first if need be.

        Blocks, for minutes if it has to train. `suite` gives demonstrations to those that learn from them. Raises
        `ValueError` of one line naming the config path and the remedy.
        """
        ...
