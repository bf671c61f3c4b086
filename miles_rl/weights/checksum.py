"""A checksum of a set of weights, equal on both sides of a weight update if and only if the tensors are equal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch


def checksum(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over name, dtype, shape and bytes of each tensor, in order of names. Returns 64 hex digits.

    Raises `ValueError` naming the tensor if one holds a NaN or an infinity: such weights are never published.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"weights: tensor {name!r} holds a NaN or an infinity")
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
