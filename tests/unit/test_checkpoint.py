from pathlib import Path

import pytest

from miles_rl.checkpoint import Checkpoint


def write(run_dir: Path, version: int, keep: int = 2) -> Path:
    def save(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")

    return Checkpoint.write(run_dir, version, {"drawn": version}, "tasks", save, keep)


def test_the_newest_complete_checkpoint_is_found_and_old_ones_go(tmp_path: Path) -> None:
    for version in (10, 20, 30):
        write(tmp_path, version)
    newest = Checkpoint.newest(tmp_path)
    assert (newest.version, newest.cursor, newest.train_hash) == (30, {"drawn": 30}, "tasks")
    assert (newest.model_dir / "config.json").exists()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000020", "step-000030"]


def test_a_checkpoint_that_broke_while_it_was_written_is_never_found(tmp_path: Path) -> None:
    write(tmp_path, 10)

    def breaks(folder: Path) -> None:
        (folder / "optimizer.pt").write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        Checkpoint.write(tmp_path, 20, {}, "tasks", breaks, 2)
    assert Checkpoint.newest(tmp_path).version == 10


def test_a_missing_run_or_checkpoint_is_an_error_never_a_fresh_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is no folder"):
        Checkpoint.newest(tmp_path / "typo")
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        Checkpoint.newest(tmp_path)
