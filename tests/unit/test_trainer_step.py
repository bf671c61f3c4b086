"""What one step of the trainer does to the policy, and what it tells."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_policy import VERSION, VOCAB_SIZE, batch_of, make_batch, make_trainer, make_trajectory, write_policy

from miles_rl.loss.base import LossNeeds
from miles_rl.loss.policy import PolicyLoss
from miles_rl.trainer.base import NonFiniteError
from miles_rl.trainer.torch import TorchTrainer
from miles_rl.types import Batch, StopReason


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_policy(tmp_path_factory.mktemp("policy"))


def loaded(policy: str, loss: Any = None, **options: Any) -> TorchTrainer:
    trainer = make_trainer(loss or PolicyLoss(), **options)
    trainer.load(policy, None)
    return trainer


def weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    assert trainer._session is not None
    return {name: p.detach().clone() for name, p in trainer._session._model.named_parameters()}


def batch(seed: int = 0) -> Batch:
    return make_batch(np.random.default_rng(seed))


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    return max(float((before[name] - after[name]).abs().max()) for name in before)


def test_a_policy_learns_which_token_is_rewarded(policy: str) -> None:
    trainer = loaded(policy, lr=3e-2)
    rng, wanted, prompt = np.random.default_rng(0), 7, [3, 5, 11]
    assert trainer._session is not None
    module = trainer._session._model.module

    def distribution() -> np.ndarray:
        with torch.no_grad():
            probabilities = torch.softmax(module(torch.tensor([prompt])).logits[0, -1].double(), -1).numpy()
        return probabilities / probabilities.sum()

    before = distribution()[wanted]
    rewards = []
    for step in range(40):
        sampled = rng.choice(VOCAB_SIZE, 16, p=distribution())
        episodes = [make_trajectory(rng, sample_id=str(i), spans=((3, 1),), version=step) for i in range(16)]
        for episode, token in zip(episodes, sampled, strict=True):
            episode.token_ids[:] = [*prompt, token]
            episode.logprobs[3] = np.log(distribution()[token])
        scored = [
            make_scored(episode, float(token in (wanted, wanted + 1)))
            for episode, token in zip(episodes, sampled, strict=True)
        ]
        metrics = trainer.step(batch_of(*scored, version=step))
        assert metrics["train/train_rollout_kl"] < 1e-8
        rewards.append(metrics["rollout/reward_mean"])
    assert before < 0.2
    assert np.mean(rewards[-5:]) > 0.9


def make_scored(episode: Any, reward: float) -> Any:
    fields = {name: getattr(episode, name) for name in type(episode).__slots__}
    return type(episode)(**(fields | {"reward": reward}))


def test_figures_are_those_of_a_plain_computation(policy: str) -> None:
    given, temperature = batch(), 0.7
    metrics = loaded(policy, temperature=temperature).step(given)
    module = transformers.AutoModelForCausalLM.from_pretrained(policy).eval()
    trainer, rollout, entropies = [], [], []
    loss = torch.zeros(())
    for group in given.groups:
        rewards = np.array([t.reward for t in group.trajectories])
        for trajectory in group.trajectories:
            advantage = (trajectory.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            ids = torch.from_numpy(trajectory.token_ids).long()
            log_softmax = torch.log_softmax(module(ids[None]).logits[0] / temperature, -1)
            where = np.flatnonzero(trajectory.loss_mask)
            logprobs, sampled = log_softmax[where - 1, ids[where]], torch.from_numpy(trajectory.logprobs[where])
            weight = (logprobs - sampled).exp().clamp(max=2).detach()
            loss = loss - (weight * advantage * (logprobs - logprobs.detach()).exp()).mean() / 12
            trainer.append(logprobs.detach().double())
            rollout.append(sampled.double())
            entropies.append(-(log_softmax.exp() * log_softmax).sum(-1)[where - 1].detach())
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    ratio = torch.cat(trainer) - torch.cat(rollout)
    k3 = ratio.exp() - 1 - ratio
    weights = ratio.exp().clamp(0, 2)
    expected = {
        "train/loss": loss.detach(),
        "train/grad_norm": gradient.norm(),
        "train/train_rollout_kl": k3.mean(),
        "train/train_rollout_kl_p50": k3.sort().values[-(-len(k3) // 2) - 1],
        "train/train_rollout_kl_p99": k3.sort().values[-(-len(k3) * 99 // 100) - 1],
        "train/train_rollout_kl_max": k3.max(),
        "train/train_rollout_logprob_abs_diff": ratio.abs().mean(),
        "train/train_rollout_logprob_abs_diff_max": ratio.abs().max(),
        "train/tis_weight_mean": weights.mean(),
        "train/tis_clip_ratio": (ratio.exp() > 2).double().mean(),
        "train/ess": weights.sum() ** 2 / (len(weights) * weights.square().sum()),
        "train/entropy": torch.cat(entropies).mean(),
        "train/num_policy_tokens": len(k3),
        "train/num_tokens": sum(len(t.token_ids) for t in given.trajectories),
        "train/num_trajectories": 12,
        "train/clip_ratio": 0,
        "train/lr": 1e-3,
        "rollout/reward_mean": np.mean([t.reward for t in given.trajectories]),
        "async/staleness_mean": 1,
        "async/staleness_max": 1,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-4, abs=1e-6), name
    assert metrics["train/tis_clip_ratio"] > 0
    assert metrics["perf/train_s"] > 0
    assert all(np.isfinite(value) for value in metrics.values())


def test_groups_that_teach_nothing_are_counted_apart(policy: str) -> None:
    rng = np.random.default_rng(0)
    episodes = [
        make_trajectory(rng, sample_id=f"{group}-{i}", group_id=group, reward=reward, version=version, stop_reason=stop)
        for group, rewards in enumerate([(0, 1), (1, 1, 1), (0, 0), (1,), (0,)])
        for i, reward in enumerate(rewards)
        for version, stop in [(VERSION - group, StopReason.COMPLETED if group else StopReason.TURN_TRUNCATED)]
    ]
    metrics = loaded(policy).step(batch_of(*episodes))
    assert metrics["train/zero_variance_group_ratio"] == pytest.approx(2 / 5)
    assert metrics["train/singleton_group_ratio"] == pytest.approx(2 / 5)
    assert metrics["rollout/truncated_ratio"] == pytest.approx(2 / 9)
    assert metrics["async/staleness_max"] == 5


class SkipNothing(PolicyLoss):
    """The same loss, that does not tell the trainer where there is no gradient."""

    @property
    def needs(self) -> LossNeeds:
        needs = super().needs
        return LossNeeds(needs.old_logprobs, needs.reference, needs.entropy_gradient, False)


def test_skipping_the_backward_pass_of_rows_without_advantage_changes_nothing(policy: str) -> None:
    skipping, thorough = loaded(policy), loaded(policy, SkipNothing())
    for seed in range(3):
        fast, slow = skipping.step(batch(seed)), thorough.step(batch(seed))
        names = fast.keys() - {"perf/train_s"}
        assert {n: fast[n] for n in names} == pytest.approx({n: slow[n] for n in names}, rel=1e-4, abs=1e-6)
    assert moved(weights(skipping), weights(thorough)) < 1e-5


def test_a_batch_without_any_advantage_lets_momentum_go_on(policy: str) -> None:
    rng = np.random.default_rng(0)
    equal = batch_of(*(make_trajectory(rng, sample_id=str(i)) for i in range(4)))
    trainer = loaded(policy)
    before = weights(trainer)
    metrics = trainer.step(equal)
    assert metrics["train/grad_norm"] == 0
    assert moved(before, weights(trainer)) == 0
    trainer.step(batch())
    before = weights(trainer)
    trainer.step(equal)
    assert moved(before, weights(trainer)) > 0


def test_the_gradient_is_clipped_to_the_given_norm_and_told_unclipped(policy: str) -> None:
    trainer = loaded(policy, grad_clip=1e-3)
    unclipped = loaded(policy, grad_clip=None).step(batch())["train/grad_norm"]
    assert trainer.step(batch())["train/grad_norm"] == pytest.approx(unclipped, rel=1e-5)
    assert unclipped > 1e-2
    assert trainer._session is not None
    moments = trainer._session._learner.state()["moments"]
    norm = float(torch.cat([m["exp_avg"].flatten() for m in moments.values()]).norm())
    assert norm == pytest.approx((1 - 0.9) * 1e-3, rel=1e-3)  # the first moment is (1 - beta) times the gradient


def test_weight_decay_is_for_matrices_only(policy: str) -> None:
    rng = np.random.default_rng(0)
    trainer = loaded(policy, weight_decay=0.5, lr=1e-2)
    before = weights(trainer)
    trainer.step(batch_of(*(make_trajectory(rng, sample_id=str(i)) for i in range(2))))  # no gradient: decay alone
    after = weights(trainer)
    for name, value in before.items():
        assert torch.allclose(after[name], value * (0.995 if value.ndim >= 2 else 1.0), atol=1e-6), name


def test_rates_follow_the_schedule_and_its_end_is_an_error(policy: str) -> None:
    trainer = loaded(policy, lr=1.0e-4, lr_schedule="linear", warmup_steps=2, schedule_steps=4)
    rates = [trainer.step(batch())["train/lr"] for _ in range(4)]
    assert rates == pytest.approx([0.5e-4, 1e-4, 1e-4, 0.5e-4])
    with pytest.raises(ValueError, match=r"^trainer\.lr_schedule: linear; it has ended after 4 optimizer steps"):
        trainer.step(batch())


def test_two_steps_per_batch_make_the_clip_act_and_keep_the_groups(policy: str) -> None:
    given = batch()
    trainer = loaded(policy, lr=3e-2, optimizer_steps_per_batch=2)
    metrics = trainer.step(given)
    assert metrics["train/clip_ratio"] > 0
    assert trainer._session is not None
    assert trainer._session._learner.num_optimizer_steps == 2
    # The divergence from the engine is that of the weights before the batch, not of those moved halfway.
    assert metrics["train/train_rollout_kl"] == pytest.approx(
        loaded(policy).step(given)["train/train_rollout_kl"], rel=1e-5
    )
    with pytest.raises(
        ValueError, match=r"optimizer_steps_per_batch: 13; a batch has only 12 trajectories: give fewer"
    ):
        loaded(policy, optimizer_steps_per_batch=13).step(given)


def test_a_reference_holds_the_policy_back(policy: str) -> None:
    rng = np.random.default_rng(0)
    equal = batch_of(*(make_trajectory(rng, sample_id=str(i)) for i in range(4)))
    trainer = loaded(policy, PolicyLoss(kl_coef=1.0))
    first = trainer.step(batch())
    assert first["train/reference_kl"] == pytest.approx(0, abs=1e-9)
    later = [trainer.step(equal)["train/reference_kl"] for _ in range(30)]
    assert max(later[:3]) > 0
    assert later[-1] < 0.2 * max(later)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_loss_that_is_not_finite_stops_the_step_and_names_the_samples(policy: str, layout: Any) -> None:
    trainer = loaded(policy, layout=layout, max_tokens_per_micro_batch=1)
    assert trainer._session is not None
    given = batch()
    culprit = given.trajectories[5]
    culprit.token_ids[0] = VOCAB_SIZE - 1
    for other in given.trajectories:
        if other is not culprit:
            other.token_ids[other.token_ids == VOCAB_SIZE - 1] = 0
    embedding = trainer._session._model.module.get_input_embeddings().weight
    untied = torch.nn.Parameter(embedding.detach().clone())
    trainer._session._model._head.weight = untied
    with torch.no_grad():
        embedding[VOCAB_SIZE - 1] = float("nan")
    before = weights(trainer)
    with pytest.raises(NonFiniteError) as caught:
        trainer.step(given)
    assert caught.value.sample_ids == (culprit.sample_id,)
    assert str(caught.value) == (
        f"trainer: train/loss is nan; the step was not taken; samples in it: {culprit.sample_id}"
    )
    assert all(torch.equal(before[n].nan_to_num(), w.nan_to_num()) for n, w in weights(trainer).items())


def test_a_gradient_that_is_not_finite_stops_the_step_and_names_the_batch(policy: str) -> None:
    trainer = loaded(policy)
    assert trainer._session is not None
    before = weights(trainer)
    first = next(iter(trainer._session._model.module.parameters()))
    handle = first.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(NonFiniteError, match=r"train/grad_norm is (inf|nan); .* g0-0, g0-1, .* and 4 more$") as caught:
        trainer.step(batch())
    assert len(caught.value.sample_ids) == 12
    assert moved(before, weights(trainer)) == 0
    handle.remove()
    assert np.isfinite(trainer.step(batch())["train/grad_norm"])


def test_the_error_survives_a_process_boundary() -> None:
    import pickle

    error = NonFiniteError("train/loss", float("inf"), ["a", "b"])
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.sample_ids == ("a", "b")
