"""Reads a Hugging Face folder into plain tensors, whole or not at all.

Files are read into memory rather than mapped: a file that is cut short while it is mapped kills the process with
SIGBUS, and an engine must outlive a bad update.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes

Tensors = dict[str, torch.Tensor]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class WeightsError(Exception):
    """A folder does not hold a complete and sound set of weights for the model."""


def read_config(model_dir: str | Path) -> dict[str, Any]:
    """`config.json` of the folder. Raises `WeightsError` if it is missing or not JSON."""
    path = Path(model_dir) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise WeightsError(f"{path}: not a JSON object")
    return config


def read_tensors(model_dir: str | Path) -> Tensors:
    """All tensors of the folder on the CPU, under the names in its files.

    Takes `model.safetensors`, shards with an index, or `pytorch_model.bin`. Raises `WeightsError` naming what is
    missing, torn, or holds a NaN or an infinity.
    """
    folder = Path(model_dir)
    index_path = folder / "model.safetensors.index.json"
    named: set[str] | None = None
    if index_path.is_file():
        named, files = _read_index(index_path)
    else:
        files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise WeightsError(f"{folder}: no .safetensors and no pytorch_model.bin there")
    tensors: Tensors = {}
    for path in files:
        tensors.update(_read_file(path))
    if named is not None and (missing := named - tensors.keys()):
        raise WeightsError(f"{index_path}: tensor {min(missing)!r} is in no file")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise WeightsError(f"{folder}: tensor {name!r} holds a NaN or an infinity")
    return tensors


def _read_index(path: Path) -> tuple[set[str], list[Path]]:
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        return set(weight_map), [path.parent / Path(name).name for name in sorted(set(weight_map.values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path}: {error}") from error


def _read_file(path: Path) -> Tensors:
    try:
        if path.suffix == ".safetensors":
            return load_bytes(path.read_bytes())
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise WeightsError(f"{path}: {error}") from error


def check_shapes(expected: Mapping[str, tuple[int, ...]], tensors: Tensors) -> None:
    """Raises `WeightsError` naming the first tensor that is missing, surplus or of another shape."""
    for name, shape in expected.items():
        if name not in tensors:
            raise WeightsError(f"tensor {name!r} is missing")
        if tuple(tensors[name].shape) != shape:
            raise WeightsError(f"tensor {name!r} has shape {tuple(tensors[name].shape)}, the model needs {shape}")
    if surplus := tensors.keys() - expected.keys():
        raise WeightsError(f"tensor {min(surplus)!r} does not belong to the model")


def choose_dtype(name: str, config: Mapping[str, Any]) -> torch.dtype:
    """The torch dtype for `name`; `auto` takes the one that the config states, else float32."""
    if name == "auto":
        name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise WeightsError(f"dtype: {name}; choose one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def eos_token_ids(model_dir: str | Path, config: Mapping[str, Any]) -> frozenset[int]:
    """Ids that end a reply, of `config.json` and `generation_config.json` together."""
    found: set[int] = set()
    sources: list[Mapping[str, Any]] = [config]
    path = Path(model_dir) / "generation_config.json"
    if path.is_file():
        try:
            sources.append(json.loads(path.read_text()))
        except ValueError as error:
            raise WeightsError(f"{path}: {error}") from error
    for source in sources:
        value = source.get("eos_token_id")
        found.update([value] if isinstance(value, int) else value or [])
    return frozenset(found)


def context_length(config: Mapping[str, Any]) -> int:
    """The most tokens of prompt and reply together that the model was made for; 4096 if its config does not say."""
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        if isinstance(config.get(key), int):
            return config[key]
    return 4096
