"""The front door: `python -m pipelines.run [key=value ...] [group=option ...] [+experiment=name]`.

Exit code 0: the run did its work. 1: it failed. 2: the config is wrong, nothing was started. 130: interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from pipelines import plan_text
from pipelines import schema as schema
from pipelines.errors import ConfigError, Problem, explain, show
from pipelines.observer import Observer
from pipelines.origin import resolve
from pipelines.plan import Plan, make_plan
from pipelines.result import write_atomic, write_config, write_result
from pipelines.resume import OVERRIDES_FILE, alone, check_resumed, refuse_running, refuse_taken, with_saved_overrides
from pipelines.say import say
from pipelines.supervise import Ending

EXIT_CODES = {"success": 0, "failed": 1, "interrupted": 130}
CONFIG_ERROR = 2
ASIDE = "MILES_SWEEP_DIR"
"""Names the folder where Hydra notes a sweep and makes one for each of its runs. It is removed: a run's own says more,
and planning leaves nothing."""
STRIKE = "strike: fault: "
"""A fault writes this and what it does into the log, at each strike."""

log = logging.getLogger(__name__)


def main() -> None:
    """Compose the config of the command line and run it; with `-m` run each of the sweep's, one after the other."""
    codes: list[int] = []
    configs: list[DictConfig] = []
    try:
        sys.argv[1:] = with_saved_overrides(sys.argv[1:])
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(CONFIG_ERROR)
    full_errors = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing, and we print one line
    aside = Path(tempfile.gettempdir()) / f"miles-sweep-{secrets.token_hex(8)}"
    os.environ[ASIDE] = str(aside)

    @hydra.main(version_base="1.3", config_path="../conf", config_name="run")
    def job(config: DictConfig) -> None:
        shutil.rmtree(aside, ignore_errors=True)
        if configs:
            OmegaConf.copy_cache(configs[0], config)  # one stamp for all runs of a sweep
        configs.append(config)
        codes.append(run(config))
        if codes[-1] == EXIT_CODES["interrupted"]:
            sys.exit(codes[-1])  # ends a sweep too

    try:
        job()
    except Exception as error:
        problem = explain(error, [word for word in sys.argv[1:] if not word.startswith("-")])
        if full_errors == "1" or problem is None:
            raise
        print(problem.line, file=sys.stderr)
        codes.append(CONFIG_ERROR)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        os.environ.pop(ASIDE)
        os.environ.pop("HYDRA_FULL_ERROR")
        os.environ.update({"HYDRA_FULL_ERROR": full_errors} if full_errors else {})
    sys.exit(max(codes, default=0))


def run(config: DictConfig) -> int:
    """Run one composed config. Returns the exit code. Nothing is on the disk before it is known that it can run."""
    hydra_config = HydraConfig.get()
    number = (str(hydra_config.job.num),) if hydra_config.mode is RunMode.MULTIRUN else ()
    run_dir = Path(config.run_dir, *number).absolute()
    overrides = cast(list[str], OmegaConf.to_container(hydra_config.overrides.task, resolve=False))
    OmegaConf.update(config, "run_dir", str(run_dir))
    with contextlib.ExitStack() as held:
        try:
            plan = planned(config, run_dir)
            if plan.config["plan_only"]:
                plan_text.show_plan(plan)
                return 0
            held.enter_context(alone(run_dir, plan.config["resume"]))
        except ConfigError as error:
            print(error, file=sys.stderr)
            return CONFIG_ERROR
        write_atomic(run_dir / OVERRIDES_FILE, json.dumps(list(overrides), indent=1) + "\n")
        write_config(run_dir, plan.config)
        write_atomic(run_dir / "plan.txt", plan_text.plain(plan))
        return execute(plan, run_dir, overrides)


def planned(config: DictConfig, run_dir: Path) -> Plan:
    """The checked plan. Raises `ConfigError`."""
    choices = {group: option for group, option in HydraConfig.get().runtime.choices.items() if "hydra/" not in group}
    resolved, raw = resolve(config)
    refuse_running(resolved["resume"])
    refuse_taken(run_dir)
    _refuse_unwritable(run_dir)
    plan = make_plan(resolved, raw, choices=choices)
    changed = check_resumed(resolved, raw, multirun=HydraConfig.get().mode is RunMode.MULTIRUN)
    return dataclasses.replace(plan, notes=(*plan.notes, *changed))


def _refuse_unwritable(run_dir: Path) -> None:
    """What can be seen of that without making the folder."""
    nearest = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        reason = "permission denied" if nearest.is_dir() else "not a directory"
        raise ConfigError([Problem("run_dir", run_dir, f"{reason}: give a folder that can be written")])


def execute(plan: Plan, run_dir: Path, overrides: Sequence[str] = ()) -> int:
    """Launch `plan`, write its result and its report. Returns the exit code."""
    from pipelines.display import closing_lines, make_display

    begin = time.monotonic()
    with _log_to(run_dir / "log.txt"):
        for note in plan.notes:
            log.info("%s", note)
        with make_display(plan, run_dir, plan.config["steps"]) as display:
            ending = _launch(plan, run_dir, display)
            if plan.fault and ending.status == "success" and STRIKE not in (run_dir / "log.txt").read_text():
                ending.warnings.append("the fault never struck; give it a higher rate, or an earlier moment")
                display.note(ending.warnings[-1])
        log.info("run ended: %s %s", ending.status, ending.error or "")
        result = write_result(run_dir, plan, ending, time.monotonic() - begin, overrides)
        report = _report(run_dir)
    for line in closing_lines(result, report):
        say(line)
    return EXIT_CODES[ending.status]


def _launch(plan: Plan, run_dir: Path, display: Observer) -> Ending:
    try:
        return importlib.import_module("pipelines.launch").launch(plan, run_dir, display)
    except (Exception, KeyboardInterrupt) as error:
        log.exception("the launcher failed")
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        return Ending(status, f"{type(error).__name__}: {show(error)}")


def _report(run_dir: Path) -> Path:
    """Where the report is; a report that cannot be made changes nothing about the run."""
    try:
        return importlib.import_module("pipelines.report").write_report(run_dir)
    except Exception as error:
        log.exception("no report")
        print(f"no report: {type(error).__name__}: {error}; the figures are in {run_dir}", file=sys.stderr)
        return run_dir / "report.html"


@contextlib.contextmanager
def _log_to(file: Path) -> Any:
    """Everything that this process logs goes to `file`, and not to the terminal."""
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s driver %(name)s: %(message)s"))
    root = logging.getLogger()
    before = root.handlers[:]
    level = root.level
    root.handlers = [cast(logging.Handler, handler)]
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.handlers = before
        root.setLevel(level)
        handler.close()


if __name__ == "__main__":
    main()
