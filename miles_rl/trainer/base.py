"""The trainer contract: who turns a batch into new weights. One class and one YAML in `conf/trainer` add one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from miles_rl.types import Batch

SHOWN_SAMPLES = 8


class NonFiniteError(ArithmeticError):
    """A loss or a gradient is not finite. The weights are as before the optimizer step; `sample_ids` were in it."""

    def __init__(self, metric: str, value: float, sample_ids: Sequence[str]) -> None:
        self.metric, self.value, self.sample_ids = metric, value, tuple(sample_ids)
        shown = ", ".join(self.sample_ids[:SHOWN_SAMPLES])
        more = len(self.sample_ids) - SHOWN_SAMPLES
        ending = f" and {more} more" if more > 0 else ""
        super().__init__(f"trainer: {metric} is {value}; the step was not taken; samples in it: {shown}{ending}")

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[str, float, tuple[str, ...]]]:
        return type(self), (self.metric, self.value, self.sample_ids)


class Trainer(Protocol):
    """Holds weights and optimizer of one policy. Methods block; the loop calls them in a thread."""

    def load(self, model_dir: str, checkpoint_dir: str | None) -> None:
        """Read the Hugging Face folder `model_dir`; with `checkpoint_dir` also optimizer, scheduler and RNG from it.

        Raises `FileNotFoundError` or `ValueError` naming what is missing or does not fit.
        """
        ...

    def step(self, batch: Batch) -> Mapping[str, float]:
        """Learn from one batch. Returns metrics under their full names (`train/loss`, `train/grad_norm`, ...).

        Raises `NonFiniteError` when a loss or a gradient is not finite, `ValueError` for a batch it cannot use.
        """
        ...

    def export(self, target_dir: str) -> str:
        """Write the weights as a Hugging Face folder; returns their checksum (`miles_rl.weights.checksum`).

        The checksum is over the tensors as they stand in the safetensors files, under their names there: a tied
        head, which is stored once, counts once.
        """
        ...

    def save(self, target_dir: str) -> None:
        """Write optimizer, scheduler and RNG state beside an `export` of the same weights."""
        ...
