"""What the ledger holds, and how a resume turns it back to a checkpoint. Plain SQL, one fact in one place.

`samples` has one row for every attempt at a sample. Its identity is `(group_id, sample_index)`; a new attempt follows
an infrastructure failure. `groups` has one row for every group that was opened; `ended` is empty while the group is
wanted, then `trained`, `stale` or `short`. `trajectories` holds what was scored, as long as a resume may need it.
`resumes` has one row for each time that the ledger was turned back, for no clock ran between two runs.
"""

from __future__ import annotations

from enum import StrEnum


class SampleState(StrEnum):
    """Where an attempt is. The last three are final."""

    LEASED = "leased"
    """Admitted: waits for its sandbox, or after a resume for its place."""
    RUNNING = "running"
    """Its sandbox is ready and the agent acts."""
    SCORED = "scored"
    """It has a reward and waits for its group and its batch."""
    TRAINED = "trained"
    DISCARDED = "discarded"
    FAILED = "failed"
    """Infrastructure failed it; it never had a reward. The sample is refilled by the next attempt."""


RUN_ENDED = "the run ended"
"""Reason of samples that were wanted when the run ended: a resume goes on with them."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    group_id INTEGER PRIMARY KEY, task TEXT NOT NULL, size INTEGER NOT NULL, ended TEXT NOT NULL DEFAULT '',
    trained_version INTEGER, opened_s REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS groups_ended ON groups (ended);
CREATE TABLE IF NOT EXISTS samples (
    sample_id TEXT PRIMARY KEY, group_id INTEGER NOT NULL, sample_index INTEGER NOT NULL, attempt INTEGER NOT NULL,
    task TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '', outcome TEXT,
    admitted_version INTEGER NOT NULL, oldest_version INTEGER, newest_version INTEGER, trained_version INTEGER,
    reward REAL, num_tokens INTEGER, sandbox_id TEXT, num_leases INTEGER NOT NULL DEFAULT 1,
    admitted_s REAL NOT NULL, running_s REAL, ended_s REAL, trained_s REAL, changed_s REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS samples_state ON samples (state);
CREATE INDEX IF NOT EXISTS samples_group ON samples (group_id);
CREATE TABLE IF NOT EXISTS trajectories (sample_id TEXT PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS cursor (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS checkpoints (version INTEGER PRIMARY KEY, saved_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS resumes (version INTEGER NOT NULL, resumed_s REAL NOT NULL);
"""

PRUNE = """
DELETE FROM trajectories WHERE sample_id IN (
    SELECT s.sample_id FROM trajectories JOIN samples s USING (sample_id)
    WHERE s.state IN ('trained', 'discarded', 'failed') AND s.reason != :ended
    AND NOT EXISTS (
        SELECT 1 FROM checkpoints c WHERE s.newest_version <= c.version AND s.trained_version >= c.version
    )
)
"""
"""Trajectories that no kept checkpoint needs: a resume from version v trains again on what was consumed at v or later
and was written by weights up to v; what later weights wrote is gone with them."""

ROLLBACK = """
CREATE TEMP TABLE undone AS
    SELECT s.sample_id, s.newest_version <= :version AND t.sample_id IS NOT NULL AS kept
    FROM samples s JOIN groups g USING (group_id) LEFT JOIN trajectories t USING (sample_id)
    WHERE (g.ended = '' OR g.trained_version >= :version) AND (
        s.state IN ('leased', 'running', 'scored') OR s.trained_version >= :version
        OR (s.state = 'discarded' AND s.reason = :ended)
    );
UPDATE groups SET ended = '', trained_version = NULL WHERE trained_version >= :version;
UPDATE samples SET state = 'scored', reason = '', trained_version = NULL, trained_s = NULL, changed_s = :now
    WHERE sample_id IN (SELECT sample_id FROM undone WHERE kept);
UPDATE samples SET state = 'leased', reason = 'waits to run again after a resume', outcome = NULL,
    oldest_version = NULL, newest_version = NULL, trained_version = NULL, reward = NULL, num_tokens = NULL,
    sandbox_id = NULL, running_s = NULL, ended_s = NULL, trained_s = NULL, changed_s = :now
    WHERE sample_id IN (SELECT sample_id FROM undone WHERE NOT coalesce(kept, 0));
DELETE FROM trajectories WHERE sample_id IN (SELECT sample_id FROM undone WHERE NOT coalesce(kept, 0));
DELETE FROM checkpoints WHERE version > :version;
INSERT INTO resumes VALUES (:version, :now);
DROP TABLE undone;
"""
"""Back to the checkpoint of `:version`. Every sample that was not final then, and is wanted, is again either scored
(its trajectory is there and only weights up to that version wrote it) or waits to run under the same id."""
