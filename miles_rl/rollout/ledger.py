"""The run's ledger: one row for every attempt at a sample, from admission to its end.

SQLite in WAL mode, so that it can be read while the run goes on. A sample's identity is `(group_id, index)`; each
attempt at it is a row of its own, since a failed attempt is refilled under the same identity.
"""

from __future__ import annotations

import sqlite3
import time
from enum import StrEnum
from pathlib import Path


class SampleState(StrEnum):
    """Where an attempt is. The last three are final."""

    RUNNING = "running"
    SCORED = "scored"
    TRAINED = "trained"
    DISCARDED = "discarded"
    FAILED = "failed"


SCHEMA = """
CREATE TABLE IF NOT EXISTS samples (
    sample_id TEXT PRIMARY KEY, group_id INTEGER NOT NULL, sample_index INTEGER NOT NULL, attempt INTEGER NOT NULL,
    task TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '', admitted_version INTEGER NOT NULL,
    oldest_version INTEGER, trained_version INTEGER, reward REAL, sandbox_id TEXT,
    admitted_s REAL NOT NULL, changed_s REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS samples_state ON samples (state);
"""


class Ledger:
    """Append and update rows of one run. One writer; any number of readers."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, isolation_level=None, timeout=10.0)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(SCHEMA)

    def admit(self, sample_id: str, group_id: int, index: int, attempt: int, task: str, version: int) -> None:
        """A new attempt starts under weights `version`. `sqlite3.IntegrityError` if the id was used before."""
        now = time.time()
        self._db.execute(
            "INSERT INTO samples (sample_id, group_id, sample_index, attempt, task, state, admitted_version,"
            " admitted_s, changed_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (sample_id, group_id, index, attempt, task, SampleState.RUNNING, version, now, now),
        )

    def score(self, sample_id: str, reward: float, oldest_version: int, sandbox_id: str) -> None:
        """The attempt ended with a reward."""
        self._move(sample_id, SampleState.SCORED, reward=reward, oldest_version=oldest_version, sandbox_id=sandbox_id)

    def fail(self, sample_id: str, reason: str) -> None:
        """The attempt failed for infrastructure; it is refilled, never scored."""
        self._move(sample_id, SampleState.FAILED, reason=reason)

    def train(self, sample_ids: list[str], version: int) -> None:
        """The samples were handed to the trainer, which consumes them at `version`."""
        self._move_all(sample_ids, SampleState.TRAINED, trained_version=version)

    def discard(self, sample_ids: list[str], reason: str) -> None:
        """The samples will never be trained, for `reason`."""
        self._move_all(sample_ids, SampleState.DISCARDED, reason=reason)

    def discard_unfinished(self, reason: str) -> None:
        """Every attempt that is neither trained nor ended is given up, for `reason`."""
        states = (SampleState.RUNNING, SampleState.SCORED)
        rows = self._db.execute("SELECT sample_id FROM samples WHERE state IN (?, ?)", states).fetchall()
        self.discard([row[0] for row in rows], reason)

    def counts(self) -> dict[str, int]:
        """Number of attempts per state."""
        return dict(self._db.execute("SELECT state, COUNT(*) FROM samples GROUP BY state").fetchall())

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _move_all(self, sample_ids: list[str], state: SampleState, **columns: str | int) -> None:
        self._db.execute("BEGIN")
        for sample_id in sample_ids:
            self._move(sample_id, state, **columns)
        self._db.execute("COMMIT")

    def _move(self, sample_id: str, state: SampleState, **columns: str | int | float) -> None:
        names = "".join(f", {name} = ?" for name in columns)
        cursor = self._db.execute(
            f"UPDATE samples SET state = ?, changed_s = ?{names} WHERE sample_id = ?",
            (state, time.time(), *columns.values(), sample_id),
        )
        if cursor.rowcount != 1:
            raise KeyError(f"ledger: no sample {sample_id!r} to move to {state}")
