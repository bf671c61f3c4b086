import numpy as np
import pytest
import torch
from tiny_policy import make_trajectory

from miles_rl.batch.micro_batch import build, split
from miles_rl.batch.rows import Rows
from miles_rl.types import Outcome, StopReason, Trajectory

END = 9


def two_turns() -> Trajectory:
    """`p p a END o c END o`: the policy wrote a END, and c END."""
    mask = np.array([0, 0, 1, 1, 0, 1, 1, 0], bool)
    return Trajectory(
        sample_id="two-turns",
        group_id=7,
        task="task",
        token_ids=np.array([1, 2, 3, END, 5, 6, END, 8], np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -np.arange(1, 9), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        reward=1.0,
        outcome=Outcome.SCORED,
        stop_reason=StopReason.COMPLETED,
    )


def test_each_policy_token_is_predicted_one_position_before_it() -> None:
    rows = Rows.of([two_turns()])
    assert rows.inputs[0].tolist() == [1, 2, 3, END, 5, 6]
    assert rows.positions[0].tolist() == [1, 2, 4, 5]
    assert rows.targets.tolist() == [[3, END, 6, END]]
    assert rows.rollout_logprobs.tolist() == [[-3, -4, -6, -7]]


def test_the_end_of_turn_token_is_trained_and_the_tail_is_not_computed() -> None:
    rows = Rows.of([two_turns()])
    assert rows.targets[0].tolist().count(END) == 2
    assert 8 not in rows.inputs[0]  # the last observation
    assert rows.lengths == [6]


def test_rows_of_different_lengths_are_left_aligned_and_masked() -> None:
    rng = np.random.default_rng(0)
    short = make_trajectory(rng, sample_id="short", group_id=3, spans=((2, 1),), reward=0.5)
    rows = Rows.of([two_turns(), short])
    assert rows.mask.tolist() == [[True] * 4, [True, False, False, False]]
    assert rows.targets[1, 1:].tolist() == [0, 0, 0]
    assert rows.rewards.tolist() == [1.0, 0.5]
    assert rows.groups.tolist() == [1, 0]
    assert rows.sample_ids == ("two-turns", "short")


def test_a_first_token_of_the_policy_is_refused_with_its_sample() -> None:
    with pytest.raises(ValueError, match="first: the first token is the policy's"):
        Rows.of([make_trajectory(np.random.default_rng(0), sample_id="first", spans=((0, 2),))])
    with pytest.raises(ValueError, match="a batch without trajectories"):
        Rows.of([])


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_micro_batch_finds_every_policy_token_where_it_is_predicted(layout) -> None:
    rng = np.random.default_rng(1)
    trajectories = [make_trajectory(rng, spans=((3, 2), (2, 4))), two_turns(), make_trajectory(rng, spans=((5, 1),))]
    rows = Rows.of(trajectories)
    micro = build(rows, [2, 0, 1], layout)
    assert micro.rows.tolist() == [2, 0, 1]
    assert torch.equal(micro.scatter(micro.targets.float()), micro.gather(rows.targets.float()))
    numbers = torch.arange(len(rows.inputs))[micro.rows]
    read = micro.input_ids[micro.lines, micro.columns].tolist()
    expected = [int(rows.inputs[i][p]) for i in numbers.tolist() for p in rows.positions[i]]
    assert read == expected


def test_packed_trajectories_restart_their_positions() -> None:
    rng = np.random.default_rng(2)
    rows = Rows.of([make_trajectory(rng, spans=((2, 2),)), make_trajectory(rng, spans=((1, 3),))])
    micro = build(rows, [0, 1], "packed")
    assert micro.input_ids.shape == (1, 6)
    assert micro.position_ids is not None
    assert micro.position_ids.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert build(rows, [0, 1], "padded").position_ids is None


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_split_holds_every_chosen_row_once(layout) -> None:
    rng = np.random.default_rng(3)
    rows = Rows.of(
        [make_trajectory(rng, spans=((int(rng.integers(1, 9)), int(rng.integers(1, 9))),)) for _ in range(20)]
    )
    micros = split(rows, range(0, 20, 2), layout, 30)
    assert len(micros) > 2
    assert sorted(i for micro in micros for i in micro.rows.tolist()) == list(range(0, 20, 2))
    assert sum(len(micro.targets) for micro in micros) == int(rows.mask[::2].sum())
