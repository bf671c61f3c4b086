"""What the episodes of a batch were like: turns, tokens, truncation, cache hits, seconds."""

from __future__ import annotations

from collections.abc import Sequence

from miles_rl.types import StopReason, Trajectory

TRUNCATED = (StopReason.TURN_TRUNCATED, StopReason.SESSION_BUDGET)
PARTS = ("lease_s", "generate_s", "exec_s", "verify_s")


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over `trajectories`; empty for none. A turn's prompt is all that the conversation held before it."""
    if not trajectories:
        return {}
    num = len(trajectories)
    turns = [turn for t in trajectories for turn in t.turns]
    total_s = sum(t.timings["total_s"] for t in trajectories)
    metrics = {
        "rollout/num_turns_mean": len(turns) / num,
        "rollout/response_tokens_mean": sum(turn.end - turn.start for turn in turns) / num,
        "rollout/completed_ratio": sum(t.stop_reason is StopReason.COMPLETED for t in trajectories) / num,
        "rollout/episode_truncated_ratio": sum(t.stop_reason in TRUNCATED for t in trajectories) / num,
        "rollout/prefix_cache_hit_rate": sum(t.cached_tokens for t in turns) / max(1, sum(t.start for t in turns)),
        "rollout/episode_s_mean": total_s / num,
        "rollout/episode_s_max": max(t.timings["total_s"] for t in trajectories),
        "rollout/episode_overhead_ratio": sum(t.timings["other_s"] for t in trajectories) / max(total_s, 1e-9),
    }
    for part in PARTS:
        metrics[f"rollout/{part.removesuffix('_s')}_s_mean"] = sum(t.timings[part] for t in trajectories) / num
    return metrics
