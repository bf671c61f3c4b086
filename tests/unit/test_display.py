import io
import os
import pty
import re
import select
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipelines.display import closing_lines, make_display
from pipelines.display.board import Board
from pipelines.display.live import Painter
from pipelines.display.plain import PlainDisplay
from pipelines.plan import Plan, PlannedStage

STAGES = ("data", "sandboxes", "fleet", "eval", "rollout", "trainer")


def plan_of(*stages: str) -> Plan:
    planned = tuple(PlannedStage(name, (), "pipelines.x", {}, 1, 0, 0.1, 1.0, 1.0, 1.0) for name in stages)
    return Plan(planned, stages[-1], {"name": "quickstart", "seed": 7})


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def board_at(clock: Clock, steps: int = 100) -> Board:
    return Board("quickstart", 7, STAGES, steps, clock)


def trainer(step: int, reward: float = 0.5, steps: int = 100) -> dict[str, Any]:
    metrics = {
        "rollout/reward_mean": reward,
        "train/train_rollout_kl": 0.0021,
        "async/staleness_mean": 1.5,
        "async/staleness_max": 3,
    }
    return {"step": step, "steps": steps, "phase": "training", "metrics": metrics}


def painted(board: Board, width: int = 110, unicode: bool = True) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, color_system=None)
    console.print(Painter(board, unicode).panel())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_time_left_follows_the_pace_of_the_steps() -> None:
    clock = Clock()
    board = board_at(clock)
    assert board.left_s is None
    for step in range(11):
        board.status("trainer", trainer(step))
        clock.now_s += 2.0
    assert board.left_s == pytest.approx(2.0 * 90 - 2.0)
    clock.now_s += 1000
    assert board.left_s == 0.0
    board.stage("fleet", "failed", "gone")
    assert board.left_s is None


def test_the_panel_shows_every_figure_that_the_stages_gave() -> None:
    board = board_at(Clock())
    for name in STAGES:
        board.stage(name, "up")
    board.status("trainer", trainer(61, reward=0.689))
    ends = [{"solve_rate": 0.41, "ci95": [0.33, 0.49], "version": 0}, {"solve_rate": 0.72, "ci95": [0.64, 0.79]}]
    board.status("eval", {"running": 0, "history": ends})
    board.status("rollout", {"running": 64, "scored": 3904, "failed": 2, "stale": 8, "waits_for_groups": 3})
    board.status("fleet", {"tokens_per_s": 1834.2})
    board.status("sandboxes", {"size": 32, "in_use": 29})
    board.note("publish 61 in 0.08 s")
    shown = painted(board)
    for text in (
        "quickstart - seed 7",
        "step 61 / 100",
        "41 % [33, 49] -> 72 % [64, 79] +31",
        "0.689",
        "64 running, 3,904 scored, 2 failed, 8 groups too old; waits for 3 protected groups",
        "KL to rollout 0.0021",
        "staleness 1.5   (max 3)",
        "tokens/s 1,834",
        "29 of 32",
        "publish 61 in 0.08 s",
    ):
        assert text in shown


def test_the_panel_names_a_failed_stage_and_its_cause_once_and_for_good() -> None:
    board = board_at(Clock())
    board.stage("fleet", "failed", "fleet: replica 0 ended with -9")
    board.stage("fleet", "stopping")
    board.stage("fleet", "down")
    shown = painted(board)
    assert shown.count("fleet: replica 0 ended with -9") == 1
    assert "fleet: fleet:" not in shown
    assert "\u2716 fleet" in shown


def test_the_panel_stands_any_figure_a_stage_may_send() -> None:
    board = board_at(Clock())
    odd: list[Any] = [None, float("nan"), float("inf"), "text", [], {}, True, -1]
    for value in odd:
        for name in (*STAGES, "unheard-of"):
            keys = ("step", "steps", "phase", "metrics", "running", "solve_rate", "ci95", "history", "size")
            board.status(name, dict.fromkeys(keys, value))
            board.stage(name, str(value))
        board.status("trainer", {"step": 3, "metrics": {"rollout/reward_mean": value}})
        board.status("eval", {"history": [value, {"solve_rate": value, "ci95": value, "version": value}]})
        for width in (20, 60, 200):
            assert "quickstart"[:5] in painted(board, width)


def test_hostile_text_reaches_neither_the_terminal_nor_the_markup() -> None:
    board = board_at(Clock())
    board.note("\x1b[2J\x1b]0;owned\x07[bold]not markup[/bold]\r\nsecond\x9b31m")
    board.stage("fleet", "starting", "a\x1b[31mb")
    shown = painted(board)
    assert "\x1b" not in shown
    assert "\x9b" not in shown
    assert "[bold]not markup[/bold] second" in shown
    assert "fleet: ab" in shown


def test_a_terminal_without_unicode_gets_ascii_figures() -> None:
    board = board_at(Clock())
    for step in range(1, 20):
        board.status("trainer", trainer(step, reward=step / 20))
    board.stage("data", "up")
    inside = painted(board, unicode=False).splitlines()
    assert any("* data" in line for line in inside)
    assert any(line.strip("\u2502 ").isascii() and "reward" in line for line in inside)


def test_evaluations_without_a_history_are_kept_once_each() -> None:
    board = board_at(Clock())
    for running, rate, version in [(40, None, None), (0, 0.4, 0), (9, 0.4, 0), (0, 0.7, 50), (3, 0.7, 50)]:
        board.status("eval", {"running": running, "solve_rate": rate, "ci95": (0.1, 0.9), "version": version})
    assert [(e.solve_rate, e.version) for e in board.evaluations] == [(0.4, 0), (0.7, 50)]


def test_plain_lines_are_paced_and_the_last_step_is_always_shown() -> None:
    clock, out = Clock(), io.StringIO()
    display = PlainDisplay(board_at(clock), out)
    for step in range(101):
        display.status("trainer", trainer(step))
        clock.now_s += 0.1
    display.close()
    steps = [int(found[1]) for found in re.finditer(r"step (\d+)/100", out.getvalue())]
    assert steps[0] == 1
    assert steps[-1] == 100
    assert len(steps) == len(set(steps))
    assert 4 <= len(steps) <= 8


def test_plain_lines_tell_of_failures_stale_groups_and_what_batches_wait_for() -> None:
    out = io.StringIO()
    display = PlainDisplay(board_at(Clock()), out)
    display.status("rollout", {"failed": 2, "stale": 8, "waits_for_groups": 0})
    display.status("trainer", trainer(100))
    assert "failed 2  groups too old 8" in out.getvalue()
    assert "waits for" not in out.getvalue()
    display = PlainDisplay(board_at(Clock()), out)
    display.status("rollout", {"failed": 0, "stale": 0, "waits_for_groups": 3})
    display.status("trainer", trainer(100))
    assert "waits for 3 protected groups" in out.getvalue().splitlines()[1]


def test_a_run_that_goes_on_from_another_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = plan_of(*STAGES)
    for resume, told in ((None, False), ("runs/a/checkpoints/step-000020", True)):
        with make_display(Plan(plan.stages, plan.driver, {**plan.config, "resume": resume}), tmp_path, 100):
            pass
        assert (" - goes on from runs/a/checkpoints/step-000020" in capsys.readouterr().out) == told


def test_plain_lines_tell_of_stages_evaluations_and_notes_once() -> None:
    out = io.StringIO()
    display = PlainDisplay(board_at(Clock()), out)
    display.stage("fleet", "starting", "1 replica")
    display.stage("fleet", "starting", "1 replica")
    display.stage("fleet", "up")
    for _ in range(3):
        display.status("eval", {"running": 0, "solve_rate": 0.41, "ci95": [0.33, 0.49], "version": 0})
    display.note("\x1b[31mengine restarted\x1b[0m")
    lines = [line.partition("] ")[2] for line in out.getvalue().splitlines()]
    assert lines == [
        "fleet: starting (1 replica)",
        "fleet: up",
        "evaluation of version 0: solve rate 41 % [33, 49]",
        "engine restarted",
    ]


PROGRAM = """
    import time
    from pipelines.display import make_display
    from pipelines.plan import Plan, PlannedStage
    stage = PlannedStage("trainer", (), "pipelines.x", {}, 1, 0, 0.1, 1.0, 1.0, 1.0)
    with make_display(Plan((stage,), "trainer", {"name": "quickstart", "seed": 7}), "runs/x", 10) as observer:
        observer.stage("trainer", "up")
        observer.status("trainer", {"step": 4, "steps": 10})
        print("a printed line", flush=True)
        time.sleep(0.5)
        ENDING
    print("after")
"""
ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUTF8": "1"}


def program(ending: str) -> str:
    return textwrap.dedent(PROGRAM).replace("ENDING", ending)


def on_a_terminal(ending: str, term: str = "xterm-256color") -> str:
    """What a program that shows a display writes to a real pseudo-terminal until it ends."""
    main, side = pty.openpty()
    command = [sys.executable, "-c", program(ending)]
    process = subprocess.Popen(command, stdin=side, stdout=side, stderr=side, env={**ENV, "TERM": term})
    os.close(side)
    written, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([main], [], [], 0.2)[0]:
            try:
                written += os.read(main, 65536)
            except OSError:
                break
    process.wait(timeout=10)
    os.close(main)
    return written.decode("utf-8", "replace")


def test_a_reader_who_goes_away_ends_the_lines_and_not_the_run(tmp_path: Path) -> None:
    ending = f"[observer.note('x' * 99) for _ in range(2000)]; open({str(tmp_path / 'went_on')!r}, 'w')"
    reader, writer = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", program(ending)], stdout=writer, stderr=subprocess.PIPE, env=ENV)
    os.close(writer)
    seen = b""
    while b"a printed line\n" not in seen:
        part = os.read(reader, 4096)
        assert part, seen
        seen += part
    os.close(reader)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")
    assert (tmp_path / "went_on").exists()


def test_output_that_is_not_a_terminal_never_holds_an_escape(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with make_display(plan_of(*STAGES), tmp_path, 100) as observer:
        observer.stage("data", "up")
        observer.status("trainer", trainer(1))
        observer.note("hello")
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "data: up" in out
    assert "step 1/100" in out


@pytest.mark.parametrize(
    ("ending", "expected"),
    [("pass", "a printed line"), ("raise RuntimeError('boom')", "boom"), ("raise KeyboardInterrupt", "Keyboard")],
)
def test_a_terminal_sees_the_panel_and_gets_its_cursor_back(ending: str, expected: str) -> None:
    written = on_a_terminal(ending)
    assert "\x1b[?25l" in written
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")
    assert "quickstart" in written
    assert expected in written


def test_a_dumb_terminal_gets_plain_lines() -> None:
    written = on_a_terminal("pass", term="dumb")
    assert "\x1b" not in written
    assert "step 4/10" in written


def result_with(**metrics: Any) -> dict[str, Any]:
    named = {f"eval/solve_rate_{name}": value for name, value in metrics.items()}
    return {"status": "success", "steps": 100, "wall_s": 150.0, "metrics": named}


@pytest.mark.parametrize(
    ("metrics", "first", "last"),
    [
        (
            {"before": 0.41, "after": 0.72, "delta": 0.31, "delta_ci95": [0.22, 0.4]},
            "It learned: solve rate 41 % -> 72 % (+31 points, 95 % interval +22 to +40).",
            "other seeds",
        ),
        (
            {"before": 0.41, "after": 0.45, "delta": 0.04, "delta_ci95": [-0.03, 0.11]},
            "No change beyond noise: solve rate 41 % -> 45 % (+4 points, 95 % interval -3 to +11).",
            "steps=200",
        ),
        (
            {"before": 0.41, "after": 0.2, "delta": -0.21, "delta_ci95": [-0.3, -0.1]},
            "It got worse: solve rate 41 % -> 20 % (-21 points, 95 % interval -30 to -10).",
            "trainer.lr",
        ),
        ({"before": 0.96, "after": 0.96, "delta": 0.0, "delta_ci95": [-0.1, 0.1]}, "No change", "too easy"),
        ({"before": 0.01, "after": 0.01, "delta": 0.0, "delta_ci95": [-0.1, 0.1]}, "No change", "longer warm start"),
        ({"before": 0.41, "after": 0.72}, "Not judged: solve rate 41 % -> 72 %, +31 points, without", "evaluate"),
        ({"after": 0.72}, "Not judged: there is no evaluation before", "evaluate"),
        ({}, "Not judged: there is no evaluation before", "evaluate"),
        ({"before": float("nan"), "after": None}, "Not judged: there is no evaluation before", "evaluate"),
    ],
)
def test_the_closing_lines_claim_only_what_the_interval_allows(
    tmp_path: Path, metrics: dict[str, Any], first: str, last: str
) -> None:
    report = tmp_path / "report.html"
    report.touch()
    lines = closing_lines(result_with(**metrics), report)
    assert len(lines) == 3
    assert lines[0].startswith(first)
    assert lines[1] == f"Report: {report}"
    assert last in lines[2]


def test_a_failed_run_closes_with_its_cause_its_log_and_a_remedy(tmp_path: Path) -> None:
    result = {"status": "failed", "steps": 12, "wall_s": 65.0, "error": "fleet: replica 0 ended with -9\nTraceback"}
    lines = closing_lines(result, tmp_path / "report.html")
    assert lines == [
        "Failed after 12 steps and 1 m 05 s: fleet: replica 0 ended with -9",
        f"Log: {tmp_path / 'log.txt'}",
        f"Next: {tmp_path / 'log.txt'} tells more",
    ]


def test_an_interrupted_run_with_a_checkpoint_says_the_command_that_goes_on(tmp_path: Path) -> None:
    result = {"status": "interrupted", "steps": 12, "wall_s": 65.0, "overrides": ["+experiment=x", "resume=old"]}
    assert "starts afresh" in closing_lines(result, tmp_path / "report.html")[2]
    (tmp_path / "checkpoints" / "step-10").mkdir(parents=True)
    lines = closing_lines(result, tmp_path / "report.html")
    assert lines[0] == "Interrupted after 12 steps and 1 m 05 s."
    command = f"python -m pipelines.run resume={tmp_path}"
    assert lines[2] == f"Next: {command} goes on from the last checkpoint"


def test_a_resumed_run_that_saved_nothing_names_what_it_went_on_from(tmp_path: Path) -> None:
    earlier = {"path": str(tmp_path / "old/checkpoints/step-000004"), "version": 4}
    result = {"status": "interrupted", "steps": 4, "wall_s": 6.0, "overrides": [], "resumed_from": earlier}
    command = f"python -m pipelines.run resume={earlier['path']}"
    assert closing_lines(result, tmp_path / "new/report.html")[2].startswith(f"Next: {command} goes on")


def test_the_next_command_keeps_the_choices_of_the_run_but_not_its_seed(tmp_path: Path) -> None:
    result = result_with(before=0.4, after=0.7, delta=0.3, delta_ci95=[0.2, 0.4])
    result["overrides"] = ["dataset=train8", "seed=4", "trainer.lr=1e-3"]
    command = "python -m pipelines.run dataset=train8 trainer.lr=1e-3 -m 'seed=range(3)'"
    assert command in closing_lines(result, tmp_path / "report.html")[2]


def test_the_closing_lines_stand_a_result_with_nothing_in_it(tmp_path: Path) -> None:
    assert len(closing_lines({}, tmp_path / "report.html")) == 3
    assert len(closing_lines({"status": "failed", "metrics": None}, tmp_path / "report.html")) == 3
