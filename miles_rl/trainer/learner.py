"""One training step: micro-batches through the model, the loss on their policy tokens, the optimizer.

Groups are normalised once per batch; the denominators of the loss are counted once per optimizer step; micro-batches
only add up. Two things that cannot change the result are left out: tokens after the last policy token of a trajectory,
and the backward pass of trajectories whose advantages are all 0 where the loss says that these are constants.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from miles_rl.batch.micro_batch import MicroBatch, split
from miles_rl.batch.rows import Rows
from miles_rl.loss.base import Denominators, Loss, LossOutput, PolicyTokens
from miles_rl.loss.checks import OptionError
from miles_rl.trainer.base import NonFiniteError
from miles_rl.trainer.options import TorchOptions
from miles_rl.trainer.policy_model import PolicyModel
from miles_rl.trainer.schedule import lr_factor
from miles_rl.trainer.step_metrics import batch_metrics, token_metrics
from miles_rl.types import Batch


@dataclass(frozen=True, slots=True, eq=False)
class _BatchValues:
    """What is known of a batch before the first optimizer step, [B, P] each, on the model's device."""

    advantages: torch.Tensor
    rollout_logprobs: torch.Tensor
    old_logprobs: torch.Tensor | None
    reference_logprobs: torch.Tensor | None


class Learner:
    """Holds the model and its AdamW. Weight decay is for matrices only, not for norms and biases."""

    def __init__(self, model: PolicyModel, loss: Loss, options: TorchOptions, reference: PolicyModel | None) -> None:
        self.model = model
        self.num_batches = 0
        self.num_optimizer_steps = 0
        self._loss, self._options, self._reference = loss, options, reference
        self._shuffle = torch.Generator().manual_seed(options.seed)
        self._parameters = dict(model.named_parameters())
        decayed = [p for p in self._parameters.values() if p.ndim >= 2]
        plain = [p for p in self._parameters.values() if p.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": options.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, fused=True)

    def step(self, batch: Batch) -> dict[str, float]:
        """See `miles_rl.trainer.base.Trainer.step`."""
        start = time.perf_counter()
        rows = Rows.of(batch.trajectories)
        values = self._values(rows)
        per_token: dict[str, list[torch.Tensor]] = defaultdict(list)
        steps = [self._optimizer_step(rows, part, values, per_token) for part in self._parts(len(rows.inputs))]
        self.num_batches += 1
        metrics = {
            "train/loss": sum(s["loss"] for s in steps) / len(steps),
            "train/grad_norm": sum(s["grad_norm"] for s in steps) / len(steps),
            "train/lr": steps[-1]["lr"],
        }
        metrics |= token_metrics({name: torch.cat(parts) for name, parts in per_token.items()})
        metrics |= batch_metrics(batch, rows.rewards, rows.groups)
        metrics["perf/train_s"] = time.perf_counter() - start
        return metrics

    def state(self) -> dict[str, Any]:
        """Everything but the weights that the next step depends on."""
        moments = {name: dict(self._optimizer.state.get(p, {})) for name, p in self._parameters.items()}
        return {
            "num_batches": self.num_batches,
            "num_optimizer_steps": self.num_optimizer_steps,
            "moments": moments,
            "shuffle": self._shuffle.get_state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. Options (rates, betas, decay) stay those of this run. Raises `ValueError`."""
        moments: Mapping[str, Mapping[str, torch.Tensor]] = state["moments"]
        if odd := sorted(moments.keys() ^ self._parameters.keys()):
            raise ValueError(f"trainer: the checkpoint belongs to another model: {odd[0]} is only in one of them")
        for name, parameter in self._parameters.items():
            self._optimizer.state[parameter] = {
                key: value.to(parameter.device, torch.float32) for key, value in moments[name].items()
            }
        self._shuffle.set_state(state["shuffle"])
        self.num_batches, self.num_optimizer_steps = state["num_batches"], state["num_optimizer_steps"]

    def _parts(self, num_rows: int) -> list[list[int]]:
        """The rows of each optimizer step, drawn anew for every batch and as equal in number as can be."""
        num_parts = self._options.optimizer_steps_per_batch
        if num_parts > num_rows:
            remedy = f"a batch has only {num_rows} trajectories: give fewer"
            raise OptionError("trainer.optimizer_steps_per_batch", num_parts, remedy)
        if num_parts == 1:
            return [list(range(num_rows))]
        order = torch.randperm(num_rows, generator=self._shuffle).tolist()
        return [sorted(order[i::num_parts]) for i in range(num_parts)]

    def _values(self, rows: Rows) -> _BatchValues:
        advantages = self._loss.advantages(rows.rewards, rows.groups, rows.mask)
        rollout = rows.rollout_logprobs.to(self.model.device)
        needs, old, reference = self._loss.needs, None, None
        if needs.old_logprobs == "rollout":
            old = rollout
        elif self._options.optimizer_steps_per_batch > 1:
            old = self._all_logprobs(rows, self.model)
        if needs.reference:
            assert self._reference is not None
            reference = self._all_logprobs(rows, self._reference)
        return _BatchValues(advantages.to(self.model.device, torch.float32), rollout, old, reference)

    @torch.no_grad()
    def _all_logprobs(self, rows: Rows, model: PolicyModel) -> torch.Tensor:
        """Log-probabilities [B, P] of every policy token of the batch under `model`, 0 outside the mask."""
        result = torch.zeros(rows.mask.shape, device=self.model.device)
        for micro in self._split(rows, range(len(rows.inputs))):
            result[micro.rows, : micro.mask.shape[1]] = micro.scatter(model.logprobs(micro)[0])
        return result

    def _split(self, rows: Rows, chosen: Sequence[int]) -> list[MicroBatch]:
        options = self._options
        parts = split(rows, chosen, options.layout, options.max_tokens_per_micro_batch)
        return [micro.to(self.model.device) for micro in parts]

    def _optimizer_step(
        self, rows: Rows, part: list[int], values: _BatchValues, per_token: dict[str, list[torch.Tensor]]
    ) -> dict[str, float]:
        """One step of AdamW on the rows `part`; appends figures of every policy token to `per_token`."""
        denominators = Denominators.of(rows.mask[part])
        learning = values.advantages.cpu().ne(0).any(dim=-1)
        constant = self._loss.needs.zero_advantage_is_constant
        moving = [i for i in part if learning[i] or not constant]
        still = [i for i in part if not (learning[i] or not constant)]
        losses: list[tuple[MicroBatch, torch.Tensor]] = []
        for chosen, with_gradient in ((moving, True), (still, False)):
            for micro in self._split(rows, chosen):
                with torch.set_grad_enabled(with_gradient):
                    output = self._forward(micro, values, denominators, per_token)
                if with_gradient:
                    output.loss.backward()
                losses.append((micro, output.loss.detach()))
        loss = self._checked_loss(rows, losses)
        grad_norm = self._clipped_gradient([rows.sample_ids[i] for i in part])
        return {"loss": loss, "grad_norm": grad_norm, "lr": self._descend()}

    def _forward(
        self,
        micro: MicroBatch,
        values: _BatchValues,
        denominators: Denominators,
        per_token: dict[str, list[torch.Tensor]],
    ) -> LossOutput:
        logprobs, entropy = self.model.logprobs(micro, entropy_gradient=self._loss.needs.entropy_gradient)
        old, reference = values.old_logprobs, values.reference_logprobs
        tokens = PolicyTokens(
            mask=micro.mask,
            logprobs=micro.scatter(logprobs),
            entropy=micro.scatter(entropy),
            rollout_logprobs=micro.gather(values.rollout_logprobs),
            advantages=micro.gather(values.advantages),
            old_logprobs=None if old is None else micro.gather(old),
            reference_logprobs=None if reference is None else micro.gather(reference),
        )
        output = self._loss.compute(tokens, denominators)
        recomputed = old is not None and self._loss.needs.old_logprobs == "recomputed"
        trainer_logprobs = micro.gather(old)[micro.mask] if old is not None and recomputed else logprobs
        figures = {
            "logprobs": trainer_logprobs,
            "rollout_logprobs": tokens.rollout_logprobs[micro.mask],
            "entropy": entropy,
            **output.per_token,
        }
        for name, value in figures.items():
            per_token[name].append(value.detach())
        return output

    def _checked_loss(self, rows: Rows, losses: list[tuple[MicroBatch, torch.Tensor]]) -> float:
        values = torch.stack([loss for _, loss in losses]).double().cpu()
        for (micro, _), value in zip(losses, values.tolist(), strict=True):
            if not math.isfinite(value):
                self._optimizer.zero_grad(set_to_none=True)
                raise NonFiniteError("train/loss", value, [rows.sample_ids[i] for i in micro.rows.tolist()])
        return float(values.sum())

    def _clipped_gradient(self, sample_ids: list[str]) -> float:
        """Norm of the gradient before it was clipped. No gradient at all is a gradient of 0: momentum goes on."""
        parameters = list(self._parameters.values())
        if all(p.grad is None for p in parameters):
            for p in parameters:
                p.grad = torch.zeros_like(p)
        limit = math.inf if self._options.grad_clip is None else self._options.grad_clip
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
        if not math.isfinite(norm):
            self._optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError("train/grad_norm", norm, sample_ids)
        return norm

    def _descend(self) -> float:
        options = self._options
        factor = lr_factor(
            options.lr_schedule, self.num_optimizer_steps, options.warmup_steps, options.total_optimizer_steps
        )
        for group in self._optimizer.param_groups:
            group["lr"] = options.lr * factor
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.num_optimizer_steps += 1
        return options.lr * factor
