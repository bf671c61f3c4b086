"""A policy that is already there: a folder in Hugging Face form, checked before anything is started on it."""

from __future__ import annotations

import json
from pathlib import Path

from miles_rl.model.base import Progress
from sandbox_env.suites.base import Suite


class HfCheckpoint:
    """A `PolicySource`: the folder `path` with config, safetensors weights, and a tokenizer with a chat template."""

    def __init__(self, path: str) -> None:
        self._path = path

    def prepare(self, suite: Suite, progress: Progress | None = None) -> str:
        """`path` as an absolute path, checked; nothing is made. Raises `ValueError` naming `model.path`."""
        from miles_rl.rollout.chat import ChatRenderer

        folder = Path(self._path).expanduser().resolve()
        if not folder.is_dir():
            raise ValueError(f"model.path: {self._path}; no such folder, give one with a Hugging Face model")
        if missing := _missing_weights(folder):
            raise ValueError(f"model.path: {self._path}; it lacks {missing}, give a complete Hugging Face model folder")
        ChatRenderer(str(folder))
        return str(folder)


def _missing_weights(folder: Path) -> str:
    """Names of the first weights that are not there, or an empty text."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return "" if (folder / "model.safetensors").is_file() else "model.safetensors"
    try:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError):
        return "a readable model.safetensors.index.json"
    return next((shard for shard in shards if not (folder / shard).is_file()), "")
