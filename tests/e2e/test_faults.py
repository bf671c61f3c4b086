"""Faults through the real graph: what fails says why, nothing is scored that should not be, and a resume goes on.

One fault of each stage; `benchmarks/faults.py` plays all of them, and resumes each run that failed.
"""

from pathlib import Path

import pytest

from benchmarks.faults import trial


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "outcome", "message", "resumed"),
    [
        ("engine_crash", "failed", "stage 'fleet': EngineError: replica 0 ", "ended well"),
        ("verifier_broken", "failed", "stage 'rollout': RolloutHalted: task ", ""),
        ("corrupted_update", "failed", "stage 'trainer': EngineError: publish of version 2 to replica 0 ", ""),
        ("sandbox_create_20", "went on", "", ""),
    ],
)
def test_a_fault_is_survived_or_told_by_name(
    tmp_path: Path, fault: str, outcome: str, message: str, resumed: str
) -> None:
    done = trial(tmp_path, fault, resume=bool(resumed))
    assert done.problems == []
    assert done.num_strikes > 0
    assert (done.outcome, done.message.startswith(message)) == (outcome, True), done.message
    assert done.resumed == resumed
