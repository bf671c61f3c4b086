"""The trainer `torch`: any causal language model of transformers, in one process, on the CPU or one GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miles_rl.batch.layout import Layout
from miles_rl.loss.base import Loss
from miles_rl.trainer.options import DeviceName, DtypeName, TorchOptions, check_single_device
from miles_rl.trainer.schedule import LrSchedule
from miles_rl.types import Batch

if TYPE_CHECKING:
    from miles_rl.trainer.session import TorchSession


class TorchTrainer:
    """AdamW on a `Loss`; see `miles_rl.trainer.base.Trainer`, and `conf/trainer/torch.yaml` for the options.

    `lr` is the peak rate; `warmup_steps` are optimizer steps, `schedule_steps` batches. `grad_clip` bounds the norm of
    the gradient, None is off. `max_tokens_per_micro_batch` is what a micro-batch should hold (one longer trajectory has
    its own); the result does not depend on it, nor on `layout`. At most `logprob_chunk_tokens` rows of logits exist
    at a time. With `dtype` bfloat16 the weights stay float32 here, products are taken in bfloat16 and the export is
    bfloat16. `optimizer_steps_per_batch` above 1 splits a batch, drawn anew each time. `temperature` is that of the
    rollouts: log-probabilities are after it. The reference of `loss.kl_coef` is `reference_model_dir`, or the model
    that the run started from. `num_threads` None leaves torch's own number.

    Making one checks the options and loads nothing. Raises `OptionError`, one line.
    """

    def __init__(
        self,
        loss: Loss,
        *,
        parallelism: Mapping[str, int],
        offload: Mapping[str, Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.98),
        weight_decay: float = 0.0,
        grad_clip: float | None = 1.0,
        warmup_steps: int = 0,
        lr_schedule: LrSchedule = "constant",
        schedule_steps: int | None = None,
        max_tokens_per_micro_batch: int = 1024,
        logprob_chunk_tokens: int = 1024,
        layout: Layout = "padded",
        dtype: DtypeName = "float32",
        device: DeviceName = "auto",
        num_threads: int | None = None,
        seed: int = 0,
        optimizer_steps_per_batch: int = 1,
        temperature: float = 1.0,
        reference_model_dir: str | None = None,
    ) -> None:
        check_single_device(parallelism, offload)
        self._loss = loss
        self._options = TorchOptions(
            lr=lr,
            betas=(betas[0], betas[1]),
            weight_decay=weight_decay,
            grad_clip=grad_clip,
            warmup_steps=warmup_steps,
            lr_schedule=lr_schedule,
            schedule_steps=schedule_steps,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            logprob_chunk_tokens=logprob_chunk_tokens,
            layout=layout,
            dtype=dtype,
            device=device,
            num_threads=num_threads,
            seed=seed,
            optimizer_steps_per_batch=optimizer_steps_per_batch,
            temperature=temperature,
            reference_model_dir=reference_model_dir,
        )
        self._session: TorchSession | None = None

    def load(self, model_dir: str, checkpoint_dir: str | None) -> None:
        """Read the weights; with `checkpoint_dir` go on from there, else seed every generator of this process.

        The checkpoint must have been saved beside just these weights: its checksum of them is compared.
        """
        from miles_rl.trainer.session import TorchSession  # torch and transformers, seconds to import

        self._session = TorchSession(self._loss, self._options, model_dir, checkpoint_dir)

    def step(self, batch: Batch) -> Mapping[str, float]:
        """Learn from one batch, in `optimizer_steps_per_batch` steps of the optimizer."""
        return self._loaded().step(batch)

    def export(self, target_dir: str) -> str:
        """Write the weights; the engine computes the same checksum over the tensors of the file that it loaded."""
        return self._loaded().export(target_dir)

    def save(self, target_dir: str) -> None:
        """Write `trainer_state.pt` into `target_dir`, which may be the folder of the export or another one."""
        self._loaded().save(target_dir)

    def _loaded(self) -> TorchSession:
        if self._session is None:
            raise RuntimeError("trainer: used before load")
        return self._session
