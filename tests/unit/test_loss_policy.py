from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from miles_rl.loss.base import Denominators, PolicyTokens
from miles_rl.loss.policy import PolicyLoss

CONF = Path(__file__).parents[2] / "conf" / "loss"
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()


def tokens(**given: Any) -> PolicyTokens:
    """Two sequences of three and two tokens on which trainer and engine agree, with advantages 1 and -1."""
    logprobs = torch.tensor([[-1.0, -0.5, -2.0], [-0.3, -1.5, 0.0]])
    values: dict[str, Any] = {
        "mask": MASK,
        "logprobs": logprobs.clone().requires_grad_(),
        "entropy": torch.ones(2, 3) * MASK,
        "rollout_logprobs": logprobs,
        "advantages": torch.tensor([[1.0], [-1.0]]) * MASK,
    }
    return PolicyTokens(**(values | given))


def gradient(loss: PolicyLoss, given: PolicyTokens, denominators: Denominators | None = None) -> torch.Tensor:
    output = loss.compute(given, denominators or Denominators.of(given.mask))
    (grad,) = torch.autograd.grad(output.loss, given.logprobs)
    return grad


def option(name: str) -> dict[str, Any]:
    """The option file `conf/loss/<name>.yaml`, composed with those that it builds on."""
    config = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    merged: dict[str, Any] = {}
    for entry in config.pop("defaults", []):
        merged |= option(entry) if entry != "_self_" else {}
    return merged | config


@pytest.mark.parametrize("name", sorted(path.stem for path in CONF.glob("*.yaml")))
def test_every_option_file_makes_a_loss_that_pushes_the_better_episode_up(name: str) -> None:
    config = option(name)
    assert config.pop("_target_") == "miles_rl.loss.policy.PolicyLoss"
    loss = PolicyLoss(**config)
    rewards, groups = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0, 0])
    given = tokens(advantages=loss.advantages(rewards, groups, MASK).float())
    grad = gradient(loss, given)
    assert (grad[0] < 0).all()
    assert (grad[1, :2] > 0).all()
    assert grad[1, 2] == 0


def test_the_default_loss_is_grpo_as_the_option_file_says() -> None:
    config = option("grpo")
    config.pop("_target_")
    assert vars(PolicyLoss(**config)) == vars(PolicyLoss())


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"policy": "pp_clip"}, "loss.policy: pp_clip; did you mean 'ppo_clip'? have ppo_clip, gspo, cispo, dppo"),
        ({"advantage": "mean"}, "loss.advantage: mean; have grpo, dr_grpo, rloo, maxrl, reinforce_pp"),
        ({"correction": "tis"}, "loss.correction: tis; have none, tis_token, tis_sequence, icepop"),
        ({"clip_low": 0.4}, "loss.clip_low: 0.4; give at most loss.clip_high, which is 0.28"),
        ({"clip_low": -0.1}, "loss.clip_low: -0.1; give a number at least 0 and at most 1"),
        ({"clip_high": float("nan")}, "loss.clip_high: nan; give a number at least 0"),
        ({"correction_low": 3.0}, "loss.correction_low: 3.0; give at most loss.correction_high, which is 2.0"),
        ({"rejection_low": 3.0}, "loss.rejection_low: 3.0; give at most loss.rejection_high, which is 2.0"),
        ({"dual_clip": 1.0}, "loss.dual_clip: 1.0; give a number above 1"),
        ({"kl_coef": -1.0}, "loss.kl_coef: -1.0; give a number at least 0"),
        ({"discount": 1.5}, "loss.discount: 1.5; give a number at least 0 and at most 1"),
        (
            {"aggregation": "seq-mean-token-sum-norm"},
            "loss.norm_tokens: null; give a constant, like batch size times the tokens of an episode",
        ),
        (
            {"norm_tokens": 100},
            "loss.norm_tokens: 100; it acts only with loss.aggregation=seq-mean-token-sum-norm; leave it null",
        ),
        (
            {"policy": "dppo"},
            "loss.old_logprobs: recomputed; dppo's trust region is around the engine: give rollout",
        ),
        (
            {"old_logprobs": "rollout"},
            "loss.correction: tis_token; with old_logprobs=rollout its ratio is always 1: give none, or"
            " old_logprobs=recomputed",
        ),
    ],
)
def test_a_value_that_cannot_be_meant_gives_one_line_with_the_remedy(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        PolicyLoss(**options)
    assert str(caught.value) == line


def test_without_a_second_step_the_clip_is_inert_and_only_the_correction_acts() -> None:
    rollout = torch.tensor([[-3.0, -0.5, -2.0], [-0.3, -1.5, 0.0]])  # the engine gave the first token e^-2 of ours
    free, clipped = PolicyLoss(correction="none", clip_low=0.0, clip_high=0.0), PolicyLoss(correction="none")
    given = tokens(rollout_logprobs=rollout)
    assert torch.equal(gradient(free, given), gradient(clipped, given))
    corrected = gradient(PolicyLoss(), given)
    assert corrected[0, 0] == pytest.approx(2 * float(gradient(free, given)[0, 0]))
    assert torch.equal(corrected[0, 1:], gradient(free, given)[0, 1:])


def test_old_logprobs_of_the_rollout_put_the_clip_between_trainer_and_engine() -> None:
    rollout = torch.tensor([[-3.0, -0.5, -2.0], [-0.3, -1.5, 0.0]])
    loss = PolicyLoss(correction="none", old_logprobs="rollout")
    assert loss.needs.old_logprobs == "rollout"
    grad = gradient(loss, tokens(rollout_logprobs=rollout, old_logprobs=rollout))
    assert grad[0, 0] == 0  # its ratio e^2 is above 1.28, and its advantage positive
    assert (grad[0, 1:] < 0).all()


def test_rejecting_tokens_leaves_the_weight_of_the_others_as_it_was() -> None:
    rollout = torch.tensor([[-5.0, -0.5, -2.0], [-0.3, -1.5, 0.0]])
    for aggregation in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        plain = gradient(PolicyLoss(correction="none", aggregation=aggregation), tokens(rollout_logprobs=rollout))
        loss = PolicyLoss(correction="none", aggregation=aggregation, rejection="token")
        output = loss.compute(tokens(rollout_logprobs=rollout), Denominators.of(MASK))
        assert output.per_token["rejected"].tolist() == [1, 0, 0, 0, 0]
        rejected = gradient(loss, tokens(rollout_logprobs=rollout))
        assert rejected[0, 0] == 0
        assert torch.equal(rejected[0, 1:], plain[0, 1:])
        assert torch.equal(rejected[1], plain[1])


def test_a_rejected_sequence_still_counts_in_the_denominator() -> None:
    rollout = torch.tensor([[-5.0, -4.5, -6.0], [-0.3, -1.5, 0.0]])
    plain = gradient(PolicyLoss(correction="none"), tokens(rollout_logprobs=rollout))
    for rejection in ("sequence_geometric", "sequence_product"):
        rejected = gradient(PolicyLoss(correction="none", rejection=rejection), tokens(rollout_logprobs=rollout))
        assert rejected[0].eq(0).all()
        assert torch.equal(rejected[1], plain[1])


def test_the_reference_pulls_the_policy_back_and_is_asked_for() -> None:
    loss = PolicyLoss(kl_coef=0.5, aggregation="token-mean")
    assert loss.needs.reference
    assert not loss.needs.zero_advantage_is_constant
    given = tokens(advantages=torch.zeros(2, 3))
    below = PolicyTokens(**{**fields_of(given), "reference_logprobs": given.logprobs.detach() - MASK * 1.0})
    assert (gradient(loss, below)[MASK] > 0).all()  # likelier than the reference: down
    output = loss.compute(below, Denominators.of(MASK))
    assert output.per_token["reference_kl"].tolist() == pytest.approx([1 / torch.e] * 5, abs=1e-5)
    with pytest.raises(ValueError, match="no reference log-probabilities"):
        loss.compute(given, Denominators.of(MASK))


def test_an_entropy_bonus_lowers_the_loss_by_the_mean_entropy() -> None:
    loss = PolicyLoss(entropy_coef=0.1, aggregation="token-mean")
    assert loss.needs.entropy_gradient
    entropy = torch.full((2, 3), 2.0) * MASK
    with_bonus = loss.compute(tokens(entropy=entropy), Denominators.of(MASK)).loss
    without = PolicyLoss(aggregation="token-mean").compute(tokens(entropy=entropy), Denominators.of(MASK)).loss
    assert float((without - with_bonus).detach()) == pytest.approx(0.2)


def test_rows_without_advantage_have_no_gradient_where_the_loss_says_so() -> None:
    assert PolicyLoss().needs.zero_advantage_is_constant
    assert gradient(PolicyLoss(), tokens(advantages=torch.zeros(2, 3))).eq(0).all()
    dppo = PolicyLoss(policy="dppo", old_logprobs="rollout", correction="none")
    assert not dppo.needs.zero_advantage_is_constant


def test_the_dual_clip_bounds_a_bad_token_that_became_likelier() -> None:
    old = torch.tensor([[-1.0, -0.5, -2.0], [-4.3, -1.5, 0.0]])
    bounded = gradient(PolicyLoss(correction="none", dual_clip=3.0), tokens(old_logprobs=old))
    unbounded = gradient(PolicyLoss(correction="none"), tokens(old_logprobs=old))
    assert bounded[1, 0] == 0
    assert unbounded[1, 0] > 5


def test_a_wild_token_keeps_loss_and_gradient_finite() -> None:
    logprobs = torch.tensor([[-0.1, -0.1, -0.1], [-0.1, -0.1, 0.0]])
    far = torch.tensor([[-900.0, -0.1, -0.1], [-900.0, -0.1, 0.0]])
    for policy in ("ppo_clip", "gspo", "cispo"):
        for correction in ("none", "tis_token", "tis_sequence", "icepop"):
            loss = PolicyLoss(policy=policy, correction=correction)
            given = tokens(logprobs=logprobs.clone().requires_grad_(), old_logprobs=far, rollout_logprobs=far)
            assert gradient(loss, given).isfinite().all()
            given = tokens(logprobs=logprobs.clone().requires_grad_(), old_logprobs=logprobs, rollout_logprobs=far)
            assert gradient(loss, given).isfinite().all()


def test_losses_of_a_longer_step_shrink_with_its_denominators() -> None:
    shares = [
        float(PolicyLoss().compute(tokens(advantages=MASK * 1.0), Denominators(5 * n, 2 * n)).loss.detach())
        for n in (1, 2, 4)
    ]
    assert all(first == pytest.approx(2 * second) for first, second in pairwise(shares))


def fields_of(given: PolicyTokens) -> dict[str, Any]:
    return {name: getattr(given, name) for name in PolicyTokens.__slots__}
