"""A fault that never struck is told: who reads the result would take the run for one that survived it."""

import json
import logging
from pathlib import Path

import pytest
from small_run import ALLOWED, small_config

from pipelines import run
from pipelines.observer import Observer
from pipelines.plan import Plan, make_plan
from pipelines.supervise import Ending


@pytest.mark.parametrize(("strikes", "warnings"), [(["fault: a limb is lost"], []), ([], ["the fault never struck"])])
def test_a_run_whose_fault_never_struck_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strikes: list[str], warnings: list[str]
) -> None:
    def launch(plan: Plan, run_dir: Path, display: Observer) -> Ending:
        for line in strikes:
            logging.getLogger("miles_rl.faults.strike").warning("%s", line)
        return Ending("success")

    monkeypatch.setattr(run, "_launch", launch)
    plan = make_plan({**small_config(tmp_path), "faults": {"_target_": "tests.small_stages.Limp"}}, allowed=ALLOWED)
    assert run.execute(plan, tmp_path) == 0
    told = json.loads((tmp_path / "result.json").read_text())["warnings"]
    assert [line.partition(";")[0] for line in told] == warnings
