"""Options of the trainer `torch`, checked when they are made. No torch here: a plan reads them without loading it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from miles_rl.batch.layout import Layout
from miles_rl.loss.checks import OptionError, check_choice, check_number
from miles_rl.trainer.schedule import LrSchedule

DtypeName = Literal["float32", "bfloat16"]
DeviceName = Literal["auto", "cpu", "cuda"]
PARALLELISMS = ("data", "tensor", "pipeline", "context", "expert")


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """See `miles_rl.trainer.torch.TorchTrainer`. Raises `OptionError`, one line."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    grad_clip: float | None
    warmup_steps: int
    lr_schedule: LrSchedule
    schedule_steps: int | None
    max_tokens_per_micro_batch: int
    logprob_chunk_tokens: int
    layout: Layout
    dtype: DtypeName
    device: DeviceName
    num_threads: int | None
    seed: int
    optimizer_steps_per_batch: int
    temperature: float
    reference_model_dir: str | None

    def __post_init__(self) -> None:
        check_choice("trainer.lr_schedule", self.lr_schedule, get_args(LrSchedule))
        check_choice("trainer.layout", self.layout, get_args(Layout))
        check_choice("trainer.dtype", self.dtype, get_args(DtypeName))
        check_choice("trainer.device", self.device, get_args(DeviceName))
        check_number("trainer.lr", self.lr, low=0, above=True)
        for beta in self.betas:
            check_number("trainer.betas", beta, low=0, high=0.999999)
        check_number("trainer.weight_decay", self.weight_decay, low=0)
        check_number("trainer.grad_clip", self.grad_clip, low=0, above=True)
        check_number("trainer.warmup_steps", self.warmup_steps, low=0)
        check_number("trainer.temperature", self.temperature, low=0, above=True)
        check_number("trainer.seed", self.seed, low=0)
        for name in ("max_tokens_per_micro_batch", "logprob_chunk_tokens", "optimizer_steps_per_batch", "num_threads"):
            check_number(f"trainer.{name}", getattr(self, name), low=1)
        self._check_schedule()

    @property
    def total_optimizer_steps(self) -> int | None:
        """Length of a schedule that falls, in optimizer steps."""
        return None if self.schedule_steps is None else self.schedule_steps * self.optimizer_steps_per_batch

    def _check_schedule(self) -> None:
        if self.lr_schedule == "constant":
            return
        if self.total_optimizer_steps is None:
            raise OptionError(
                "trainer.schedule_steps", None, f"lr_schedule={self.lr_schedule} needs the number of steps"
            )
        check_number("trainer.schedule_steps", self.schedule_steps, low=1)
        if self.warmup_steps >= self.total_optimizer_steps:
            remedy = f"the schedule has only {self.total_optimizer_steps} optimizer steps: give fewer"
            raise OptionError("trainer.warmup_steps", self.warmup_steps, remedy)


def check_single_device(parallelism: Mapping[str, int], offload: Mapping[str, Any]) -> None:
    """Raise `OptionError` for a layout of several processes, or for an offload: this trainer has neither."""
    for name, size in parallelism.items():
        check_choice("parallelism", name, PARALLELISMS)
        if size != 1:
            raise OptionError(f"parallelism.{name}", size, "trainer=torch is one process on one device: give 1")
    for name, where in offload.items():
        check_choice("offload", name, ("optimizer",))
        if where != "none":
            raise OptionError(f"offload.{name}", where, "trainer=torch keeps it on its device: give none")
