"""However a batch is cut into micro-batches, in whichever layout, its loss and its gradient are the same."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_policy import batch_of, make_trajectory, write_policy

from miles_rl.loss.policy import PolicyLoss
from miles_rl.trainer.learner import Learner
from miles_rl.trainer.options import TorchOptions
from miles_rl.trainer.policy_model import PolicyModel
from miles_rl.types import Batch

LOSSES: list[dict[str, Any]] = [
    {},
    {"aggregation": "token-mean", "dual_clip": 2.0},
    {"aggregation": "seq-mean-token-sum", "advantage": "rloo", "correction": "tis_sequence"},
    {"aggregation": "seq-mean-token-sum-norm", "norm_tokens": 50, "advantage": "dr_grpo", "entropy_coef": 0.1},
    {"policy": "gspo", "rejection": "sequence_geometric", "rejection_low": 0.3, "rejection_high": 3.0},
    {"policy": "cispo", "advantage": "reinforce_pp", "rejection": "token", "kl_coef": 0.1},
    {"policy": "dppo", "old_logprobs": "rollout", "correction": "none"},
    {"correction": "icepop", "advantage": "maxrl"},
]


class Gradients:
    """Runs steps of a learner from the same weights and returns the loss and the whole gradient of each."""

    def __init__(self, folder: str, other: str) -> None:
        fixed: dict[str, Any] = {"device": torch.device("cpu"), "compute_dtype": torch.float32, "temperature": 0.9}
        self._model = PolicyModel(folder, chunk_tokens=8, **fixed)
        self._reference = PolicyModel(other, chunk_tokens=8, trainable=False, **fixed)
        # In float64 the order of a sum is no longer seen, so that what is left would be a real difference.
        self._model.module.double()
        self._model._spec = replace(self._model._spec, compute_dtype=torch.float64)
        self._start = {name: p.detach().clone() for name, p in self._model.named_parameters()}
        self._seen = {name: torch.zeros_like(p) for name, p in self._model.named_parameters()}
        for name, parameter in self._model.named_parameters():
            parameter.register_hook(partial(self._see, name))

    def _see(self, name: str, grad: torch.Tensor) -> None:
        self._seen[name] += grad

    def of(self, batch: Batch, loss: dict[str, Any], **options: Any) -> tuple[float, torch.Tensor]:
        for name, parameter in self._model.named_parameters():
            parameter.data.copy_(self._start[name])
            self._seen[name].zero_()
        learner = Learner(self._model, PolicyLoss(**loss), torch_options(**options), self._reference)
        return learner.step(batch)["train/loss"], torch.cat([g.flatten() for g in self._seen.values()])


def torch_options(**given: Any) -> TorchOptions:
    fixed: dict[str, Any] = {
        "lr": 1e-3,
        "betas": (0.9, 0.98),
        "weight_decay": 0.0,
        "grad_clip": None,
        "warmup_steps": 0,
        "lr_schedule": "constant",
        "schedule_steps": None,
        "max_tokens_per_micro_batch": 10**6,
        "logprob_chunk_tokens": 8,
        "layout": "padded",
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "seed": 0,
        "optimizer_steps_per_batch": 1,
        "temperature": 0.9,
        "reference_model_dir": None,
    }
    return TorchOptions(**(fixed | given))


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory) -> Gradients:
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("policies")
    return Gradients(write_policy(folder / "policy"), write_policy(folder / "reference", seed=1))


span = st.tuples(st.integers(1, 6), st.integers(1, 6))
episodes = st.lists(
    st.tuples(st.integers(0, 2), st.lists(span, min_size=1, max_size=3), st.sampled_from([0.0, 0.5, 1.0])),
    min_size=1,
    max_size=7,
)


@settings(max_examples=40, deadline=None)
@given(
    episodes=episodes,
    loss=st.sampled_from(LOSSES),
    budget=st.integers(1, 60),
    layout=st.sampled_from(["padded", "packed"]),
    seed=st.integers(0, 1000),
)
def test_the_split_into_micro_batches_changes_neither_loss_nor_gradient(
    gradients: Gradients, episodes: list[Any], loss: dict[str, Any], budget: int, layout: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    batch = batch_of(
        *(
            make_trajectory(rng, sample_id=str(i), group_id=group, spans=tuple(spans), reward=reward)
            for i, (group, spans, reward) in enumerate(episodes)
        )
    )
    whole_loss, whole = gradients.of(batch, loss)
    cut_loss, cut = gradients.of(batch, loss, max_tokens_per_micro_batch=budget, layout=layout)
    assert cut_loss == pytest.approx(whole_loss, abs=1e-6, rel=1e-6)
    assert float((cut - whole).abs().max()) <= 1e-6 * max(1.0, float(whole.abs().max()))


def test_the_gradients_compared_are_real(gradients: Gradients) -> None:
    rng = np.random.default_rng(0)
    batch = batch_of(make_trajectory(rng, reward=0.0), make_trajectory(rng, sample_id="t", reward=1.0))
    for loss in LOSSES:
        _, whole = gradients.of(batch, loss)
        assert float(whole.abs().max()) > 1e-3, loss
