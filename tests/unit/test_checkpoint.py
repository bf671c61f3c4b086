import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from miles_rl.checkpoint import Checkpoint, CheckpointError

BEFORE = {"solve_rate": 0.1 + 0.2, "ci95": [0.0, 1.0]}


def write(run_dir: Path, version: int, keep: int = 3) -> Path:
    hidden = Checkpoint.begin(run_dir, version)
    (hidden / "model").mkdir()
    (hidden / "model/config.json").write_text("{}")
    (hidden / "trainer_state.pt").write_bytes(bytes([version % 256]) * 1000)
    (hidden / "ledger.sqlite").write_bytes(b"rows")
    return Checkpoint.commit(hidden, version, "tasks", BEFORE, keep)


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_a_run_s_newest_checkpoint_is_opened_and_old_ones_go(tmp_path: Path) -> None:
    for version in (9, 20, 1000000):
        write(tmp_path, version, keep=2)
    newest = Checkpoint.open(tmp_path)
    assert (newest.version, newest.train_hash, newest.before) == (1000000, "tasks", BEFORE)
    assert (newest.model_dir / "config.json").exists()
    assert newest.run_dir == tmp_path
    assert names(tmp_path) == ["step-000020", "step-1000000"]
    assert Checkpoint.kept(tmp_path) == [20, 1000000]


def test_one_checkpoint_can_be_named_also_away_from_its_run(tmp_path: Path) -> None:
    write(tmp_path / "run", 10)
    write(tmp_path / "run", 20)
    assert Checkpoint.open(tmp_path / "run/checkpoints/step-000010").version == 10
    moved = (tmp_path / "run/checkpoints/step-000010").rename(tmp_path / "copied")
    assert Checkpoint.open(moved).version == 10
    assert Checkpoint.open(moved).run_dir == moved


def test_the_manifest_lists_every_file_with_its_size(tmp_path: Path) -> None:
    loop = json.loads((write(tmp_path, 1) / "loop.json").read_text())
    assert {name: entry["bytes"] for name, entry in loop["files"].items()} == {
        "ledger.sqlite": 4,
        "model/config.json": 2,
        "trainer_state.pt": 1000,
    }


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: (folder / "trainer_state.pt").unlink(), "trainer_state.pt is missing"),
        (
            lambda folder: os.truncate(folder / "trainer_state.pt", 999),
            "trainer_state.pt has 999 bytes and should have",
        ),
        (
            lambda folder: (folder / "model/config.json").write_text("[]"),
            "the content of model/config.json has changed",
        ),
        (lambda folder: (folder / "loop.json").unlink(), "loop.json is missing"),
        (lambda folder: (folder / "loop.json").write_text('{"version": 30'), "loop.json cannot be read"),
        (lambda folder: (folder / "loop.json").write_text("[]"), "loop.json cannot be read"),
    ],
)
def test_a_torn_checkpoint_is_refused_by_name_and_the_newest_whole_one_before_it_is_offered(
    tmp_path: Path, harm: Callable[[Path], object], words: str
) -> None:
    folders = {version: write(tmp_path, version) for version in (10, 20, 30)}
    (folders[20] / "ledger.sqlite").write_bytes(b"torn")
    harm(folders[30])
    for resume in (tmp_path, folders[30]):
        with pytest.raises(CheckpointError) as refused:
            Checkpoint.open(resume)
        line = str(refused.value)
        assert line.startswith(f"{folders[30]} is torn: ")
        assert words in line
        assert line.endswith(f"; an older one is complete: resume={folders[10]}")
        assert "\n" not in line


def test_a_checkpoint_is_of_its_run_also_as_seen_from_where_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "run", 10)
    os.truncate(write(tmp_path / "run", 20) / "ledger.sqlite", 0)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"older one is complete: resume=run/checkpoints/step-000010$"):
        Checkpoint.open(Path("run"))
    monkeypatch.chdir(tmp_path / "run/checkpoints")
    assert Checkpoint.open(Path("step-000010")).run_dir == tmp_path / "run"
    with pytest.raises(CheckpointError, match=rf"older one is complete: resume={Path.cwd()}/step-000010$"):
        Checkpoint.open(Path("step-000020"))


def test_a_torn_checkpoint_without_an_older_one_offers_no_other(tmp_path: Path) -> None:
    (write(tmp_path, 10) / "ledger.sqlite").unlink()
    write(tmp_path, 20)
    with pytest.raises(CheckpointError, match="no older one is complete"):
        Checkpoint.open(tmp_path / "checkpoints/step-000010")


def test_a_missing_run_or_checkpoint_is_an_error_never_a_fresh_start(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="typo is no folder"):
        Checkpoint.open(tmp_path / "typo")
    with pytest.raises(CheckpointError, match="has no complete checkpoint; give a run that saved one"):
        Checkpoint.open(tmp_path)
    (tmp_path / "resolved.yaml").write_text("resume: runs/first\n")
    with pytest.raises(CheckpointError, match="it went on from another run, which has one: resume=runs/first"):
        Checkpoint.open(tmp_path)


def test_what_a_killed_run_left_half_written_is_not_read_and_the_next_write_removes_it(tmp_path: Path) -> None:
    write(tmp_path, 10)
    (Checkpoint.begin(tmp_path, 20) / "trainer_state.pt").write_bytes(b"half")
    assert Checkpoint.open(tmp_path).version == 10
    write(tmp_path, 30)
    assert names(tmp_path) == ["step-000010", "step-000030"]


def test_a_process_that_is_killed_at_any_system_call_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    """The writer kills itself at its n-th fsync, rename or removal, for every n until it gets through."""
    program = textwrap.dedent(
        """
        import os, shutil, signal, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[3])
        from test_checkpoint import write

        left = int(sys.argv[2])

        def counted(function):
            def call(*args, **kwargs):
                global left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)
            return call

        os.fsync, os.replace, os.unlink = counted(os.fsync), counted(os.replace), counted(os.unlink)
        write(Path(sys.argv[1]), 30, keep=2)
        """
    )
    outcomes: list[int] = []
    for calls in range(0, 40, 3):
        run_dir = tmp_path / str(calls)
        write(run_dir, 10)
        write(run_dir, 20)
        here = str(Path(__file__).parent)
        done = subprocess.run([sys.executable, "-c", program, str(run_dir), str(calls), here], timeout=60, check=False)
        outcomes.append(done.returncode)
        for version in Checkpoint.kept(run_dir):
            assert Checkpoint.open(run_dir / f"checkpoints/step-{version:06d}").version == version
        assert Checkpoint.open(run_dir).version == (30 if 30 in Checkpoint.kept(run_dir) else 20)
        if done.returncode == 0:
            break
    assert outcomes[-1] == 0, "the writer never got through"
    assert len(outcomes) > 3
    assert set(outcomes[:-1]) == {-9}


def test_a_disk_that_is_full_ends_the_write_with_the_place_the_free_space_and_the_way_on(tmp_path: Path) -> None:
    """The kernel refuses the write, by a limit on the size of a file."""
    older = write(tmp_path, 10)
    program = textwrap.dedent(
        """
        import resource, sys
        from pathlib import Path
        from miles_rl.checkpoint import Checkpoint, CheckpointError
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        run_dir = Path(sys.argv[1])
        try:
            with Checkpoint.attempt(run_dir, 20):
                hidden = Checkpoint.begin(run_dir, 20)
                (hidden / "trainer_state.pt").write_bytes(bytes(1_000_000))
                Checkpoint.commit(hidden, 20, "tasks", {}, 2)
        except CheckpointError as error:
            print(error)
        """
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"run_dir: {tmp_path}; the checkpoint of step 20 could not be written (OSError: ")
    assert "File too large" in line
    assert "GiB are free there; " in line
    assert line.endswith(f"resume={older})")
    assert names(tmp_path) == ["step-000010"]
    assert Checkpoint.open(tmp_path).version == 10
