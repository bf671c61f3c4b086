"""How trajectories are cut into micro-batches, and where their tokens lie in them, against the trajectories alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_rl.batch.layout import Layout
from miles_rl.batch.micro_batch import MicroBatch, build, split
from miles_rl.batch.partition import by_packed_size, by_padded_size, karmarkar_karp
from miles_rl.batch.rows import Rows
from miles_rl.types import Outcome, StopReason, Trajectory

LAYOUTS: list[Layout] = ["padded", "packed"]
lengths_of_rows = st.lists(st.integers(0, 60), min_size=1, max_size=24)


def trajectory(number: int, mask: Sequence[bool], group_id: int) -> Trajectory:
    """Every token id and log-probability is there once in the whole batch, so that a value tells where it is from."""
    loss_mask = np.array(mask)
    ids = np.arange(len(mask), dtype=np.int32) + 1 + 100 * number
    return Trajectory(
        sample_id=f"g{group_id}.{number}.0",
        group_id=group_id,
        task=f"t{group_id}",
        token_ids=ids,
        loss_mask=loss_mask,
        logprobs=np.where(loss_mask, -ids / 4096, 0.0).astype(np.float32),
        versions=np.where(loss_mask, 0, -1).astype(np.int32),
        reward=number / 7,
        outcome=Outcome.SCORED,
        stop_reason=StopReason.COMPLETED,
    )


@st.composite
def batches(draw: st.DrawFn) -> list[Trajectory]:
    """Trajectories of any mask whose first token is not the policy's and in which one is."""
    masks = draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=20).filter(any), min_size=1, max_size=10))
    return [trajectory(n, [False, *mask], draw(st.integers(0, 3))) for n, mask in enumerate(masks)]


def expected_tokens(trajectories: Sequence[Trajectory]) -> Counter[tuple[str, int, int, float]]:
    """Of each policy token: the sample, the id, the id before it and its log-probability, in plain loops."""
    return Counter(
        (t.sample_id, int(t.token_ids[i]), int(t.token_ids[i - 1]), float(t.logprobs[i]))
        for t in trajectories
        for i in range(len(t.token_ids))
        if t.loss_mask[i]
    )


def tokens_in(micro: MicroBatch, rows: Rows) -> list[tuple[str, int, int, float]]:
    """The same of a micro-batch, from where its layout says that they are."""
    read = micro.input_ids[micro.lines, micro.columns]
    names = [rows.sample_ids[int(row)] for row in micro.rows]
    owners = [names[line] for line in torch.nonzero(micro.mask)[:, 0].tolist()]
    logprobs = micro.gather(rows.rollout_logprobs)[micro.mask]
    return list(zip(owners, micro.targets.tolist(), read.tolist(), logprobs.tolist(), strict=True))


@settings(max_examples=200, deadline=None)
@given(lengths=lengths_of_rows, data=st.data(), equal_size=st.booleans())
def test_every_index_is_in_exactly_one_part_and_no_part_is_empty(
    lengths: list[int], data: st.DataObject, equal_size: bool
) -> None:
    num_parts = data.draw(st.integers(1, len(lengths)))
    if equal_size and len(lengths) % num_parts:
        with pytest.raises(ValueError, match="parts of equal number"):
            karmarkar_karp(lengths, num_parts, equal_size=True)
        return
    parts = karmarkar_karp(lengths, num_parts, equal_size=equal_size)
    assert len(parts) == num_parts
    assert all(parts)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    if equal_size:
        assert {len(part) for part in parts} == {len(lengths) // num_parts}
    else:
        sums = [sum(lengths[i] for i in part) for part in parts]
        assert max(sums) - min(sums) <= max(lengths), "one row moved would not even this out"


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=24), max_tokens=st.integers(1, 120))
def test_a_budget_is_exceeded_only_by_a_row_that_is_longer_and_alone(lengths: list[int], max_tokens: int) -> None:
    for partition in (by_padded_size, by_packed_size):
        parts = partition(lengths, max_tokens)
        assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
        assert all(parts)
        for part in parts:
            sizes = [lengths[i] for i in part]
            size = sum(sizes) if partition is by_packed_size else len(sizes) * max(sizes)
            assert size <= max_tokens or len(part) == 1
    padded = by_padded_size(lengths, max_tokens)
    for part in padded[:-1]:
        assert (len(part) + 1) * max(lengths[i] for i in part) > max_tokens, "another row would have fitted"


@settings(max_examples=200, deadline=None)
@given(trajectories=batches(), data=st.data(), max_tokens=st.integers(1, 120))
def test_both_layouts_hold_every_policy_token_of_the_chosen_rows_once_behind_the_token_that_predicts_it(
    trajectories: list[Trajectory], data: st.DataObject, max_tokens: int
) -> None:
    rows = Rows.of(trajectories)
    chosen = data.draw(st.lists(st.sampled_from(range(len(trajectories))), min_size=1, unique=True))
    expected = expected_tokens([trajectories[i] for i in chosen])
    for layout in LAYOUTS:
        parts = split(rows, chosen, layout, max_tokens)
        assert sorted(int(row) for micro in parts for row in micro.rows) == sorted(chosen)
        for micro in parts:
            assert micro.input_ids.numel() <= max_tokens or len(micro.rows) == 1
        assert Counter(token for micro in parts for token in tokens_in(micro, rows)) == expected


@settings(max_examples=200, deadline=None)
@given(trajectories=batches(), order=st.randoms(use_true_random=False))
def test_a_row_reads_the_same_at_the_same_positions_in_either_layout_whatever_lies_next_to_it(
    trajectories: list[Trajectory], order: random.Random
) -> None:
    rows, chosen = Rows.of(trajectories), list(range(len(trajectories)))
    order.shuffle(chosen)
    padded, packed = build(rows, chosen, "padded"), build(rows, chosen, "packed")
    assert padded.position_ids is None
    assert packed.position_ids is not None
    start = 0
    for line, row in enumerate(chosen):
        trajectory = trajectories[row]
        tokens = trajectory.token_ids[: np.flatnonzero(trajectory.loss_mask)[-1]].tolist()
        assert padded.input_ids[line, : len(tokens)].tolist() == tokens
        assert packed.input_ids[0, start : start + len(tokens)].tolist() == tokens
        assert packed.position_ids[0, start : start + len(tokens)].tolist() == list(range(len(tokens)))
        start += len(tokens)
    assert packed.input_ids.shape == (1, start)
    for name in ("rows", "mask", "targets"):
        assert torch.equal(getattr(padded, name), getattr(packed, name))


@settings(max_examples=200, deadline=None)
@given(trajectories=batches(), data=st.data(), max_tokens=st.integers(1, 120))
def test_values_scattered_from_the_micro_batches_come_back_to_their_rows_in_any_order(
    trajectories: list[Trajectory], data: st.DataObject, max_tokens: int
) -> None:
    """A value for each policy token, put together over all micro-batches, is the same in whichever order and layout."""
    shuffled = data.draw(st.permutations(trajectories))
    found: list[dict[str, list[float]]] = []
    for batch in (trajectories, shuffled):
        rows = Rows.of(batch)
        for layout in LAYOUTS:
            by_sample: dict[str, list[float]] = {}
            for micro in split(rows, range(len(batch)), layout, max_tokens):
                values = micro.scatter(micro.input_ids[micro.lines, micro.columns].double() + micro.targets / 2)
                assert not values[~micro.mask].any()
                for row, line, mask in zip(micro.rows, values, micro.mask, strict=True):
                    by_sample[rows.sample_ids[int(row)]] = line[mask].tolist()
            found.append(by_sample)
    assert all(by_sample == found[0] for by_sample in found)
    assert set(found[0]) == {t.sample_id for t in trajectories}


@settings(max_examples=200, deadline=None)
@given(trajectories=batches(), data=st.data())
def test_rows_hold_the_facts_of_their_trajectory_whatever_the_order_of_the_batch(
    trajectories: list[Trajectory], data: st.DataObject
) -> None:
    batch = data.draw(st.permutations(trajectories))
    rows = Rows.of(batch)
    assert rows.mask.sum(1).tolist() == [t.num_policy_tokens for t in batch]
    assert rows.rewards.tolist() == [t.reward for t in batch]
    for row, trajectory in enumerate(batch):
        written = trajectory.loss_mask
        assert rows.targets[row][rows.mask[row]].tolist() == trajectory.token_ids[written].tolist()
        assert rows.rollout_logprobs[row][rows.mask[row]].tolist() == trajectory.logprobs[written].tolist()
        assert rows.mask[row].tolist() == sorted(rows.mask[row].tolist(), reverse=True), "policy tokens come first"
        assert rows.lengths[row] == int(np.flatnonzero(written)[-1])
    assert not rows.targets[~rows.mask].any()
    assert not rows.rollout_logprobs[~rows.mask].any()
    for a, first in enumerate(batch):
        for b, second in enumerate(batch):
            assert (rows.groups[a] == rows.groups[b]) == (first.group_id == second.group_id)
    assert sorted(set(rows.groups.tolist())) == list(range(len({t.group_id for t in batch})))


@settings(max_examples=50, deadline=None)
@given(trajectories=batches(), data=st.data())
def test_a_row_whose_first_token_is_the_policy_s_is_refused_by_name(
    trajectories: list[Trajectory], data: st.DataObject
) -> None:
    where = data.draw(st.integers(0, len(trajectories)))
    bad = trajectory(99, [True, True], 0)
    with pytest.raises(ValueError, match=r"g0\.99\.0: the first token is the policy's"):
        Rows.of([*trajectories[:where], bad, *trajectories[where:]])
