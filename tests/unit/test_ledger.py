import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from makers import make_trajectory

from miles_rl.rollout.codec import decode, encode
from miles_rl.rollout.groups import Sample
from miles_rl.rollout.ledger import Ledger, LedgerError, Resumed
from miles_rl.types import Outcome, Turn

CURSOR = {"drawn": 1, "requeued": []}


def admit(ledger: Ledger, group_id: int, size: int = 2, version: int = 0, attempt: int = 0) -> list[Sample]:
    samples = [Sample(group_id, index, attempt, f"task-{group_id}") for index in range(size)]
    for sample in samples:
        ledger.admit(sample, version, size, {"drawn": group_id + 1, "requeued": []})
    return samples


def score(ledger: Ledger, sample: Sample, version: int) -> None:
    ledger.run(sample.sample_id, f"box-{sample.sample_id}")
    ledger.score(make_trajectory(sample.sample_id, sample.group_id, sample.task, version))


def states(ledger: Ledger) -> dict[str, str]:
    with sqlite3.connect(f"file:{ledger.path}?mode=ro", uri=True) as reader:
        return dict(reader.execute("SELECT sample_id, state FROM samples ORDER BY sample_id").fetchall())


def kept(ledger: Ledger) -> list[str]:
    with sqlite3.connect(f"file:{ledger.path}?mode=ro", uri=True) as reader:
        return [row[0] for row in reader.execute("SELECT sample_id FROM trajectories ORDER BY sample_id")]


def test_every_attempt_is_a_row_that_ends_in_one_state(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    first, second = admit(ledger, 0)
    assert ledger.counts() == {"leased": 2}
    score(ledger, first, 0)
    ledger.run(second.sample_id, "box")
    assert ledger.counts() == {"scored": 1, "running": 1}
    ledger.fail(second.sample_id, Outcome.SANDBOX_FAILED, "gone")
    again = Sample(0, 1, 1, "task-0")
    ledger.admit(again, 1, 2, CURSOR)
    score(ledger, again, 1)
    ledger.train({0: [first.sample_id, again.sample_id]}, version=1)
    assert states(ledger) == {"g0.0.0": "trained", "g0.1.0": "failed", "g0.1.1": "trained"}
    assert kept(ledger) == [], "no checkpoint can need them"


def test_a_dropped_group_takes_what_it_had_and_moves_the_cursor(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    first, _ = admit(ledger, 0)
    score(ledger, first, 0)
    ledger.drop(0, "stale", {"drawn": 5, "requeued": ["task-0"]})
    assert ledger.counts() == {"discarded": 2}
    assert kept(ledger) == []
    ledger.close()
    _, resumed = Ledger.resume([tmp_path / "ledger.sqlite"], tmp_path / "next" / "ledger.sqlite", 0)
    assert resumed.cursor == {"drawn": 5, "requeued": ["task-0"]}
    assert resumed.groups == ()


def test_the_ledger_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    admit(ledger, 0, size=1)
    assert states(ledger) == {"g0.0.0": "leased"}


def test_a_sample_cannot_be_admitted_twice_or_moved_when_unknown_or_final(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    (sample,) = admit(ledger, 0, size=1)
    with pytest.raises(sqlite3.IntegrityError, match=r"g0\.0\.0 was admitted before"):
        ledger.admit(sample, 0, 1, CURSOR)
    with pytest.raises(KeyError, match=r"no unfinished sample 'g9\.0\.0'"):
        ledger.fail("g9.0.0", Outcome.ENGINE_FAILED, "x")
    score(ledger, sample, 0)
    ledger.train({0: [sample.sample_id]}, 0)
    with pytest.raises(KeyError, match="no open group 0"):
        ledger.train({0: [sample.sample_id]}, 1)
    with pytest.raises(KeyError, match="no unfinished sample"):
        ledger.score(make_trajectory(sample.sample_id, 0, "task-0", 0))
    assert kept(ledger) == []


def interrupted(path: Path) -> Ledger:
    """Checkpoint at version 2; groups 0 and 1 trained before it, 2 and 3 after it, 4 and 5 open."""
    ledger = Ledger(path)
    for group_id, written, trained in ((0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 3, 3)):
        samples = admit(ledger, group_id, version=written)
        for sample in samples:
            score(ledger, sample, written)
        if group_id == 2:
            ledger.committed(2, [1, 2])
        ledger.train({group_id: [s.sample_id for s in samples]}, trained)
    first, second = admit(ledger, 4, version=2)
    score(ledger, first, 2)
    ledger.run(second.sample_id, "box")
    first, second = admit(ledger, 5, version=3)
    score(ledger, first, 3)
    ledger.fail(second.sample_id, Outcome.ENGINE_FAILED, "x")
    return ledger


@pytest.mark.parametrize("ending", ["killed", "stopped"])
def test_a_resume_keeps_what_the_checkpoint_s_weights_wrote_and_reruns_the_rest(tmp_path: Path, ending: str) -> None:
    ledger = interrupted(tmp_path / "ledger.sqlite")
    if ending == "stopped":
        ledger.end_run()
        ledger.close()
    resumed_ledger, resumed = Ledger.resume([ledger.path], tmp_path / "next" / "ledger.sqlite", 2)
    assert states(resumed_ledger) == {
        "g0.0.0": "trained",
        "g0.1.0": "trained",
        "g1.0.0": "trained",
        "g1.1.0": "trained",
        "g2.0.0": "scored",
        "g2.1.0": "scored",
        "g3.0.0": "leased",
        "g3.1.0": "leased",
        "g4.0.0": "scored",
        "g4.1.0": "leased",
        "g5.0.0": "leased",
        "g5.1.0": "failed",
    }
    assert [(g.group_id, g.attempts, sorted(g.scored)) for g in resumed.groups] == [
        (2, (0, 0), [0, 1]),
        (3, (0, 0), []),
        (4, (0, 0), [0]),
        (5, (0, 1), []),
    ]
    assert (resumed.next_group_id, resumed.cursor) == (6, {"drawn": 6, "requeued": []})
    resumed_ledger.admit(Sample(3, 0, 0, "task-3"), 2, 2, CURSOR)
    with sqlite3.connect(resumed_ledger.path) as reader:
        assert reader.execute("SELECT num_leases, reason FROM samples WHERE sample_id = 'g3.0.0'").fetchone() == (2, "")


def test_only_trajectories_that_a_kept_checkpoint_needs_are_kept(tmp_path: Path) -> None:
    ledger = interrupted(tmp_path / "ledger.sqlite")
    assert kept(ledger) == ["g2.0.0", "g2.1.0", "g4.0.0", "g5.0.0"]
    ledger.committed(4, [4])
    assert kept(ledger) == ["g4.0.0", "g5.0.0"]


def test_a_damaged_ledger_gives_way_to_the_copy_in_the_checkpoint(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    first, _ = admit(ledger, 0)
    score(ledger, first, 0)
    (tmp_path / "checkpoint").mkdir()
    ledger.save(tmp_path / "checkpoint")
    ledger.close()
    data = bytearray((tmp_path / "ledger.sqlite").read_bytes())
    data[:100] = bytes(100)
    (tmp_path / "ledger.sqlite").write_bytes(data)
    sources = [tmp_path / "ledger.sqlite", tmp_path / "checkpoint" / "ledger.sqlite"]
    _, resumed = Ledger.resume(sources, tmp_path / "next" / "ledger.sqlite", 0)
    assert [g.group_id for g in resumed.groups] == [0]
    with pytest.raises(LedgerError, match=r"ledger\.sqlite: "):
        Ledger.resume(sources[:1], tmp_path / "third" / "ledger.sqlite", 0)
    with pytest.raises(LedgerError, match="no such file"):
        Ledger.resume([tmp_path / "nowhere"], tmp_path / "third" / "ledger.sqlite", 0)


RESUMES = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)  # what is executed below cannot write where it is forbidden, even as root
program = '''
import sys
from pathlib import Path
from miles_rl.rollout.ledger import Ledger
ledger, resumed = Ledger.resume([Path(sys.argv[1])], Path(sys.argv[2]), 0)
print(sum(len(group.scored) for group in resumed.groups))
'''
os.execv(sys.executable, [sys.executable, "-c", program, *sys.argv[1:]])
"""


@pytest.mark.parametrize("left", ["at rest", "with its log", "with its log and no index"])
def test_a_resume_takes_over_all_and_writes_nothing_where_it_comes_from(left: str, tmp_path: Path) -> None:
    written, killed = tmp_path / "written", tmp_path / "killed"
    ledger = Ledger(written / "ledger.sqlite")
    for sample in admit(ledger, 0):
        score(ledger, sample, 0)
    if left == "at rest":
        ledger.close()
    shutil.copytree(written, killed)
    if left == "with its log and no index":
        (killed / "ledger.sqlite-shm").unlink()
    before = {path.name: path.read_bytes() for path in killed.iterdir()}
    for path in (*killed.iterdir(), killed):
        path.chmod(0o555 if path.is_dir() else 0o444)
    command = [sys.executable, "-c", RESUMES, str(killed / "ledger.sqlite"), str(tmp_path / "new/ledger.sqlite")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    killed.chmod(0o755)
    assert (done.stdout, done.stderr) == ("2\n", "")
    assert {path.name: path.read_bytes() for path in killed.iterdir()} == before
    ledger.close()


def test_what_was_committed_outlives_a_kill(tmp_path: Path) -> None:
    """The files as they lie at any moment, the write-ahead log included, are a ledger to go on from."""
    ledger = interrupted(tmp_path / "ledger.sqlite")
    shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    assert ledger.counts()
    _, resumed = Ledger.resume([tmp_path.with_name("copy") / "ledger.sqlite"], tmp_path / "next" / "ledger.sqlite", 2)
    assert isinstance(resumed, Resumed)
    assert len(resumed.groups) == 4


def test_a_trajectory_comes_back_as_it_was() -> None:
    trajectory = make_trajectory("g1.0.0", 1, "task", 4, reward=0.5)
    object.__setattr__(trajectory, "turns", (Turn("a\ud800", None, "b", 1, 2, 0.5, 0.25, 7),))
    back = decode(encode(trajectory))
    for name in ("token_ids", "loss_mask", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(back, name), getattr(trajectory, name))
        assert getattr(back, name).dtype == getattr(trajectory, name).dtype
    assert (back.sample_id, back.reward, back.turns, back.outcome) == ("g1.0.0", 0.5, trajectory.turns, Outcome.SCORED)
    for cut in (0, 3, 20, len(encode(trajectory)) - 1):
        with pytest.raises(ValueError, match="not a trajectory"):
            decode(encode(trajectory)[:cut])
