"""Small real objects that several tests need."""

import numpy as np

from miles_rl.types import Outcome, StopReason, Trajectory


def make_trajectory(sample_id: str, group_id: int, task: str, version: int, reward: float = 1.0) -> Trajectory:
    """One prompt token and two policy tokens, all written by `version`."""
    mask = np.array([False, True, True])
    return Trajectory(
        sample_id=sample_id,
        group_id=group_id,
        task=task,
        token_ids=np.array([1, 2, 3], np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        reward=reward,
        outcome=Outcome.SCORED,
        stop_reason=StopReason.COMPLETED,
    )
