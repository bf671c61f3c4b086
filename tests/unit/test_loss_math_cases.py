"""The reference cases of other codebases (`math_cases.json`, with their commits), each with a check of its own.

Where our choice differs from the codebase that a case was computed by, the check holds both: the value that we
choose, and that the other one comes out of the same functions when the difference is undone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from miles_rl.batch.partition import karmarkar_karp
from miles_rl.loss import advantages, corrections, policy_terms
from miles_rl.loss.aggregation import Aggregation, aggregate
from miles_rl.loss.base import Denominators
from miles_rl.loss.kl import kl
from miles_rl.rules.learning import support

Case = dict[str, Any]
CASES: dict[str, Case] = {
    case["id"]: case for case in json.loads((Path(__file__).parent / "math_cases.json").read_text())["cases"]
}
CHECKS: dict[str, Callable[[Case, Case], None]] = {}


def check(*names: str) -> Callable[[Callable[[Case, Case], None]], Callable[[Case, Case], None]]:
    def add(function: Callable[[Case, Case], None]) -> Callable[[Case, Case], None]:
        CHECKS.update(dict.fromkeys(names, function))
        return function

    return add


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mask_of(inputs: Case) -> torch.Tensor:
    return torch.tensor(inputs["mask"]).bool()


def same(got: torch.Tensor | float, expected: Any, tolerance: float = 1e-5) -> bool:
    wanted = tensor(expected)
    return bool(torch.allclose(torch.as_tensor(got, dtype=torch.float64), wanted, rtol=1e-5, atol=tolerance))


def grouped(inputs: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards per trajectory, and numbers for the names of the groups."""
    names = sorted(set(inputs["group"]))
    return tensor(inputs["token_rewards"]).sum(-1), torch.tensor([names.index(g) for g in inputs["group"]])


@pytest.mark.parametrize("case_id", sorted(CASES))
def test_a_reference_case_comes_out(case_id: str) -> None:
    case = CASES[case_id]
    CHECKS[case_id](case["inputs"], case["expected"])


def test_every_check_belongs_to_a_case() -> None:
    assert sorted(CHECKS) == sorted(CASES)


@check("grpo_adv_std")
def _grpo(inputs: Case, expected: Case) -> None:
    assert same(advantages.grpo(*grouped(inputs)).unsqueeze(-1) * mask_of(inputs), expected["adv"])


@check("grpo_adv_nostd")
def _dr_grpo(inputs: Case, expected: Case) -> None:
    got = advantages.grpo(*grouped(inputs), divide_by_std=False)
    assert same(got.unsqueeze(-1) * mask_of(inputs), expected["adv"])


@check("rloo_adv")
def _rloo(inputs: Case, expected: Case) -> None:
    assert same(advantages.rloo(*grouped(inputs)).unsqueeze(-1) * mask_of(inputs), expected["adv"])


@check("maxrl_adv")
def _maxrl(inputs: Case, expected: Case) -> None:
    assert same(advantages.maxrl(*grouped(inputs)).unsqueeze(-1) * mask_of(inputs), expected["adv"])


@check("grpo_adv_singleton_and_zero_var")
def _singleton(inputs: Case, expected: Case) -> None:
    rewards, groups = grouped(inputs)
    for estimator in (advantages.grpo, advantages.rloo, advantages.maxrl):
        assert estimator(rewards, groups).tolist() == [0.0, 0.0, 0.0]
    # verl gives the lone member its raw reward; we give it nothing, on purpose.
    assert expected["adv"][0] == [0.999999, 0.999999]
    assert same(rewards[0] / (1 + advantages.EPSILON), expected["adv"][0][0])


@check("gae_masked_obs")
def _gae_steps_over_observations(inputs: Case, expected: Case) -> None:
    mask = mask_of(inputs)
    raw, returns = advantages.gae(
        tensor(inputs["rewards"]), tensor(inputs["values"]), mask, discount=inputs["gamma"], decay=inputs["lam"]
    )
    assert same(raw, expected["raw_adv"])
    assert same(returns, expected["returns"])
    assert same(advantages.whiten(raw, mask), expected["whitened_adv"])


@check("x_gae_masked_obs_skyrl")
def _gae_of_skyrl_takes_observations_for_actions(inputs: Case, expected: Case) -> None:
    base = CASES[inputs["same_inputs_as"]]["inputs"]
    mask, values = mask_of(base), tensor(base["values"])
    options = {"discount": base["gamma"], "decay": base["lam"]}
    ours, _ = advantages.gae(tensor(base["rewards"]), values, mask, **options)
    theirs, returns = advantages.gae(tensor(base["rewards"]), values, torch.ones_like(mask), **options)
    assert same(returns, expected["returns"])
    assert same(advantages.whiten(theirs, mask), expected["adv"])
    assert not torch.allclose(ours[mask], theirs[mask], atol=1e-3)


@check("gae_plain")
def _gae(inputs: Case, expected: Case) -> None:
    rewards, values = tensor(inputs["rewards"]), tensor(inputs["values"])
    everything = torch.ones_like(rewards).bool()
    raw, returns = advantages.gae(rewards, values, everything, discount=inputs["gamma"], decay=inputs["lam"])
    assert same(raw, expected["adv"])
    assert same(returns, expected["returns"])


@check("reinforce_pp")
def _reinforce_pp(inputs: Case, expected: Case) -> None:
    got, returns = advantages.reinforce_pp(tensor(inputs["rewards"]), mask_of(inputs), discount=inputs["gamma"])
    assert same(returns, expected["returns"])
    assert same(got, expected["adv"])


@check("group_infra_failure_exclusion")
def _failures_are_no_members(inputs: Case, expected: Case) -> None:
    rewards, valid = tensor(inputs["rewards"]), torch.tensor(inputs["valid"]).bool()
    one_group = torch.zeros(len(rewards), dtype=torch.long)
    assert same(advantages.grpo(rewards[valid], one_group[valid]), expected["correct_valid_adv"])
    assert same(advantages.grpo(rewards, one_group), expected["biased_if_included"])


@check("kl_estimators")
def _kl(inputs: Case, expected: Case) -> None:
    for name, value in expected.items():
        assert same(kl(tensor(inputs["logp"]), tensor(inputs["ref"]), name), value)


@check("kl_k3_clamp")
def _kl_is_not_clamped(inputs: Case, expected: Case) -> None:
    logprobs, reference = tensor(inputs["logp"]), tensor(inputs["ref"])
    assert same(kl(logprobs, reference), [expected["k3_unclamped"]])
    assert same(kl(logprobs, reference, "k3", 10.0), expected["k3_clamped"])


@check("ppo_clip_dual")
def _ppo(inputs: Case, expected: Case) -> None:
    old, new, adv = tensor(inputs["old"]), tensor(inputs["new"]), tensor(inputs["adv"])
    terms = policy_terms.ppo_clip(new, old, adv, inputs["eps_low"], inputs["eps_high"], inputs["c"])
    assert same(token_mean(terms.loss, mask_of(inputs)), expected["loss"])
    assert same(terms.clipped.double().mean(), expected["clipfrac"])
    assert same(terms.dual_clipped.double().mean(), expected["clipfrac_lower"])
    assert same((old - new).mean(), expected["ppo_kl"])
    assert same((new - old).exp(), expected["ratios"])


@check("ppo_clip_token_terms")
def _ppo_terms(inputs: Case, expected: Case) -> None:
    adv, new = tensor(inputs["adv"]), -tensor(inputs["ppo_kl"])
    terms = policy_terms.ppo_clip(new, torch.zeros_like(new), adv, inputs["lo"], inputs["hi"], inputs["c"])
    assert same(terms.loss, expected["loss"])
    assert same(terms.clipped.double(), expected["clip"])


@check("gspo")
def _gspo(inputs: Case, expected: Case) -> None:
    old, new, adv, mask = tensor(inputs["old"]), tensor(inputs["new"]), tensor(inputs["adv"]), mask_of(inputs)
    terms = policy_terms.gspo(new, old, adv, mask, inputs["eps_low"], inputs["eps_high"])
    loss = aggregate(terms.loss, mask, "seq-mean-token-mean", Denominators.of(mask))
    assert same(loss, expected["loss"])
    assert same(terms.clipped[mask].double().mean(), expected["clipfrac"])
    unbounded = policy_terms.gspo(new, old, torch.ones_like(adv), mask, 1.0, 1e6)
    assert same(-unbounded.loss[:, 0], expected["seq_ratio"])


@check("cispo")
def _cispo(inputs: Case, expected: Case) -> None:
    new = tensor(inputs["new"]).requires_grad_()
    terms = policy_terms.cispo(new, tensor(inputs["old"]), tensor(inputs["adv"]), inputs["eps_low"], inputs["eps_high"])
    loss = token_mean(terms.loss, mask_of(inputs))
    loss.backward()
    assert same(loss.detach(), expected["loss"])
    assert new.grad is not None
    assert same(new.grad, expected["grad_wrt_new"])
    assert same(terms.clipped.double().mean(), expected["clipfrac"])


@check("dppo_kl")
def _dppo(inputs: Case, expected: Case) -> None:
    trainer, engine = tensor(inputs["trainer"]), tensor(inputs["inference"])
    adv = tensor(inputs["adv"])
    terms = policy_terms.dppo(trainer, engine, adv, inputs["mask_low"], inputs["mask_high"], inputs["kl_tau"])
    assert same(terms.loss.sum(), expected["loss"])
    out, mismatch = terms.clipped, kl(engine, trainer)
    assert same(out.double().mean(), expected["is_masked"])
    assert same((out & (adv < 0)).double().mean(), expected["is_masked_low"])
    assert same((out & (adv > 0)).double().mean(), expected["is_masked_high"])
    assert same((adv[out] > 0).double().mean(), expected["masked_advantage_positive"])
    assert same((adv[out] < 0).double().mean(), expected["masked_advantage_negative"])
    assert same(mismatch[out].mean(), expected["masked_mismatch_kl"])
    assert same(mismatch[~out].mean(), expected["unmasked_mismatch_kl"])


@check("loss_aggregation")
def _aggregation(inputs: Case, expected: Case) -> None:
    losses, mask = tensor(inputs["loss"]), mask_of(inputs)
    denominators = Denominators.of(mask)
    for mode in get_args(Aggregation):
        value = expected[mode]
        norm_tokens = losses.shape[-1] if mode == "seq-mean-token-sum-norm" else None
        assert same(aggregate(losses, mask, mode, denominators, norm_tokens), value)
    # A sequence that never had a token is not counted, as in verl. One that lost them all to a rejection is, as in
    # SkyRL: its losses are 0 and the denominators stay.
    sampled = torch.ones_like(mask)
    rejected = aggregate(losses * mask, sampled, "seq-mean-token-sum", Denominators.of(sampled))
    assert same(rejected, expected["seq-mean-token-sum"] * 2 / 3)


@check("tis_token")
def _tis_token(inputs: Case, expected: Case) -> None:
    mask = mask_of(inputs)
    weights, _ = corrections.tis_token(tensor(inputs["log_ratio"]), mask, 0.0, inputs["C"])
    assert same(weights, expected["w"])
    # verl raises weights to 1/C before it computes the effective sample size; ours is of the weights applied.
    raised = weights[mask].clamp(min=1 / inputs["C"])
    assert same(corrections.effective_sample_size(raised), expected["ess"])
    assert corrections.effective_sample_size(weights[mask]) == pytest.approx(0.7294, abs=1e-4)


@check("x_tis_token_skyrl")
def _tis_token_of_skyrl_weighs_masked_tokens(inputs: Case, expected: Case) -> None:
    mask = mask_of(inputs)
    weights, clipped = corrections.tis_token(tensor(inputs["log_ratio"]), mask, 0.0, inputs["C"])
    assert same(weights[mask], tensor(expected["w"])[mask].tolist())
    assert weights[~mask].tolist() == [0.0]
    assert tensor(expected["w"])[~mask].tolist() == [1.0]
    assert same(clipped[mask].double().mean(), expected["clip_high"]["tis_token_clip_high_ratio"])


@check("tis_sequence")
def _tis_sequence(inputs: Case, expected: Case) -> None:
    weights, _ = corrections.tis_sequence(tensor(inputs["log_ratio"]), mask_of(inputs), 0.0, inputs["C"])
    assert same(weights, expected["w"])


@check("tis_clip_low_0.0", "tis_clip_low_0.5")
def _tis_lower_bound(inputs: Case, expected: Case) -> None:
    log_ratio = tensor(inputs["train"]) - tensor(inputs["rollout"])
    everything = torch.ones_like(log_ratio).bool()
    weights, clipped = corrections.tis_token(log_ratio, everything, inputs["lo"], inputs["hi"])
    assert same(weights, expected["w"])
    assert same(clipped.double(), expected["clipfrac"])


@check("icepop")
def _icepop(inputs: Case, expected: Case) -> None:
    log_ratio = tensor(inputs["train"]) - tensor(inputs["rollout"])
    everything = torch.ones_like(log_ratio).bool()
    assert same(corrections.icepop(log_ratio, everything, inputs["lo"], inputs["hi"])[0], expected["w"])


@check("mis_token_k1")
def _mis_token(inputs: Case, expected: Case) -> None:
    mask = mask_of(inputs)
    keep = corrections.token_mask(tensor(inputs["log_ratio"]), mask, *bounds(inputs))
    assert same((keep & mask).double(), expected["mask"])


@check("mis_seq_sum_k1")
def _mis_product(inputs: Case, expected: Case) -> None:
    mask = mask_of(inputs)
    keep = corrections.sequence_mask_product(tensor(inputs["log_ratio"]), mask, *bounds(inputs))
    assert same((keep & mask).double(), expected["mask"])


@check("mis_seq_mean_k1")
def _mis_geometric_tests_the_ratio(inputs: Case, expected: Case) -> None:
    mask, log_ratio = mask_of(inputs), tensor(inputs["log_ratio"])
    low, high = bounds(inputs)
    ours = corrections.sequence_mask_geometric(log_ratio, mask, low, high) & mask
    assert ours.any(dim=-1).tolist() == [True, False]
    # verl tests 1 / ratio against the same bounds, and rejects both.
    theirs = corrections.sequence_mask_geometric(log_ratio, mask, 1 / high, 1 / low) & mask
    assert same(theirs.double(), expected["mask"])


@check("token_hard_mask")
def _token_mask(inputs: Case, expected: Case) -> None:
    mask = mask_of(inputs)
    keep = corrections.token_mask(tensor(inputs["log_ratio"]), mask, 0.5, 2.0)
    assert same(keep.double(), expected["mask"])
    assert same((~keep)[mask].double().mean(), expected["frac"])


@check("seq_mask_geometric")
def _sequence_mask_geometric(inputs: Case, expected: Case) -> None:
    keep = corrections.sequence_mask_geometric(tensor(inputs["log_ratio"]), mask_of(inputs), 0.9, 1.2)
    assert same(keep[:, :1].double(), expected["seq_keep"])


@check("seq_mask_product")
def _sequence_mask_product(inputs: Case, expected: Case) -> None:
    keep = corrections.sequence_mask_product(tensor(inputs["log_ratio"]), mask_of(inputs), 0.5, 2.0)
    assert same(keep[:, :1].double(), expected["seq_keep"])


@check("kk", "kk_equal")
def _partition(inputs: Case, expected: Case) -> None:
    lengths = inputs["seqlens"]
    parts = karmarkar_karp(lengths, inputs["k"], equal_size=inputs["equal_size"])
    sums = sorted(sum(lengths[i] for i in part) for part in parts)
    # A heuristic: how close it comes depends on how ties are broken, so the spread is a bound.
    assert sums[-1] - sums[0] <= expected["max_minus_min"]
    assert sum(sums) == sum(expected["sums"])
    if inputs["equal_size"]:
        assert sums == expected["sums"]
        assert sorted(map(len, parts)) == expected["sizes"]
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))


@check("top_p_support_bias")
def _truncated_sampling_biases_every_ratio(inputs: Case, expected: Case) -> None:
    probabilities = tensor(inputs["probs"])
    kept = probabilities[inputs["top_p_keep"]].sum()
    trainer = probabilities[inputs["sampled"]].log()
    engine = (probabilities[inputs["sampled"]] / kept).log()
    assert same(kept, expected["S"])
    assert same(engine, expected["engine_logp"])
    assert same(trainer, expected["trainer_logp"])
    mask = torch.ones(1, 1).bool()
    weight, _ = corrections.tis_token((trainer - engine).reshape(1, 1), mask, 0.0, 2.0)
    assert same(weight, [[expected["ratio"]]])
    config = {"rollout": {"agent": {"top_p": 0.95, "top_k": -1}}, "loss": {"correction": "tis_token"}}
    assert [finding["level"] for finding in support(config)] == ["error"]
    config["rollout"]["agent"]["top_p"] = 1.0
    assert list(support(config)) == []


def token_mean(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return aggregate(losses, mask, "token-mean", Denominators.of(mask))


def bounds(inputs: Case) -> tuple[float, float]:
    low, high = map(float, inputs["threshold"].split("_"))
    return low, high
