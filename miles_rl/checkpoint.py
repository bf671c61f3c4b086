"""A checkpoint of a run: the policy, the trainer's state, and where the data stands, complete or not there at all.

checkpoints/step-000040/
  model/          a Hugging Face folder
  trainer files   optimizer, scheduler, RNG
  loop.json       version, cursor of the data, hash of the training tasks; written last
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOOP_FILE = "loop.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One complete checkpoint. `version` is also the number of optimizer steps done."""

    path: Path
    version: int
    cursor: Mapping[str, Any]
    train_hash: str

    @property
    def model_dir(self) -> Path:
        """The Hugging Face folder of the policy."""
        return self.path / "model"

    @classmethod
    def newest(cls, run_dir: Path) -> Checkpoint:
        """The newest complete checkpoint of a run. `FileNotFoundError` names what is missing; never a fresh start."""
        if not run_dir.is_dir():
            raise FileNotFoundError(f"resume: {run_dir} is no folder; give the folder of a run, like runs/NAME/STAMP")
        complete = sorted((run_dir / "checkpoints").glob(f"step-*/{LOOP_FILE}"))
        if not complete:
            raise FileNotFoundError(
                f"resume: {run_dir} has no complete checkpoint; give a run that saved one (checkpoint_every)"
            )
        loop = json.loads(complete[-1].read_text())
        return cls(complete[-1].parent, loop["version"], loop["cursor"], loop["train_hash"])

    @staticmethod
    def write(
        run_dir: Path, version: int, cursor: Mapping[str, Any], train_hash: str, save: Callable[[Path], None], keep: int
    ) -> Path:
        """Fill a hidden folder with `save`, then rename it: complete or not there. The newest `keep` stay."""
        folder = run_dir / "checkpoints"
        target, hidden = folder / f"step-{version:06d}", folder / f".step-{version:06d}.tmp"
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
        save(hidden)
        with (hidden / LOOP_FILE).open("w") as file:
            json.dump({"version": version, "cursor": cursor, "train_hash": train_hash}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(hidden, target)
        for old in sorted(folder.glob("step-*"))[:-keep]:
            shutil.rmtree(old)
        return target
