"""Faults of the trainer: it dies, meets what is not finite, a full disk, or its weights are damaged on the way."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_rl.faults.strike import check_version, struck
from miles_rl.trainer.base import Trainer
from miles_rl.types import Batch

FULL_DEVICE = "/dev/full"


class TrainerFault:
    """Passes everything on to the trainer that it stands before. A subclass does one thing wrong."""

    stage = "trainer"

    def __init__(self, seed: int, at_version: int = 2) -> None:
        check_version(at_version)
        self.seed, self.at_version = seed, at_version
        self.inner: Trainer

    def install(self, component: Any) -> None:
        """See `Fault`."""
        self.inner, component.trainer = component.trainer, self

    def load(self, model_dir: str, checkpoint_dir: str | None) -> None:
        """See `Trainer`."""
        self.inner.load(model_dir, checkpoint_dir)

    def step(self, batch: Batch) -> Mapping[str, float]:
        """See `Trainer`."""
        return self.inner.step(batch)

    def export(self, target_dir: str) -> str:
        """See `Trainer`."""
        return self.inner.export(target_dir)

    def save(self, target_dir: str) -> None:
        """See `Trainer`."""
        self.inner.save(target_dir)

    def is_checkpoint(self, folder: str) -> bool:
        """Whether `folder` is the checkpoint that the fault is meant for."""
        return f"step-{self.at_version:06d}" in folder


class TrainerCrash(TrainerFault):
    """The process dies `delay_s` into the step that makes `at_version`."""

    def __init__(self, seed: int, at_version: int = 2, delay_s: float = 0.02) -> None:
        super().__init__(seed, at_version)
        self._delay_s = delay_s

    def step(self, batch: Batch) -> Mapping[str, float]:
        """See `Trainer`."""
        if batch.version + 1 == self.at_version:
            struck("the trainer dies in the middle of a step")
            threading.Timer(self._delay_s, _die).start()
        return self.inner.step(batch)


class NanGradient(TrainerFault):
    """In the step that makes `at_version`, one module's gradient is not a number."""

    def step(self, batch: Batch) -> Mapping[str, float]:
        """See `Trainer`."""
        if batch.version + 1 != self.at_version:
            return self.inner.step(batch)
        import torch

        def spoil(module: Any, grad_input: Any, grad_output: Any) -> Any:
            return tuple(None if grad is None else torch.full_like(grad, float("nan")) for grad in grad_input)

        struck("a gradient is not a number")
        hook = torch.nn.modules.module.register_module_full_backward_hook(spoil)
        try:
            return self.inner.step(batch)
        finally:
            hook.remove()


class CorruptedUpdate(TrainerFault):
    """One byte of the weights of `at_version`, drawn by `seed`, changes after their checksum was taken."""

    def export(self, target_dir: str) -> str:
        """See `Trainer`."""
        checksum = self.inner.export(target_dir)
        if Path(target_dir).name == f"v{self.at_version:06d}":
            victim = sorted(Path(target_dir).glob("*.safetensors"))[0]
            data = bytearray(victim.read_bytes())
            place = random.Random(self.seed).randrange(len(data) // 2, len(data))
            data[place] ^= 1
            victim.write_bytes(data)
            struck(f"byte {place} of {victim} is damaged")
        return checksum


class CheckpointKill(TrainerFault):
    """The process is killed between the files of the checkpoint of `at_version`."""

    def save(self, target_dir: str) -> None:
        """See `Trainer`."""
        if self.is_checkpoint(target_dir):
            struck("killed between two files of a checkpoint")
            _die()
        self.inner.save(target_dir)


class DiskFull(TrainerFault):
    """The disk has no room left for the trainer's state of `at_version`: every write of it meets ENOSPC, for real."""

    def save(self, target_dir: str) -> None:
        """See `Trainer`."""
        if self.is_checkpoint(target_dir):
            from miles_rl.trainer.checkpoint import STATE_FILE

            struck("the disk is full")
            for name in (STATE_FILE, f".{STATE_FILE}.tmp"):
                Path(target_dir, name).symlink_to(FULL_DEVICE)
        self.inner.save(target_dir)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
