"""A very small real policy and batches for it, for tests of the trainer."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from miles_rl.loss.base import Loss
from miles_rl.trainer.torch import TorchTrainer
from miles_rl.types import Batch, Group, Outcome, StopReason, Trajectory

VOCAB_SIZE = 40
VERSION = 5
SINGLE = {"data": 1, "tensor": 1, "pipeline": 1, "context": 1, "expert": 1}


def write_policy(folder: Path, seed: int = 0, **shape: Any) -> str:
    """A Qwen3 policy of some thousand weights as a Hugging Face folder; returns the folder."""
    torch.manual_seed(seed)
    config = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    Qwen3ForCausalLM(Qwen3Config(**(config | shape))).save_pretrained(folder)
    return str(folder)


def make_trajectory(
    rng: np.random.Generator,
    *,
    sample_id: str = "s",
    group_id: int = 0,
    spans: tuple[tuple[int, int], ...] = ((4, 5),),
    reward: float = 1.0,
    version: int = VERSION,
    stop_reason: StopReason = StopReason.COMPLETED,
) -> Trajectory:
    """Random tokens: for each span, so many that the policy read and then so many that it wrote."""
    mask = np.concatenate([np.repeat([False, True], [read, wrote]) for read, wrote in spans])
    logprobs = np.where(mask, -np.log(VOCAB_SIZE) + 0.5 * rng.normal(size=len(mask)), 0).clip(max=0)
    return Trajectory(
        sample_id=sample_id,
        group_id=group_id,
        task=f"task-{group_id}",
        token_ids=rng.integers(0, VOCAB_SIZE, len(mask)).astype(np.int32),
        loss_mask=mask,
        logprobs=logprobs.astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        reward=reward,
        outcome=Outcome.SCORED,
        stop_reason=stop_reason,
    )


def make_batch(rng: np.random.Generator, num_groups: int = 3, group_size: int = 4) -> Batch:
    """Groups of episodes of one to three turns and rewards of 0 or 1; the first group differs, the last is all 1."""
    groups = []
    for group_id in range(num_groups):
        rewards = rng.integers(0, 2, group_size).astype(float)
        if group_id == 0:
            rewards[:2] = 0.0, 1.0
        if group_id == num_groups - 1:
            rewards[:] = 1.0
        members = tuple(
            make_trajectory(
                rng,
                sample_id=f"g{group_id}-{i}",
                group_id=group_id,
                spans=tuple((int(rng.integers(2, 7)), int(rng.integers(1, 8))) for _ in range(rng.integers(1, 4))),
                reward=float(rewards[i]),
            )
            for i in range(group_size)
        )
        groups.append(Group(group_id, f"task-{group_id}", members))
    return Batch(tuple(groups), VERSION + 1)


def batch_of(*trajectories: Trajectory, version: int = VERSION + 1) -> Batch:
    """A batch of these trajectories, grouped by their `group_id`."""
    ids = dict.fromkeys(t.group_id for t in trajectories)
    groups = [Group(i, f"task-{i}", tuple(t for t in trajectories if t.group_id == i)) for i in ids]
    return Batch(tuple(groups), version)


def make_trainer(loss: Loss, **options: Any) -> TorchTrainer:
    """A trainer on the CPU with one thread."""
    fixed = {"parallelism": SINGLE, "offload": {"optimizer": "none"}, "lr": 1e-3, "device": "cpu", "num_threads": 1}
    return TorchTrainer(loss, **(fixed | options))
