import sqlite3
from pathlib import Path

import pytest

from miles_rl.rollout.ledger import Ledger


def test_every_attempt_is_a_row_that_ends_in_one_state(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for i in range(4):
        ledger.admit(f"g0.{i}.0", 0, i, 0, "sort", version=2)
    ledger.score("g0.0.0", 1.0, 2, "box-1")
    ledger.score("g0.1.0", 0.0, 1, "box-2")
    ledger.fail("g0.2.0", "sandbox_failed: gone")
    ledger.train(["g0.0.0"], version=3)
    ledger.discard(["g0.1.0"], "stale")
    assert ledger.counts() == {"trained": 1, "discarded": 1, "failed": 1, "running": 1}
    ledger.discard_unfinished("the run ended")
    assert ledger.counts() == {"trained": 1, "discarded": 2, "failed": 1}


def test_the_ledger_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.admit("g0.0.0", 0, 0, 0, "sort", version=0)
    reader = sqlite3.connect(f"file:{tmp_path / 'ledger.sqlite'}?mode=ro", uri=True)
    assert reader.execute("SELECT sample_id, state FROM samples").fetchall() == [("g0.0.0", "running")]


def test_a_sample_cannot_be_admitted_twice_or_moved_when_unknown(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.admit("g0.0.0", 0, 0, 0, "sort", version=0)
    with pytest.raises(sqlite3.IntegrityError):
        ledger.admit("g0.0.0", 0, 0, 0, "sort", version=0)
    with pytest.raises(KeyError, match=r"no sample 'g9\.0\.0'"):
        ledger.fail("g9.0.0", "x")
