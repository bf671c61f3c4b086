"""Opens a ledger read-only and gives its rows. Plain SQLite: `miles_rl.rollout.ledger_schema` says what they mean."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipelines.lock import holder

LEDGER_FILE = "ledger.sqlite"
TABLES = {"groups", "samples", "trajectories", "checkpoints"}
STATES = ("leased", "running", "scored", "trained", "discarded", "failed")
UNFINISHED = ("leased", "running", "scored")
RUN_ENDED = "the run ended"
"""Reason of samples that were still wanted when the run ended."""

_BUSY_TIMEOUT_S = 10.0
_UNWRITABLE = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY}
_PRIMARY_CODE = 0xFF


class LedgerUnreadable(Exception):
    """There is no ledger there. The message is one line with the path and the remedy."""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group that was opened. `ended` is empty while it is wanted, then `trained`, `stale` or `short`."""

    group_id: int
    task: str
    size: int
    ended: str
    trained_version: int | None


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One attempt at one member of a group. Times are seconds since the epoch."""

    sample_id: str
    group_id: int
    sample_index: int
    attempt: int
    task: str
    state: str
    reason: str
    outcome: str | None
    admitted_version: int
    oldest_version: int | None
    newest_version: int | None
    trained_version: int | None
    reward: float | None
    sandbox_id: str | None
    num_leases: int
    admitted_s: float
    running_s: float | None
    ended_s: float | None
    trained_s: float | None
    changed_s: float

    @property
    def kind(self) -> str:
        """What a failed or discarded attempt counts under: its outcome, or why it was discarded."""
        return self.outcome or "unknown" if self.state == "failed" else self.reason


_COLUMNS = {row: ", ".join(f.name for f in fields(row)) for row in (GroupRow, SampleRow)}


@dataclass(frozen=True, slots=True)
class LedgerFile:
    """An open ledger: one state of it, however long it is read and whatever is written meanwhile.

    `process` is the one whose run goes on and writes it, None if there is none: the run has ended, or was killed.
    """

    path: Path
    process: int | None
    database: sqlite3.Connection

    def groups(self) -> dict[int, GroupRow]:
        """All groups by id, in the order in which they were opened."""
        rows = self.database.execute(f"SELECT {_COLUMNS[GroupRow]} FROM groups ORDER BY group_id")
        return {row[0]: GroupRow(*row) for row in rows}

    def samples(self) -> Iterator[SampleRow]:
        """Every attempt, by group, member and attempt."""
        rows = self.database.execute(
            f"SELECT {_COLUMNS[SampleRow]} FROM samples ORDER BY group_id, sample_index, attempt"
        )
        return (SampleRow(*row) for row in rows)

    def now_s(self) -> float:
        """Seconds since the epoch: now while the run goes on, else when the ledger was last changed."""
        return time.time() if self.process is not None else self.changed_s()

    def changed_s(self) -> float:
        """When the ledger was last changed, in seconds since the epoch."""
        (changed_s,) = self.one("SELECT max(coalesce((SELECT max(changed_s) FROM samples), 0), coalesce((SELECT"
                                " max(opened_s) FROM groups), 0))")  # fmt: skip
        return float(changed_s)

    def resumed_s(self) -> list[float]:
        """When the runs before this one were gone on from, in seconds since the epoch."""
        if not self.one("SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'resumes'")[0]:
            return []
        return [resumed_s for (resumed_s,) in self.database.execute("SELECT resumed_s FROM resumes")]

    def one(self, sql: str) -> tuple[Any, ...]:
        """The first row of a query."""
        return self.database.execute(sql).fetchone()


@contextlib.contextmanager
def opened(run: str | Path) -> Generator[LedgerFile]:
    """The ledger of a run folder, or the ledger file itself. `LedgerUnreadable` if there is none, or it is damaged.

    Writes nothing beside it but the index (`-shm`) of a log that is there, and not even that where it cannot.
    """
    path = located(Path(run))
    process = _process_of(path.parent)
    try:
        with _connected(path) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not tables >= TABLES and process is not None:
                raise _starting(path.parent, process)
            if not tables >= TABLES:
                missing = ", ".join(sorted(TABLES - tables))
                raise LedgerUnreadable(f"{path}: not a ledger, it has no table {missing}; give the folder of a run")
            yield LedgerFile(path, process, database)
    except sqlite3.DatabaseError as error:
        raise LedgerUnreadable(
            f"{path}: {error}; a run that is resumed from a checkpoint takes that one's copy of the ledger"
        ) from error


def located(run: Path) -> Path:
    """The ledger file of `run`, which is a run folder, a checkpoint's, or the file. `LedgerUnreadable` if none."""
    if run.is_file():
        return run
    if not run.is_dir():
        raise LedgerUnreadable(f"{run}: no such run; give the folder of a run, or its {LEDGER_FILE}")
    path = run / LEDGER_FILE
    if not path.is_file():
        if (process := _process_of(run)) is not None:
            raise _starting(run, process)
        raise LedgerUnreadable(f"{run}: holds no {LEDGER_FILE}; the run ended before its first rollout, or is no run")
    return path


def _starting(run: Path, process: int) -> LedgerUnreadable:
    return LedgerUnreadable(f"{run}: the run is starting, in process {process}, and has no ledger yet; ask again soon")


def _process_of(folder: Path) -> int | None:
    """The process of the run that goes on in `folder`; None also for what asks from within that process."""
    found = holder(folder)
    return None if found is None or found.elsewhere or found.pid == os.getpid() else found.pid


@contextlib.contextmanager
def _connected(path: Path) -> Generator[sqlite3.Connection]:
    """A read-only connection with its snapshot taken. A ledger without a log file is at rest, and nothing is made."""
    log = Path(f"{path}-wal")
    with contextlib.ExitStack() as held:
        try:
            database = _begin(held, path, "mode=ro" if log.exists() else "immutable=1")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & _PRIMARY_CODE not in _UNWRITABLE or not log.exists():
                raise
            # The log has no index and none can be made there. To leave the log out would hide what was written last.
            aside = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="miles-ledger-")), path.name)
            for file in (path, log):
                shutil.copyfile(file, aside.with_name(aside.name + file.name.removeprefix(path.name)))
            database = _begin(held, aside, "mode=ro")
        yield database


def _begin(held: contextlib.ExitStack, path: Path, mode: str) -> sqlite3.Connection:
    address = f"file:{quote(str(path.resolve()))}?{mode}"
    database = sqlite3.connect(address, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
    held.callback(database.close)
    database.execute("BEGIN")
    database.execute("SELECT count(*) FROM sqlite_master").fetchone()  # only a read takes the snapshot
    return database
