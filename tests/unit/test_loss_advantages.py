import pytest
import torch

from miles_rl.loss import advantages
from miles_rl.loss.policy import PolicyLoss

ONE_GROUP = torch.zeros(8, dtype=torch.long)


def rewards(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("estimator", [advantages.grpo, advantages.rloo, advantages.maxrl])
def test_equal_rewards_give_exactly_nothing_whatever_their_rounding(estimator) -> None:
    for value in (0.0, 0.1, 1 / 3, 1.0, 1e6 + 0.1):
        assert estimator(rewards(*[value] * 8), ONE_GROUP).eq(0).all()


def test_groups_do_not_see_each_other() -> None:
    groups = torch.tensor([1, 0, 1, 0, 2])
    values = rewards(5.0, 0.0, 7.0, 1.0, 9.0)
    alone = [
        advantages.grpo(values[groups == g], torch.zeros(int((groups == g).sum()), dtype=torch.long)) for g in (0, 1)
    ]
    together = advantages.grpo(values, groups)
    assert torch.equal(together[groups == 0], alone[0])
    assert torch.equal(together[groups == 1], alone[1])
    assert together[4] == 0


def test_advantages_of_a_group_sum_to_zero() -> None:
    values = rewards(0, 0, 1, 0, 1, 1, 0, 0.5)
    for got in (
        advantages.grpo(values, ONE_GROUP),
        advantages.rloo(values, ONE_GROUP),
        advantages.maxrl(values, ONE_GROUP),
    ):
        assert float(got.sum()) == pytest.approx(0, abs=1e-9)


def test_maxrl_refuses_negative_rewards() -> None:
    with pytest.raises(ValueError, match=r"^loss\.advantage: maxrl; .* give rewards of 0 or more, or grpo$"):
        advantages.maxrl(rewards(-1.0, 1.0), torch.tensor([0, 0]))


def test_the_reward_stands_at_the_last_token_of_each_row() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]]).bool()
    assert advantages.at_last_token(rewards(1, 2, 3), mask).tolist() == [[0, 0, 1], [2, 0, 0], [0, 3, 0]]
    gap = torch.tensor([[1, 0, 1, 0]]).bool()
    assert advantages.at_last_token(rewards(4), gap).tolist() == [[0, 0, 4, 0]]


def test_reinforce_pp_carries_the_return_over_an_observation() -> None:
    mask = torch.tensor([[1, 1, 0, 1]]).bool()
    _, returns = advantages.reinforce_pp(rewards(0, 0, 0, 1).unsqueeze(0), mask, discount=0.5)
    assert returns.tolist() == [[0.25, 0.5, 0.0, 1.0]]  # verl: 0 for the first two


def test_reinforce_pp_gives_every_token_of_an_undiscounted_episode_the_same() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    got = PolicyLoss(advantage="reinforce_pp").advantages(rewards(1, 0), torch.tensor([0, 1]), mask)
    assert got[0].unique().numel() == 1
    assert got[0, 0] > 0 > got[1, 0]
    assert got[1, 2] == 0
    assert float(got.sum()) == pytest.approx(0, abs=1e-6)


def test_whitening_nothing_or_equal_values_gives_zero() -> None:
    mask = torch.tensor([[True, False]])
    assert advantages.whiten(rewards(3, 4).unsqueeze(0), mask).eq(0).all()
    assert advantages.whiten(torch.full((2, 2), 0.1), torch.ones(2, 2).bool()).eq(0).all()
