import asyncio
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from makers import make_trajectory
from program import wait_for

from miles_rl.rollout.collector import Collector, PlayedSample
from miles_rl.rollout.groups import Sample
from miles_rl.rollout.ledger import Ledger, Resumed
from miles_rl.rollout.ledger_schema import RUN_ENDED, SCHEMA, SampleState
from miles_rl.rollout.order import TaskOrder
from miles_rl.rollout.scheduler import FailureLimits, Scheduler
from miles_rl.types import Outcome
from pipelines.ledger import LedgerUnreadable, check, reading
from pipelines.ledger.__main__ import main
from pipelines.ledger.summary import kind_of

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{Path(__file__).parent}"}


def admit(ledger: Ledger, group: int, index: int, attempt: int = 0, task: str = "sort", version: int = 0) -> Sample:
    sample = Sample(group, index, attempt, task)
    ledger.admit(sample, version, 2, {"drawn": group})
    return sample


def score(ledger: Ledger, sample: Sample, version: int = 0) -> None:
    ledger.run(sample.sample_id, f"box-{sample.sample_id}")
    ledger.score(make_trajectory(sample.sample_id, sample.group_id, sample.task, version))


def small_run(folder: Path) -> Ledger:
    """Two trained groups, one that is complete, one that lacks members, one dropped as stale; three failures."""
    ledger = Ledger(folder / "ledger.sqlite")
    for group in range(2):
        for index in range(2):
            score(ledger, admit(ledger, group, index))
        ledger.train({group: [f"g{group}.0.0", f"g{group}.1.0"]}, group)
    for attempt, detail in enumerate(("sort: no sandbox g2.0.0 within 60 s", "sort: no sandbox 9f3a1c77 within 5.5 s")):
        admit(ledger, 2, 0, attempt)
        ledger.fail(f"g2.0.{attempt}", Outcome.SANDBOX_FAILED, detail)
    score(ledger, admit(ledger, 2, 0, 2))
    score(ledger, admit(ledger, 2, 1))
    score(ledger, admit(ledger, 3, 0, task="count"))
    ledger.run(admit(ledger, 3, 1, task="count").sample_id, "box-31")
    admit(ledger, 4, 0, task="count")
    ledger.fail("g4.0.0", Outcome.VERIFIER_FAILED, "no reward.txt\nTraceback ...")
    admit(ledger, 4, 1, task="count")
    for group in (5, 6):
        admit(ledger, group, 0, task="slow")
        ledger.drop(group, "stale", {})
    return ledger


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    ledger = small_run(tmp_path)
    yield tmp_path
    ledger.close()


def told(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert main([str(a) for a in arguments]) == code
    return capsys.readouterr().out


def test_the_summary_counts_samples_groups_failures_and_what_was_dropped(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(capsys, run)
    for line in (
        "samples   12 attempted once or more, 1 of them 3 times",
        "attempts  1 leased, 1 running, 3 scored, 4 trained, 2 discarded, 3 failed",
        "groups    3 open, 2 trained, 2 stale",
        "batches   2 of 1 groups, consumed by versions 0 to 1",
        "  2  sandbox   TASK: no sandbox # within # s",
        "  1  verifier  no reward.txt",
        "warning: task slow starves: 2 of its groups were too old to train on, 0 trained",
        "staleness when trained, in versions: 0: 50 %, 1: 50 %",
    ):
        assert line in text, text


def test_every_sample_that_is_not_final_is_listed_with_what_it_waits_for(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        line.split(maxsplit=3) for line in told(capsys, run).partition("not in a final state: 5\n")[2].splitlines()
    ]
    waits = {name: (state, re.sub(r"[\d.]+ s", "N s", rest).partition(" s  ")[2]) for name, _, state, rest in lines}
    assert waits == {
        "g2.0.2": ("scored", "waits for its batch: its group is complete"),
        "g2.1.0": ("scored", "waits for its batch: its group is complete"),
        "g3.0.0": ("scored", "waits for its group: 1 runs for N s"),
        "g3.1.0": ("running", "runs in sandbox box-31"),
        "g4.1.0": ("leased", "waits for its sandbox"),
    }


def test_a_scored_sample_tells_which_members_its_group_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for index in range(3):
        ledger.admit(Sample(0, index, 0, "sort"), 0, 4, {})
    score(ledger, Sample(0, 0, 0, "sort"))
    ledger.fail("g0.1.0", Outcome.ENGINE_FAILED, "gone")
    row = json.loads(told(capsys, tmp_path, "--json"))["unfinished"][0]
    assert re.fullmatch(
        r"waits for its group: 1 to be refilled after engine_failed, 2 waits for its sandbox for .+ s, 3 not admitted",
        row["waits_for"],
    )
    ledger.close()


def test_json_says_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = json.loads(told(capsys, run, "--json"))
    assert figures["samples"] == {"trained": 4, "failed": 3, "scored": 3, "running": 1, "leased": 1, "discarded": 2}
    assert figures["attempts_per_sample"] == {"1": 11, "3": 1}
    assert {"task": "slow", "reason": "stale", "count": 2} in figures["discarded"]
    assert figures["timings_s"]["running"]["num"] == 7
    assert [row["sample_id"] for row in figures["unfinished"]] == ["g2.0.2", "g2.1.0", "g3.0.0", "g3.1.0", "g4.1.0"]


def test_a_resume_shows_what_waits_to_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_run(tmp_path / "old").close()
    ledger, _ = Ledger.resume([tmp_path / "old/ledger.sqlite"], tmp_path / "new/ledger.sqlite", 2)
    text = told(capsys, tmp_path / "new")
    assert text.count("waits to run again after a resume") == 2
    assert check(tmp_path / "new") == []
    admit(ledger, 3, 1, task="count")
    assert "waits for its sandbox (admitted 2 times)" in told(capsys, tmp_path / "new")
    ledger.close()


def test_equal_causes_are_one_kind_whatever_ids_and_numbers_they_carry() -> None:
    a = kind_of("count-07: lease run-481/17 of 0f9c2e1a-77aa-4b1c-9d3e-5b6f7a8c9d0e broke\nmore", "count-07")
    assert a == kind_of("count-12: lease run-90/3 of 12ab34cd-0000-1111-2222-333344445555 broke", "count-12")
    assert a == "TASK: lease run-#/# of # broke"
    assert kind_of("request g3.1.0/2: HTTP 500 after 3.5 s") == "request #/#: HTTP 500 after # s"
    assert kind_of("feedback was decadent") == "feedback was decadent"
    assert kind_of("\n  \n\x1b[31mred\x1b[0m ") == "red"
    assert kind_of("") == "no cause was recorded"
    assert len(kind_of("x" * 1000)) == 160


WRITER = """
    import sys, time
    from pathlib import Path
    from pipelines.lock import hold
    from test_ledger_command import small_run
    folder = Path(sys.argv[1])
    with hold(folder):
        if len(sys.argv) == 2:
            ledger = small_run(folder)
        Path(folder, "written").touch()
        time.sleep(120)
"""
READER = """
    import ctypes, os, sys
    ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)  # its children cannot write where it is forbidden, not even those of root
    os.execv(sys.executable, [sys.executable, "-m", "pipelines.ledger", *sys.argv[1:]])
"""


def test_a_ledger_is_read_while_the_run_goes_on_and_after_it_was_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path) as process:
        alive = told(capsys, tmp_path)
        assert f"the run goes on in process {process.pid}; last change" in alive
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    dead = told(capsys, tmp_path)
    assert "the run does not go on; last change" in dead
    assert dead.splitlines()[3:7] == alive.splitlines()[3:7]
    assert check(tmp_path) == []
    written.pop("ledger.sqlite-shm")
    assert {name: (tmp_path / name).read_bytes() for name in written} == written, "only the index was"
    assert len(list(tmp_path.iterdir())) == len(written) + 1


@pytest.mark.parametrize("made", ["nothing", "an empty file", "some tables"])
def test_a_run_that_is_starting_says_so(made: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if made == "an empty file":
        (tmp_path / "ledger.sqlite").touch()
    if made == "some tables":
        with sqlite3.connect(tmp_path / "ledger.sqlite") as database:
            database.execute("CREATE TABLE groups (group_id)")
    with running(tmp_path, "has no ledger yet") as process:
        assert main([str(tmp_path)]) == 2
        starting = f"the run is starting, in process {process.pid}, and has no ledger yet; ask again soon"
        assert capsys.readouterr().err == f"{tmp_path}: {starting}\n"
    assert main([str(tmp_path)]) == 2
    assert "the run is starting" not in capsys.readouterr().err


@pytest.mark.parametrize("left", ["at rest", "with its log", "with its log and no index"])
def test_a_ledger_is_read_whole_where_nothing_can_be_written(left: str, tmp_path: Path) -> None:
    if left == "at rest":
        small_run(tmp_path).close()
    else:
        with running(tmp_path):
            pass
    if left == "with its log and no index":
        (tmp_path / "ledger.sqlite-shm").unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for path in (*tmp_path.iterdir(), tmp_path):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        command = [sys.executable, "-c", textwrap.dedent(READER), str(tmp_path)]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    finally:
        tmp_path.chmod(0o755)
    assert done.stderr == ""
    assert "attempts  1 leased, 1 running, 3 scored, 4 trained, 2 discarded, 3 failed" in done.stdout
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_time_between_two_runs_is_no_wait_for_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_run(tmp_path / "old").close()
    old = tmp_path / "old/ledger.sqlite"
    with sqlite3.connect(old) as database:
        database.execute("UPDATE samples SET ended_s = ended_s - 3600, trained_s = trained_s - 3600")
    assert waits_until_trained(tmp_path / "old", capsys)["num"] == 4
    ledger, _ = Ledger.resume([old], tmp_path / "new/ledger.sqlite", 2)
    ledger.train({2: ["g2.0.2", "g2.1.0"]}, 2)
    ledger.run(admit(ledger, 3, 1, task="count").sample_id, "box-32")
    ledger.score(make_trajectory("g3.1.0", 3, "count", 2))
    ledger.train({3: ["g3.0.0", "g3.1.0"]}, 3)
    ledger.close()
    found = waits_until_trained(tmp_path / "new", capsys)
    assert found["num"] == 5, "four of the run before, one of this run, and not the three that were taken over"
    assert found["max"] < 60


def waits_until_trained(run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    return json.loads(told(capsys, run, "--json"))["timings_s"]["scored_until_trained"]


@contextmanager
def running(folder: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose run goes on in `folder`, and which is killed; with `more` it has no ledger."""
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), *more]
    process = subprocess.Popen(command, env=ENVIRONMENT)
    try:
        wait_for((folder / "written").exists, "the ledger")
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)


def test_reading_a_ledger_at_rest_leaves_its_folder_as_it_was(tmp_path: Path) -> None:
    small_run(tmp_path).close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert check(tmp_path) == []
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


class Episodes:
    """Plays samples at the version that `step` says: those of `slow` take long, every seventh fails."""

    def __init__(self) -> None:
        self.step = self.number = 0

    async def __call__(self, sample: Sample, on_ready: Callable[[str], None]) -> PlayedSample:
        self.number += 1
        mine, begun = self.number, self.step
        on_ready(f"box-{mine}")
        await asyncio.sleep(0.02 if sample.task == "slow" else 0.001)
        if mine % 7 == 0:
            return PlayedSample(Outcome.ENGINE_FAILED, detail=f"engine {mine}: 500")
        return PlayedSample(Outcome.SCORED, make_trajectory(sample.sample_id, sample.group_id, sample.task, begun))


def collector(ledger: Ledger, play: Episodes, resumed: Resumed | None = None, version: int = 0) -> Collector:
    resumed = resumed or Resumed()
    scheduler = Scheduler(
        TaskOrder(["a", "b", "c", "slow"], 0, **resumed.cursor),
        num_groups=2,
        group_size=3,
        max_staleness=1,
        concurrency=12,
        limits=FailureLimits(50, 500),
        version=version,
        groups=resumed.groups,
        next_group_id=resumed.next_group_id,
    )
    return Collector(scheduler, ledger, play, batch_timeout_s=10.0, stop_timeout_s=5.0)


async def train(run: Collector, play: Episodes, until: int, folder: Path) -> None:
    while play.step < until:
        await run.next_batch()
        assert check(folder) == []
        play.step += 1
        run.published(play.step)


async def test_a_run_with_failures_and_stale_groups_passes_the_check_at_every_batch(tmp_path: Path) -> None:
    ledger, play = Ledger(tmp_path / "ledger.sqlite"), Episodes()
    run = collector(ledger, play)
    run.start()
    await train(run, play, 30, tmp_path)
    await run.finish()
    ledger.close()
    assert check(tmp_path) == []


async def test_a_resumed_run_passes_the_check_wherever_the_first_one_was_left(tmp_path: Path) -> None:
    for left in range(5, 11):
        first, second = tmp_path / f"first-{left}", tmp_path / f"second-{left}"
        ledger, play = Ledger(first / "ledger.sqlite"), Episodes()
        run = collector(ledger, play)
        run.start()
        await train(run, play, 5, first)
        ledger.committed(5, [])
        await train(run, play, left, first)
        assert check(first) == []
        ledger, resumed = Ledger.resume([first / "ledger.sqlite"], second / "ledger.sqlite", 5)
        assert check(second) == []
        await run.finish()
        play.step = 5
        run = collector(ledger, play, resumed, 5)
        run.start()
        await train(run, play, 12, second)
        await run.finish()
        ledger.close()
        assert check(second) == []


@pytest.mark.parametrize(
    ("sql", "violation"),
    [
        ("UPDATE samples SET state = 'scored' WHERE sample_id = 'g0.1.0'", "g0.1.0: is scored and its group ended as"),
        ("DELETE FROM samples WHERE sample_id = 'g0.1.0'", "group 0: was trained and member 1 was never admitted"),
        ("UPDATE samples SET trained_version = 1 WHERE sample_id = 'g0.1.0'", "g0.1.0: was trained at 1, its group"),
        ("UPDATE groups SET trained_version = 2 WHERE group_id = 1", "version 1: consumed no batch"),
        (
            "UPDATE groups SET trained_version = 0 WHERE group_id = 1",
            "g1.0.0: was trained at 1, its group is trained (0)",
        ),
        (
            "DELETE FROM trajectories WHERE sample_id = 'g2.1.0'",
            "g2.1.0: its trajectory is missing, its batch needs it",
        ),
        ("INSERT INTO trajectories VALUES ('g3.1.0', x'00')", "g3.1.0: is running and has a trajectory"),
        ("INSERT INTO trajectories VALUES ('g99.0.0', x'00')", "g99.0.0: has a trajectory and no sample"),
        ("UPDATE samples SET state = 'leased' WHERE sample_id = 'g2.0.1'", "g2.0.1: is leased and was attempted again"),
        ("UPDATE samples SET attempt = 3, sample_id = 'g2.0.3' WHERE sample_id = 'g2.0.2'", "attempts of member 0 are"),
        ("UPDATE samples SET reward = 0.0 WHERE sample_id = 'g4.0.0'", "g4.0.0: failed with outcome verifier_failed"),
        ("UPDATE samples SET reward = NULL WHERE sample_id = 'g1.0.0'", "g1.0.0: is trained with outcome scored and"),
        ("UPDATE samples SET newest_version = 4 WHERE sample_id = 'g1.0.0'", "g1.0.0: trained at 1, written by 4"),
        (
            "UPDATE samples SET admitted_version = 1 WHERE sample_id = 'g1.0.0'",
            "g1.0.0: admitted at version 1, written",
        ),
        ("UPDATE samples SET state = 'lost' WHERE sample_id = 'g4.1.0'", "g4.1.0: has the state 'lost'"),
        ("UPDATE samples SET reason = '' WHERE state = 'discarded'", ""),
        ("UPDATE samples SET reason = 'the run ended' WHERE sample_id = 'g5.0.0'", "g5.0.0: was discarded (the run"),
        ("DELETE FROM groups WHERE group_id = 3", "group 3: has 2 samples and was never opened"),
        ("DELETE FROM samples WHERE group_id = 5", "group 5: was opened and has no sample"),
        ("INSERT INTO checkpoints VALUES (0, 0.0)", "g0.0.0: its trajectory is missing, a resume from version 0 needs"),
        ("UPDATE samples SET sandbox_id = NULL WHERE sample_id = 'g3.1.0'", "g3.1.0: is running and names no sandbox"),
    ],
)
def test_a_sample_that_is_not_accounted_for_exactly_once_is_found(
    sql: str, violation: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(run) == []
    with sqlite3.connect(run / "ledger.sqlite") as database:
        database.execute(sql)
    found = check(run)
    assert any(violation in line for line in found) if violation else found == []
    assert f"{len(found)} violations" in told(capsys, run, "--check", code=1) if found else True


def test_a_sound_ledger_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "12 samples of 7 groups, every one accounted for exactly once" in told(capsys, run, "--check")
    assert json.loads(told(capsys, run, "--check", "--json"))["violations"] == []


@pytest.mark.parametrize("kind", ["nothing", "folder", "text", "other", "torn"])
def test_what_is_no_ledger_is_one_line(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ledger.sqlite"
    if kind == "text":
        path.write_text("not a database at all " * 100)
    if kind == "other":
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE t (x)")
    if kind == "torn":
        small_run(tmp_path).close()
        path.write_bytes(path.read_bytes()[:6000])
    target = tmp_path / "no" if kind == "nothing" else tmp_path
    for options in ([], ["--check"], ["--json"]):
        assert main([str(target), *options]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"{target}")
        assert err.count("\n") == 1


def test_a_reader_who_goes_away_ends_the_lines_quietly(run: Path) -> None:
    command = f"{sys.executable} -m pipelines.ledger {run} | head -n 1"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (f"{run / 'ledger.sqlite'}\n", "")


def test_the_reader_knows_the_words_of_the_writer() -> None:
    with sqlite3.connect(":memory:") as database:
        database.executescript(SCHEMA)
        for name, row in (("groups", reading.GroupRow), ("samples", reading.SampleRow)):
            columns = {column for _, column, *_ in database.execute(f"PRAGMA table_info({name})")}
            assert set(row.__slots__) <= columns
    assert tuple(str(state) for state in SampleState) == reading.STATES
    assert reading.RUN_ENDED == RUN_ENDED


def test_an_unreadable_ledger_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(LedgerUnreadable, match="no such run"):
        check(tmp_path / "nowhere")
