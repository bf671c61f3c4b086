"""A config of two small stages, and a program that runs it: `python tests/small_run.py RUN_DIR MODE`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from pipelines.plan import Plan, make_plan
from pipelines.resume import alone
from pipelines.run import execute
from pipelines.schema import GROUPS

ALLOWED = ("tests.small_stages.",)
ROOT = Path(__file__).parents[1]


def stage(target: str, needs: tuple[str, ...] = (), **options: Any) -> dict[str, Any]:
    """The shell of one stage around a class of `tests.small_stages`."""
    return {
        "needs": list(needs),
        "run": {"_target_": f"tests.small_stages.{target}", **options},
        "resources": {"nodes": 1, "gpus_per_node": 0, "cpus": 0.1},
        "start_timeout_s": 60.0,
        "stop_timeout_s": 10.0,
        "call_timeout_s": 20.0,
    }


def small_config(run_dir: Path, mode: str = "work") -> dict[str, Any]:
    """A resolved config: `worker` drives and needs `source`; both write into `diary`."""
    diary = str(run_dir / "diary")
    cluster = yaml.safe_load((ROOT / "conf/cluster/laptop.yaml").read_text())
    return {
        "name": "small",
        "seed": 0,
        "steps": 3,
        "plan_only": False,
        "resume": None,
        "resume_changed": False,
        "run_dir": str(run_dir),
        "checks": [],
        **{group: {} for group in GROUPS},
        "cluster": {**cluster, "heartbeat_s": 0.2, "heartbeat_timeout_s": 6.0, "stall_s": 1.0},
        "stages": {
            "worker": stage("Worker", ("source",), steps=3, diary=diary, mode=mode),
            "source": stage("Source", diary=diary),
        },
    }


def small_plan(run_dir: Path, mode: str = "work") -> Plan:
    """The plan of `small_config`."""
    return make_plan(small_config(run_dir, mode), allowed=ALLOWED)


if __name__ == "__main__":
    with alone(Path(sys.argv[1]), None):
        code = execute(small_plan(Path(sys.argv[1]), sys.argv[2]), Path(sys.argv[1]))
    sys.exit(code)
