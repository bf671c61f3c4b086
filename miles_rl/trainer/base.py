"""The trainer contract: who turns a batch into new weights. One class and one YAML in `conf/trainer` add one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from miles_rl.types import Batch


class Trainer(Protocol):
    """Holds weights and optimizer of one policy. Methods block; the loop calls them in a thread."""

    def load(self, model_dir: str, checkpoint_dir: str | None) -> None:
        """Read the Hugging Face folder `model_dir`; with `checkpoint_dir` also optimizer, scheduler and RNG from it.

        Raises `FileNotFoundError` or `ValueError` naming what is missing or does not fit.
        """
        ...

    def step(self, batch: Batch) -> Mapping[str, float]:
        """One optimizer step. Returns metrics under their full names (`train/loss`, `train/grad_norm`, ...)."""
        ...

    def export(self, target_dir: str) -> str:
        """Write the weights as a Hugging Face folder; returns their checksum (`miles_rl.weights.checksum`)."""
        ...

    def save(self, target_dir: str) -> None:
        """Write optimizer, scheduler and RNG state beside an `export` of the same weights."""
        ...
