"""A checkpoint of a run: the policy, the trainer's state and the ledger; complete and checked, or not there at all.

checkpoints/step-000040/
  model/            a Hugging Face folder
  trainer_state.pt  optimizer, scheduler, RNG
  ledger.sqlite     every sample up to here, and where the data stands
  loop.json         version, hash of the training tasks, the evaluation before training, and size and SHA-256 of every
                    other file; written last

It is filled under a hidden name. `commit` syncs every file and folder to the disk and then renames, so a run that is
killed at any moment leaves checkpoints that are whole, and at most a hidden folder that nobody reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

LOOP_FILE = "loop.json"
FOLDER = "checkpoints"
_STEP = re.compile(r"step-(\d{6,})")
_READERS = 8
_GIB = 2**30


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written. One line: which, what is wrong, and what to do."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One complete checkpoint. `version` is also the number of optimizer steps done."""

    path: Path
    version: int
    train_hash: str
    before: Mapping[str, Any]
    """The evaluation before training, as `Evaluation.as_dict` gives it."""

    @property
    def model_dir(self) -> Path:
        """The Hugging Face folder of the policy."""
        return self.path / "model"

    @property
    def run_dir(self) -> Path:
        """The folder of the run that wrote it; the checkpoint itself if it was copied away from its run."""
        path = self.path.absolute()
        return path.parents[1] if path.parent.name == FOLDER else path

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """The checkpoint at `path`: a checkpoint folder, or a run's folder, which means its newest.

        Every file is read and compared with its size and SHA-256. `CheckpointError` if the one that is meant is
        missing or torn, with the newest older one that is whole, if there is one; never another one in its place.
        """
        if not path.is_dir():
            raise CheckpointError(f"{path} is no folder; give the folder of a run, like runs/NAME/STAMP")
        if _STEP.fullmatch(path.name) or (path / LOOP_FILE).exists():
            wanted = path
        elif steps := _steps(path):
            wanted = steps[-1]
        else:
            raise CheckpointError(f"{path} has no complete checkpoint; {_without_any(path)}")
        try:
            return cls._read(wanted)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {_offer(wanted)}") from None

    @classmethod
    def _read(cls, path: Path) -> Checkpoint:
        """Read and verify one folder."""
        try:
            loop = json.loads((path / LOOP_FILE).read_text())
            files = {name: (entry["bytes"], entry["sha256"]) for name, entry in loop["files"].items()}
            checkpoint = cls(path, int(loop["version"]), str(loop["train_hash"]), dict(loop["before"]))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is torn: {LOOP_FILE} is missing") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            text = " ".join(str(error).split())
            raise CheckpointError(f"{path} is torn: {LOOP_FILE} cannot be read ({text})") from None
        for name, (size, _) in files.items():
            if not (path / name).is_file():
                raise CheckpointError(f"{path} is torn: {name} is missing")
            if (found := (path / name).stat().st_size) != size:
                raise CheckpointError(f"{path} is torn: {name} has {found} bytes and should have {size}")
        with ThreadPoolExecutor(_READERS) as pool:
            for name, found in zip(files, pool.map(_digest, (path / name for name in files)), strict=True):
                if found != files[name][1]:
                    raise CheckpointError(f"{path} is torn: the content of {name} has changed (SHA-256 {found[:12]})")
        return checkpoint

    @staticmethod
    def begin(run_dir: Path, version: int) -> Path:
        """An empty hidden folder to write the checkpoint of `version` into. What a killed run left is removed."""
        for leftover in (run_dir / FOLDER).glob(".step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        hidden = _hidden(run_dir, version)
        hidden.mkdir(parents=True)
        return hidden

    @staticmethod
    def commit(hidden: Path, version: int, train_hash: str, before: Mapping[str, Any], keep: int) -> Path:
        """Make what `begin` gave, and others have filled, a checkpoint. The newest `keep` stay. Returns its folder."""
        names = sorted(p.relative_to(hidden).as_posix() for p in hidden.rglob("*") if p.is_file())
        with ThreadPoolExecutor(_READERS) as pool:
            digests = list(pool.map(_digest, (hidden / name for name in names)))
        files = {
            name: {"bytes": (hidden / name).stat().st_size, "sha256": digest}
            for name, digest in zip(names, digests, strict=True)
        }
        loop = {"version": version, "train_hash": train_hash, "before": dict(before), "files": files}
        (hidden / LOOP_FILE).write_text(json.dumps(loop, indent=1) + "\n")
        for path in (*hidden.rglob("*"), hidden):
            _sync(path)
        target = hidden.with_name(f"step-{version:06d}")
        os.replace(hidden, target)
        _sync(target.parent)
        for old in _steps(target.parent.parent)[:-keep]:
            _remove(old)
        return target

    @staticmethod
    @contextlib.contextmanager
    def attempt(run_dir: Path, version: int) -> Iterator[None]:
        """Around `begin`, the writing and `commit`: if one of them fails, no hidden folder is left.

        The exception becomes a `CheckpointError` that tells where, how much space is free there, and what a resume
        would go on from.
        """
        try:
            yield
        except BaseException as error:
            shutil.rmtree(_hidden(run_dir, version), ignore_errors=True)
            if isinstance(error, Exception):
                raise CheckpointError(_unwritten(run_dir, version, error)) from error
            raise

    @staticmethod
    def kept(run_dir: Path) -> list[int]:
        """Versions of the checkpoints that a run has, the oldest first."""
        return [_version(path) for path in _steps(run_dir)]


def _hidden(run_dir: Path, version: int) -> Path:
    return run_dir / FOLDER / f".step-{version:06d}.tmp"


def _steps(run_dir: Path) -> list[Path]:
    return sorted((p for p in (run_dir / FOLDER).glob("step-*") if _STEP.fullmatch(p.name)), key=_version)


def _version(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove a checkpoint so that a kill in between does not leave a torn one under its name."""
    hidden = path.with_name(f".{path.name}.tmp")
    os.replace(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _offer(torn: Path) -> str:
    """The newest whole checkpoint that is older than `torn`, as the user would write it."""
    torn = torn if torn.parent.name else torn.absolute()
    steps = _steps(torn.parent.parent) if torn.parent.name == FOLDER and _STEP.fullmatch(torn.name) else []
    for path in reversed([p for p in steps if _version(p) < _version(torn)]):
        with contextlib.suppress(CheckpointError):
            Checkpoint._read(path)  # pyright: ignore[reportPrivateUsage]
            return f"an older one is complete: resume={path}"
    return "no older one is complete; restore it, or start anew without resume"


def _without_any(run_dir: Path) -> str:
    """What to do about a run that saved nothing, or a folder that is none of a run."""
    above = run_dir.parent if run_dir.name else run_dir.absolute().parent
    if run_dir.absolute().name == FOLDER and _steps(above):
        return f"it holds those of a run: resume={above}"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        before = yaml.safe_load((run_dir / "resolved.yaml").read_text())["resume"]
        if before is not None:
            return f"it went on from another run, which has one: resume={before}"
    return "give a run that saved one (stages.trainer.run.checkpoint_every), or start anew without resume"


def _unwritten(run_dir: Path, version: int, error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    kept = Checkpoint.kept(run_dir)
    older = f"resume={run_dir / FOLDER / f'step-{kept[-1]:06d}'}" if kept else "no checkpoint is there"
    try:
        free = f"{shutil.disk_usage(run_dir).free / _GIB:.2f} GiB are free there"
    except OSError:
        free = "its free space is unknown"
    return (
        f"run_dir: {run_dir}; the checkpoint of step {version} could not be written ({text}); {free}; make room or give"
        f" another run_dir, then go on ({older})"
    )
