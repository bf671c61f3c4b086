"""Writes a small Qwen3 with random weights as a Hugging Face folder, for tests and benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from miles_rl.engine.embedded.qwen3 import Qwen3Config

SMALL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 524,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "eos_token_id": 1,
    "dtype": "float32",
}
"""0.85 million parameters."""


def write_random_qwen3(folder: str | Path, seed: int = 0, *, scale: float = 0.1, **changes: Any) -> str:
    """Write config and weights to `folder`, made if missing; returns it as text. `changes` go over `SMALL`."""
    config = {**SMALL, **changes}
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in Qwen3Config.parse(config).tensor_shapes().items():
        tensor = torch.randn(shape, generator=generator) * scale
        tensors[name] = tensor + 1.0 if "norm" in name else tensor
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config, indent=2))
    return str(path)
