"""What the trainer writes: a Hugging Face folder of the weights, and the state that a later run goes on from."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from miles_rl.weights.checksum import checksum

STATE_FILE = "trainer_state.pt"
STATE_FORMAT = 1
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "additional_chat_templates",
)


def export_model(module: Any, source_dir: Path, target_dir: Path, dtype: torch.dtype) -> str:
    """Write `module` in `dtype` as a complete Hugging Face folder and return its checksum, read back from the disk.

    Tokenizer files are copied from `source_dir`. The folder is written under a temporary name beside `target_dir` and
    renamed when it is whole; an older folder of that name is replaced. `ValueError` names a tensor that is not finite.
    """
    hidden = target_dir.with_name(f".{target_dir.name}.{os.getpid()}.tmp")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    try:
        module.save_pretrained(hidden, state_dict=_cast(module.state_dict(), dtype))
        _set_dtype(hidden / "config.json", dtype)
        _copy_tokenizer(source_dir, hidden)
        digest = checksum(stored_tensors(hidden))
        _replace(hidden, target_dir)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return digest


def stored_tensors(model_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in the safetensors files of a Hugging Face folder, under its name there."""
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a dict
                yield name, file.get_tensor(name)


def write_state(target_dir: Path, state: dict[str, Any]) -> None:
    """Write `state` into `target_dir`, whole or not at all, together with the state of every random generator."""
    target_dir.mkdir(parents=True, exist_ok=True)
    hidden = target_dir / f".{STATE_FILE}.tmp"
    torch.save({"format": STATE_FORMAT, "rng": rng_state(), **state}, hidden)
    os.replace(hidden, target_dir / STATE_FILE)


def read_state(checkpoint_dir: Path) -> dict[str, Any]:
    """What `write_state` wrote, on the CPU. Raises `FileNotFoundError` or `ValueError` naming the file."""
    path = checkpoint_dir / STATE_FILE
    if not path.is_file():
        raise FileNotFoundError(f"trainer: {checkpoint_dir} holds no state of a trainer ({STATE_FILE} is missing)")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"trainer: {path} cannot be read: {type(error).__name__}; take an older checkpoint") from error
    if state.get("format") != STATE_FORMAT:
        raise ValueError(f"trainer: {path} has format {state.get('format')}, this version reads {STATE_FORMAT}")
    return state


def weights_checksum(parameters: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> str:
    """Checksum of live parameters as an export in `dtype` would hold them, to tell whether a state belongs to them."""
    return checksum((name, parameter.detach().to(dtype)) for name, parameter in parameters)


def rng_state() -> dict[str, Any]:
    """State of the generators of Python, numpy and torch, in types that can be read back without running code."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def restore_rng_state(state: dict[str, Any]) -> None:
    """Undo everything that has drawn from a generator since `rng_state`."""
    name, keys, position, has_gauss, gauss = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _cast(state: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """`state` with its floating-point tensors in `dtype`. Tensors that shared memory still do: they are stored once."""
    done: dict[tuple[int, torch.Size], torch.Tensor] = {}
    result: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in done:
            done[key] = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor
        result[name] = done[key]
    return result


def _set_dtype(config_file: Path, dtype: torch.dtype) -> None:
    config = json.loads(config_file.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _copy_tokenizer(source_dir: Path, target_dir: Path) -> None:
    for path in sorted({path for pattern in TOKENIZER_FILES for path in source_dir.glob(pattern)}):
        target = target_dir / path.name
        if path.is_dir():
            shutil.copytree(path, target, dirs_exist_ok=True)
        elif not target.exists():
            shutil.copyfile(path, target)


def _replace(new: Path, target: Path) -> None:
    """Rename `new` to `target`. A folder cannot be renamed onto a full one, so an older one is moved aside first."""
    aside = target.with_name(f".{target.name}.{os.getpid()}.old")
    with contextlib.suppress(FileNotFoundError):
        os.replace(target, aside)
    os.replace(new, target)
    shutil.rmtree(aside, ignore_errors=True)
