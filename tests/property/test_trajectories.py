"""Trajectories: what is refused, what the ledger's bytes give back, and which version each token is said to be of."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_rl.engine.client import _parse_generation
from miles_rl.rollout.codec import decode, encode
from miles_rl.types import Batch, Group, Outcome, StopReason, Trajectory, Turn

ARRAYS = ("token_ids", "loss_mask", "logprobs", "versions")
TYPES = {"token_ids": np.int32, "loss_mask": np.bool_, "logprobs": np.float32, "versions": np.int32}

any_text = st.text(st.characters(), max_size=30)
"""Lone surrogates too: a model may write any bytes, and they are shown as such."""
seconds = st.floats(0, 1e6, allow_nan=False)
log_probability = st.floats(-1e4, 0.0, width=32)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    start = draw(st.integers(0, 1000))
    return Turn(
        text=draw(any_text),
        command=draw(st.none() | any_text),
        observation=draw(any_text),
        start=start,
        end=start + draw(st.integers(0, 100)),
        generate_s=draw(seconds),
        exec_s=draw(seconds),
        cached_tokens=draw(st.integers(0, 2**40)),
    )


@st.composite
def trajectories(draw: st.DrawFn, newest: int = 2**31 - 1) -> Trajectory:
    mask = draw(st.lists(st.booleans(), min_size=1, max_size=30).filter(any))
    each = {
        "token_ids": [draw(st.integers(0, 2**31 - 1)) for _ in mask],
        "loss_mask": mask,
        "logprobs": [draw(log_probability) if is_policy else 0.0 for is_policy in mask],
        "versions": [draw(st.integers(0, newest)) if is_policy else -1 for is_policy in mask],
    }
    return Trajectory(
        sample_id=draw(any_text),
        group_id=draw(st.integers(0, 2**62)),
        task=draw(any_text),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        outcome=Outcome.SCORED,
        stop_reason=draw(st.sampled_from(StopReason)),
        turns=tuple(draw(st.lists(turns(), max_size=3))),
        timings=draw(st.dictionaries(any_text, seconds, max_size=3)),
        **{name: np.array(values, TYPES[name]) for name, values in each.items()},
    )


def remade(trajectory: Trajectory, **arrays: Any) -> Trajectory:
    return replace(trajectory, **arrays)


@settings(max_examples=200, deadline=None)
@given(trajectory=trajectories())
def test_any_trajectory_comes_back_from_its_bytes_as_it_was(trajectory: Trajectory) -> None:
    back = decode(encode(trajectory))
    for field in fields(Trajectory):
        value, original = getattr(back, field.name), getattr(trajectory, field.name)
        if field.name in ARRAYS:
            assert value.dtype == original.dtype
            assert value.tobytes() == original.tobytes(), "bit by bit"
            assert value.flags.writeable
        else:
            assert value == original
            assert type(value) is type(original)
    assert encode(back) == encode(trajectory)


@settings(max_examples=200, deadline=None)
@given(trajectory=trajectories(), data=st.data())
def test_bytes_that_are_not_whole_are_refused(trajectory: Trajectory, data: st.DataObject) -> None:
    whole = encode(trajectory)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ValueError, match="not a trajectory"):
        decode(whole[:cut])
    with pytest.raises(ValueError, match="not a trajectory"):
        decode(whole + data.draw(st.binary(min_size=1, max_size=9)))
    changed = bytearray(whole)
    changed[cut] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError, match="not a trajectory"):
        decode(bytes(changed))


@settings(max_examples=200, deadline=None)
@given(trajectory=trajectories(), data=st.data())
def test_arrays_of_another_length_are_refused_by_name(trajectory: Trajectory, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(ARRAYS))
    array = getattr(trajectory, name)
    other = np.concatenate([array, array[-1:]]) if data.draw(st.booleans()) else array[:-1]
    with pytest.raises(ValueError, match=r"has shape \(\d+,\), token_ids \(\d+,\)"):
        remade(trajectory, **{name: other})


@settings(max_examples=200, deadline=None)
@given(trajectory=trajectories(), data=st.data())
def test_arrays_that_disagree_about_a_token_are_refused(trajectory: Trajectory, data: st.DataObject) -> None:
    """One token is changed in one array alone: which is the policy's, or what it carries, is then contradictory."""
    where = data.draw(st.integers(0, len(trajectory.token_ids) - 1))
    is_policy = bool(trajectory.loss_mask[where])
    name = data.draw(st.sampled_from(["loss_mask", "logprobs", "versions"]))
    array = getattr(trajectory, name).copy()
    if name == "loss_mask":
        array[where] = not is_policy
    elif name == "versions":
        array[where] = data.draw(st.integers(-5, -1)) if is_policy else data.draw(st.integers(0, 9))
    elif is_policy:
        array[where] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf, 0.01, 1.0]))
    else:
        array[where] = data.draw(st.floats(-100, -0.125, width=32) | st.sampled_from([math.nan, 0.5]))
    with pytest.raises(ValueError, match=r"policy|log-probability"):
        remade(trajectory, **{name: array})


@settings(max_examples=100, deadline=None)
@given(
    trajectory=trajectories(),
    outcome=st.sampled_from(Outcome),
    reward=st.sampled_from([0.0, math.nan, math.inf, -math.inf]),
)
def test_only_a_scored_episode_with_a_finite_reward_is_a_trajectory(
    trajectory: Trajectory, outcome: Outcome, reward: float
) -> None:
    if outcome is Outcome.SCORED and math.isfinite(reward):
        assert remade(trajectory, outcome=outcome, reward=reward).reward == reward
    else:
        with pytest.raises(ValueError, match="not learnable"):
            remade(trajectory, outcome=outcome, reward=reward)


def answer(versions: list[int], spans: list[dict[str, Any]] | None) -> dict[str, Any]:
    """What an engine answers for as many tokens, after JSON."""
    ids = list(range(len(versions)))
    meta: dict[str, Any] = {
        "output_token_logprobs": [[-0.5, i, None] for i in ids],
        "finish_reason": {"type": "length"},
        "weight_version": str(versions[-1]),
        "prompt_tokens": 1,
    }
    if spans is not None:
        meta["weight_versions"] = spans
    return json.loads(json.dumps({"output_ids": ids, "meta_info": meta}))


def spans_of(lengths: list[tuple[int, int]]) -> tuple[list[int], list[dict[str, Any]]]:
    versions, spans = list[int](), list[dict[str, Any]]()
    for version, length in lengths:
        spans.append({"version": str(version), "start": len(versions), "end": len(versions) + length})
        versions += [version] * length
    return versions, spans


span_lengths = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), min_size=1, max_size=6).filter(
    lambda spans: any(length for _, length in spans)
)


@settings(max_examples=200, deadline=None)
@given(lengths=span_lengths)
def test_spans_of_versions_become_one_version_for_each_token(lengths: list[tuple[int, int]]) -> None:
    versions, spans = spans_of(lengths)
    assert _parse_generation(answer(versions, spans), 0.0).versions == versions
    assert _parse_generation(answer(versions, None), 0.0).versions == [versions[-1]] * len(versions)


@settings(max_examples=200, deadline=None)
@given(lengths=span_lengths, data=st.data())
def test_spans_that_leave_a_token_out_or_hold_it_twice_are_refused(
    lengths: list[tuple[int, int]], data: st.DataObject
) -> None:
    versions, spans = spans_of(lengths)
    span = data.draw(st.sampled_from(spans))
    edge, by = data.draw(st.sampled_from(["start", "end"])), data.draw(st.integers(-4, 4).filter(bool))
    span[edge] += by
    with pytest.raises(ValueError, match="weight_versions"):
        _parse_generation(answer(versions, spans), 0.0)


@settings(max_examples=200, deadline=None)
@given(
    members=st.lists(trajectories(newest=9), min_size=1, max_size=6),
    num_groups=st.integers(1, 3),
    late=st.integers(0, 4),
)
def test_staleness_is_that_of_the_oldest_token_whatever_else_was_written(
    members: list[Trajectory], num_groups: int, late: int
) -> None:
    groups = [Group(g, "t", tuple(members[g::num_groups])) for g in range(num_groups) if members[g::num_groups]]
    consumed = 9 + late
    batch = Batch(tuple(groups), consumed)
    brute = []
    for trajectory in batch.trajectories:
        tokens = zip(trajectory.versions.tolist(), trajectory.loss_mask.tolist(), strict=True)
        written = [version for version, is_policy in tokens if is_policy]
        brute.append(max(consumed - version for version in written))
        assert (trajectory.oldest_version, trajectory.newest_version) == (min(written), max(written))
        assert trajectory.num_policy_tokens == len(written)
    assert list(batch.staleness) == brute
    for group in groups:
        assert consumed - group.oldest_version == max(consumed - t.oldest_version for t in group.trajectories)
