"""The trainer on a CUDA device: the same figures as on the CPU, in float32 and, roughly, in bfloat16."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_policy import make_batch, make_trainer, write_policy

from miles_rl.loss.policy import PolicyLoss
from miles_rl.trainer.logprobs import HeadSpec, token_logprobs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}


def metrics_of(policy: str, device: str, steps: int = 3, **options: Any) -> list[dict[str, float]]:
    trainer = make_trainer(PolicyLoss(kl_coef=0.01, entropy_coef=0.001), device=device, **options)
    trainer.load(policy, None)
    return [dict(trainer.step(make_batch(np.random.default_rng(step)))) for step in range(steps)]


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("optimizer_steps", [1, 2])
def test_steps_in_float32_equal_those_on_the_cpu(tmp_path: Path, layout: str, optimizer_steps: int) -> None:
    policy = write_policy(tmp_path, **SHAPE)
    options: dict[str, Any] = {"layout": layout, "optimizer_steps_per_batch": optimizer_steps}
    for here, there in zip(metrics_of(policy, "cuda", **options), metrics_of(policy, "cpu", **options), strict=True):
        for name in here.keys() - {"perf/train_s"}:
            assert here[name] == pytest.approx(there[name], rel=1e-3, abs=1e-5), name


def test_steps_in_bfloat16_are_near_those_in_float32(tmp_path: Path) -> None:
    policy = write_policy(tmp_path, **SHAPE)
    exact, rounded = metrics_of(policy, "cuda"), metrics_of(policy, "cuda", dtype="bfloat16")
    for name in ("train/entropy", "train/train_rollout_logprob_abs_diff", "train/grad_norm"):
        assert rounded[0][name] == pytest.approx(exact[0][name], rel=0.1), name
    assert rounded[0]["train/loss"] != exact[0]["train/loss"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_run_goes_on_as_it_would_have(tmp_path: Path, dtype: str) -> None:
    trainer = make_trainer(PolicyLoss(), device="cuda", dtype=dtype)
    trainer.load(write_policy(tmp_path / "policy", **SHAPE), None)
    trainer.step(make_batch(np.random.default_rng(0)))
    trainer.export(str(tmp_path / "model"))
    trainer.save(str(tmp_path))
    expected = trainer.step(make_batch(np.random.default_rng(1)))
    trainer.load(str(tmp_path / "model"), str(tmp_path))
    resumed = trainer.step(make_batch(np.random.default_rng(1)))
    for name in resumed.keys() - {"perf/train_s"}:
        assert resumed[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name


def test_a_long_batch_never_holds_all_its_logits() -> None:
    num_tokens, hidden_size, vocab_size, chunk_tokens = 16384, 256, 65536, 1024
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab_size, hidden_size, device="cuda", requires_grad=True)
    targets = torch.randint(0, vocab_size, (num_tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    spec = HeadSpec(chunk_tokens, compute_dtype=torch.bfloat16)
    token_logprobs(hidden, weight, None, targets, spec)[0].sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    logits_of_all = num_tokens * vocab_size * 4
    assert logits_of_all == 2**32
    assert peak < logits_of_all / 3
