from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from miles_rl.trainer.logprobs import HeadSpec, token_logprobs

HIDDEN, VOCAB, TOKENS = 12, 97, 50


def inputs(dtype: torch.dtype = torch.float32, bias: bool = True) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, dtype=dtype, requires_grad=True)
    offset = torch.randn(VOCAB, dtype=dtype, requires_grad=True) if bias else None
    return hidden, weight, offset, torch.randint(0, VOCAB, (TOKENS,))  # pyright: ignore[reportReturnType]


def plain(hidden: torch.Tensor, weight: torch.Tensor, bias: Any, targets: torch.Tensor, spec: HeadSpec) -> Any:
    """The textbook computation, with every logit of the batch at once."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    log_softmax = torch.log_softmax(logits / spec.temperature, dim=-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax.gather(-1, targets[:, None])[:, 0], entropy


SPECS = [
    HeadSpec(chunk_tokens=7),
    HeadSpec(chunk_tokens=TOKENS),
    HeadSpec(chunk_tokens=1000, temperature=0.7),
    HeadSpec(chunk_tokens=16, temperature=1.3, scale=0.3, softcap=2.0),
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_equal_the_plain_computation(spec: HeadSpec, bias: bool) -> None:
    spec = replace(spec, compute_dtype=torch.float64)
    hidden, weight, offset, targets = inputs(torch.float64, bias)
    leaves = [t for t in (hidden, weight, offset) if t is not None]
    mix = torch.randn(TOKENS, dtype=torch.float64)
    wanted, wanted_entropy = plain(hidden, weight, offset, targets, spec)
    got, entropy = token_logprobs(hidden, weight, offset, targets, spec, entropy_gradient=True)
    assert torch.allclose(got, wanted, atol=1e-12)
    assert torch.allclose(entropy, wanted_entropy, atol=1e-12)
    wanted_grads = torch.autograd.grad((wanted * mix + 0.3 * wanted_entropy * mix**2).sum(), leaves)
    grads = torch.autograd.grad((got * mix + 0.3 * entropy * mix**2).sum(), leaves)
    for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
        assert torch.allclose(grad, wanted_grad, atol=1e-10)


def test_without_an_entropy_gradient_the_logprobs_still_have_theirs() -> None:
    spec = HeadSpec(chunk_tokens=7)
    hidden, weight, offset, targets = inputs()
    logprobs, entropy = token_logprobs(hidden, weight, offset, targets, spec)
    assert not entropy.requires_grad
    grads = torch.autograd.grad(logprobs.sum(), [hidden, weight])
    wanted = torch.autograd.grad(plain(hidden, weight, offset, targets, spec)[0].sum(), [hidden, weight])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(grads, wanted, strict=True))


class LargestLogits(TorchDispatchMode):
    """Notes the most rows of any tensor whose last dimension is the vocabulary, the head's own weight aside."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.ndim >= 2 and tensor.shape[-1] == VOCAB:
                self.rows = max(self.rows, tensor.numel() // VOCAB)
        return result


@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_never_more_rows_of_logits_exist_than_a_chunk_holds(entropy_gradient: bool) -> None:
    hidden, weight, _, targets = inputs(bias=False)
    chunk = 13  # above HIDDEN, so that the transposed weight does not hide a larger tensor
    with LargestLogits() as largest:
        logprobs, entropy = token_logprobs(
            hidden, weight, None, targets, HeadSpec(chunk), entropy_gradient=entropy_gradient
        )
        (logprobs.sum() + (entropy.sum() if entropy_gradient else 0)).backward()
    assert largest.rows == chunk
    with LargestLogits() as largest:
        plain(hidden, weight, None, targets, HeadSpec(chunk))[0].sum().backward()
    assert largest.rows == TOKENS  # the instrument sees the textbook's


def test_products_in_bfloat16_keep_the_softmax_in_float32() -> None:
    hidden, weight, offset, targets = inputs()
    spec = HeadSpec(16, compute_dtype=torch.bfloat16)
    got, entropy = token_logprobs(hidden, weight, offset, targets, spec)
    wanted, _ = plain(hidden, weight, offset, targets, spec)
    assert got.dtype == entropy.dtype == torch.float32
    assert torch.allclose(got, wanted, atol=0.1)
    got.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
