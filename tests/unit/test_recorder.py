import asyncio
import os
import threading
from dataclasses import fields
from pathlib import Path

import duckdb
import numpy as np
import pytest
from program import wait_for

from miles_rl.rollout.recorder import SCHEMA, EpisodeRecord, EpisodeRecorder
from miles_rl.types import Outcome, StopReason, Turn


def scored(sample_id: str = "g1-0", reward: float = 1.0) -> EpisodeRecord:
    mask = np.array([0, 0, 1, 1, 0, 1], np.bool_)
    return EpisodeRecord(
        kind="train",
        sample_id=sample_id,
        group_id=1,
        task="count-lines-03",
        version=3,
        token_ids=np.array([5, 6, 7, 8, 9, 10], np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.array([-1, -1, 3, 3, -1, 4], np.int32),
        reward=reward,
        outcome=Outcome.SCORED,
        stop_reason=StopReason.COMPLETED,
        prompt_text="How many lines?",
        turns=(
            Turn("```bash\nls\n```", "ls", "a.txt", 2, 4, 0.25, 0.01, 2),
            Turn("TASK_COMPLETE", None, "", 5, 6),
        ),
        started_s=100.0,
        ready_s=100.5,
        finished_s=103.0,
        timings={"sandbox_s": 0.05, "verify_s": 0.1},
    )


def failed() -> EpisodeRecord:
    return EpisodeRecord(
        kind="eval",
        task="sort-csv-01",
        sample_id="e0-7",
        outcome=Outcome.SANDBOX_FAILED,
        stop_reason=StopReason.ABORTED,
        started_s=100.0,
        finished_s=101.0,
        attempt=2,
        detail="sandbox: bwrap ended with 1",
    )


def query(folder: Path, sql: str) -> list[tuple]:
    return duckdb.execute(sql.replace("EPISODES", f"read_parquet('{folder}/*.parquet')")).fetchall()


def test_duckdb_reads_episodes_while_the_recorder_is_open(tmp_path: Path) -> None:
    recorder = EpisodeRecorder(tmp_path, flush_every=2)
    recorder.record(scored())
    assert list(tmp_path.iterdir()) == []
    recorder.record(failed())
    wait_for(lambda: list(tmp_path.glob("*.parquet")), "the part")
    rows = query(tmp_path, "select kind, task, outcome, stop_reason, reward, num_turns from EPISODES order by kind")
    assert rows == [
        ("eval", "sort-csv-01", "sandbox_failed", "aborted", None, 0),
        ("train", "count-lines-03", "scored", "completed", 1.0, 2),
    ]


def test_tokens_turns_versions_and_timings_come_back_as_they_went_in(tmp_path: Path) -> None:
    recorder = EpisodeRecorder(tmp_path, flush_every=1)
    recorder.record(scored())
    recorder.close()
    (row,) = query(
        tmp_path,
        "select token_ids, loss_mask, logprobs, versions, turns, timings, oldest_version, newest_version,"
        " num_policy_tokens, started_s, ready_s, finished_s, version, prompt_text, group_id from EPISODES",
    )
    assert row[0] == [5, 6, 7, 8, 9, 10]
    assert row[1] == [False, False, True, True, False, True]
    assert row[2] == [0.0, 0.0, -0.5, -0.5, 0.0, -0.5]
    assert row[3] == [-1, -1, 3, 3, -1, 4]
    assert row[4][0] == {
        "text": "```bash\nls\n```",
        "command": "ls",
        "observation": "a.txt",
        "start": 2,
        "end": 4,
        "generate_s": 0.25,
        "exec_s": 0.01,
        "cached_tokens": 2,
    }
    assert row[4][1]["command"] is None
    assert row[5] == {"sandbox_s": 0.05, "verify_s": 0.1}
    assert row[6:] == (3, 4, 3, 100.0, 100.5, 103.0, 3, "How many lines?", 1)


def test_a_failed_episode_keeps_its_cause_and_has_empty_arrays(tmp_path: Path) -> None:
    recorder = EpisodeRecorder(tmp_path)
    recorder.record(failed())
    recorder.close()
    (row,) = query(tmp_path, "select detail, attempt, ready_s, len(token_ids), oldest_version, turns from EPISODES")
    assert row == ("sandbox: bwrap ended with 1", 2, None, 0, None, [])


def test_rows_wait_no_longer_than_the_flush_interval(tmp_path: Path) -> None:
    recorder = EpisodeRecorder(tmp_path, flush_every=1000, flush_interval_s=0.0)
    recorder.record(scored())
    wait_for(lambda: list(tmp_path.glob("*.parquet")), "the part")
    assert query(tmp_path, "select count(*) from EPISODES") == [(1,)]


def test_two_recorders_share_a_folder_and_leave_only_complete_parts(tmp_path: Path) -> None:
    recorders = [EpisodeRecorder(tmp_path, flush_every=3) for _ in range(2)]
    for index in range(10):
        for writer, recorder in enumerate(recorders):
            recorder.record(scored(f"w{writer}-{index}"))
    for recorder in recorders:
        recorder.close()
        recorder.close()
    assert query(tmp_path, "select count(distinct sample_id), count(*) from EPISODES") == [(20, 20)]
    assert all(path.suffix == ".parquet" and path.name.startswith("part-") for path in tmp_path.iterdir())


def test_rows_of_a_failed_write_wait_in_order_and_its_error_is_raised_once(tmp_path: Path) -> None:
    folder = tmp_path / "episodes"
    recorder = EpisodeRecorder(folder, flush_every=1)
    folder.rmdir()
    recorder.record(scored("g1-0"))
    wait_for(lambda: recorder._error, "the failure")
    with pytest.raises(FileNotFoundError):
        recorder.record(scored("g1-1"))
    with pytest.raises(FileNotFoundError):
        recorder.close()
    folder.mkdir()
    recorder.record(scored("g1-2"))
    recorder.close()
    parts = sorted(folder.iterdir())
    rows = [row for part in parts for row in query(part.parent, f"select sample_id from '{part}'")]
    assert rows == [("g1-0",), ("g1-1",), ("g1-2",)]


async def test_an_event_loop_turns_while_a_slow_disk_takes_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, replace = threading.Event(), os.replace

    def slow(source: Path, target: Path) -> None:
        assert disk.wait(30)
        replace(source, target)

    monkeypatch.setattr("miles_rl.rollout.recorder.os.replace", slow)
    recorder = EpisodeRecorder(tmp_path, flush_every=4)
    for index in range(12):
        recorder.record(scored(f"g1-{index:02d}"))
        await asyncio.sleep(0)
    assert list(tmp_path.glob("*.parquet")) == []
    disk.set()
    await asyncio.to_thread(recorder.close)
    assert query(tmp_path, "select sample_id from EPISODES order by 1") == [(f"g1-{i:02d}",) for i in range(12)]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_disk_that_hangs_is_told_within_the_deadline_and_no_row_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, replace = threading.Event(), os.replace
    monkeypatch.setattr("miles_rl.rollout.recorder.os.replace", lambda *paths: disk.wait(30) and replace(*paths))
    recorder = EpisodeRecorder(tmp_path, flush_every=1, write_timeout_s=0.1)
    recorder.record(scored("g1-0"))
    for late in (recorder.close, lambda: recorder.record(scored("g1-1"))):
        with pytest.raises(TimeoutError, match=r"writing episodes did not end within 0.1 s, \d wait; see whether"):
            late()
    disk.set()
    wait_for(lambda: not recorder._writing, "the write")
    recorder.close()
    assert query(tmp_path, "select sample_id from EPISODES order by 1") == [("g1-0",), ("g1-1",)]


def test_text_that_is_not_valid_unicode_is_kept_readable(tmp_path: Path) -> None:
    record = EpisodeRecord(
        kind="train",
        task="t",
        sample_id="s",
        outcome=Outcome.ENGINE_FAILED,
        stop_reason=StopReason.ABORTED,
        started_s=0.0,
        finished_s=1.0,
        turns=(Turn("bad \ud800 text", None, "nul \x00", 0, 0),),
    )
    recorder = EpisodeRecorder(tmp_path, flush_every=1)
    recorder.record(record)
    recorder.close()
    assert query(tmp_path, "select turns[1].text, turns[1].observation from EPISODES") == [("bad ? text", "nul \x00")]


def test_reward_and_outcome_that_disagree_are_refused() -> None:
    base = {"kind": "train", "task": "t", "sample_id": "s", "started_s": 0.0, "finished_s": 1.0}
    for outcome, reward in [
        (Outcome.SCORED, None),
        (Outcome.SCORED, float("nan")),
        (Outcome.SANDBOX_FAILED, 0.0),
        (Outcome.VERIFIER_FAILED, float("nan")),
    ]:
        with pytest.raises(ValueError, match="with reward"):
            EpisodeRecord(**base, outcome=outcome, stop_reason=StopReason.COMPLETED, reward=reward)


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        EpisodeRecord(
            kind="train",
            task="t",
            sample_id="s",
            outcome=Outcome.SCORED,
            stop_reason=StopReason.COMPLETED,
            started_s=0.0,
            finished_s=1.0,
            reward=1.0,
            token_ids=np.zeros(3, np.int32),
        )


def test_every_field_of_a_record_is_a_column() -> None:
    assert {f.name for f in fields(EpisodeRecord)} <= set(SCHEMA.names)
