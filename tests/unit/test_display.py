import io
import os
import pty
import re
import select
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipelines.display import closing_lines, make_display
from pipelines.display.board import Board
from pipelines.display.live import BLOCKS, Painter
from pipelines.display.live import _Resizing as live_panel
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
        "perf/tokens_per_s": 1834.2,
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
    ends = [
        {"solve_rate": 0.41, "ci95": [0.33, 0.49], "version": 0},
        {"solve_rate": 0.72, "ci95": [0.64, 0.79], "version": 40},
    ]
    board.status("trainer", {**trainer(61, reward=0.689), "evaluations": ends})
    board.status("eval", {"running": 0, **ends[1], "took_s": 14.2, "episodes": 160})
    board.status("rollout", {"running": 64, "scored": 3904, "failed": 2, "stale": 8, "waits_for_groups": 3})
    board.status("sandboxes", {"size": 32, "in_use": 29})
    board.note("publish 61 in 0.08 s")
    shown = painted(board)
    for text in (
        "quickstart - seed 7",
        "step 61 / 100",
        "now         training",
        "evaluation  the last took 14 s for 160 episodes",
        "41 % [33, 49] -> 72 % [64, 79] +31 points at version 40",
        "0.689",
        "64 running, 3,904 scored, 2 failed, 8 groups too old; waits for 3 protected groups",
        "KL to rollout policy 0.0021",
        "versions behind 1.5 (max 3)",
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
            keys = (
                "step",
                "steps",
                "phase",
                "metrics",
                "running",
                "solve_rate",
                "ci95",
                "evaluations",
                "now",
                "first_step",
                "problem",
                "took_s",
                "episodes",
                "size",
            )
            board.status(name, dict.fromkeys(keys, value))
            board.stage(name, str(value))
        board.status("trainer", {"step": 3, "metrics": {"rollout/reward_mean": value}})
        one = {"solve_rate": value, "ci95": value, "version": value}
        now = {"version": value, "done": value, "total": value, "infra_failures": value, "left_s": value}
        board.status("eval", {"evaluations": [value, one], "now": now})
        board.status("eval", {"now": {**now, "done": 3, "total": 20}})
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


def test_time_left_after_a_resume_is_of_the_steps_of_this_run() -> None:
    clock = Clock()
    board = board_at(clock)
    for step in (0, 60, 60):  # loads, then evaluates: the steps before are none of this run
        board.status("trainer", {**trainer(step), "first_step": None})
        assert (board.left_s, board.rewards) == (None, [])
        clock.now_s += 30.0
    board.status("trainer", {**trainer(60), "first_step": 60})
    assert board.left_s is None, "one point has no pace"
    assert "tokens/s -" in painted(board), "what the run before had is none of its figures"
    clock.now_s += 4.0
    board.status("trainer", {**trainer(61), "first_step": 60})
    assert "tokens/s 1,834" in painted(board)
    assert board.rewards == [0.5]
    assert board.left_s == pytest.approx(4.0 * 39)
    board.status("trainer", {**trainer(100), "first_step": 60})
    assert board.left_s is None, "no step is left, and what else is left has its own line"


def test_plain_lines_of_a_resumed_run_begin_with_its_own_steps() -> None:
    out = io.StringIO()
    display = PlainDisplay(board_at(Clock()), out, min_interval_s=0.0)
    for step, first in ((60, None), (60, 60), (61, 60)):
        display.status("trainer", {**trainer(step), "first_step": first})
    display.close()
    assert re.findall(r"step (\d+)/", out.getvalue()) == ["61"]


def evaluating(done: int, failures: int = 0, version: int = 40) -> dict[str, Any]:
    rate, left_s = (0.614, 72.0) if done else (None, None)
    now = {"version": version, "done": done, "total": 1600, "solve_rate": rate, "infra_failures": failures}
    return {"running": 16, "now": {**now, "left_s": left_s}}


@pytest.mark.parametrize("phase", ["evaluating before training", "training", "evaluating after training"])
def test_any_evaluation_shows_how_far_it_is(phase: str) -> None:
    board = board_at(Clock())
    board.status("trainer", {**trainer(41), "phase": phase})
    board.status("eval", evaluating(0))
    assert "evaluation  0 of 1,600 episodes, 0 failures " in painted(board)
    board.status("eval", evaluating(570, failures=3))
    shown = painted(board, width=80)
    assert "evaluation  570 of 1,600 episodes, 61 % solved, 3 failures, 1 m 12 s left" in shown
    assert f"now         {phase}{'; evaluating version 40' if phase == 'training' else ''} " in shown
    done = {"solve_rate": 0.6, "ci95": [0.5, 0.7], "version": 40}
    board.status("trainer", {**trainer(41), "evaluations": [done]})
    assert "570 of" not in painted(board), "its result is there; what the stage said last is stale"


def test_figures_of_the_policy_fit_a_terminal_of_80_columns_without_a_mark_of_a_cut() -> None:
    board = board_at(Clock())
    metrics = {"train/train_rollout_kl": 1.4e-05, "async/staleness_mean": 0.406, "async/staleness_max": 1}
    board.status("trainer", {"step": 10, "steps": 10, "metrics": metrics})
    shown = painted(board, width=80)
    assert "KL to rollout policy 1.4e-05   versions behind 0.406 (max 1) " in shown
    assert "\u2026" not in shown


def test_a_run_that_evaluates_is_not_said_to_start() -> None:
    board = board_at(Clock())
    board.status("eval", evaluating(3, version=0))
    assert "now         evaluating version 0 " in painted(board)


def test_plain_lines_tell_how_far_an_evaluation_is_at_their_pace_and_never_after_its_end() -> None:
    clock, out = Clock(), io.StringIO()
    display = PlainDisplay(board_at(clock), out)
    for done in range(0, 50, 5):
        display.status("eval", evaluating(done))
        display.status("eval", evaluating(done))
        clock.now_s += 0.5
    display.status("eval", {"running": 0, "solve_rate": 0.6, "ci95": [0.5, 0.7], "version": 40})
    display.status("eval", evaluating(50))
    lines = [line.partition("] ")[2] for line in out.getvalue().splitlines()]
    assert lines == [
        "evaluation of version 40: 0 of 1,600 episodes, 0 failures",
        "evaluation of version 40: 20 of 1,600 episodes, 61 % solved, 0 failures, 1 m 12 s left",
        "evaluation of version 40: 40 of 1,600 episodes, 61 % solved, 0 failures, 1 m 12 s left",
        "evaluation of version 40: solve rate 60 % [50, 70]",
    ]


def test_evaluations_are_in_order_of_version_whoever_tells_them_first() -> None:
    board = board_at(Clock())
    board.status("eval", {"solve_rate": 0.7, "version": 60})
    board.status("trainer", {**trainer(62), "evaluations": [{"solve_rate": 0.4, "version": v} for v in (0, 40)]})
    assert [evaluation.version for evaluation in board.evaluations] == [0, 40, 60]


def test_the_panel_keeps_its_height_while_a_run_goes_on() -> None:
    board = board_at(Clock())
    board.note("starting Ray")
    heights: set[int] = set()
    for step, eval_figures in ((0, {}), (1, evaluating(3)), (50, {"took_s": 9.0, "episodes": 160}), (100, {})):
        board.status("trainer", trainer(step))
        board.status("eval", eval_figures)
        lines = painted(board, width=80).splitlines()
        assert {len(line) for line in lines} == {80}
        heights.add(len(lines))
    assert heights == {17}


def test_the_line_of_rewards_grows_to_its_width_and_stays_there() -> None:
    board = board_at(Clock(), steps=200)
    lengths: list[int] = []
    for step in range(1, 121):
        board.status("trainer", trainer(step, reward=step / 120))
        line = next(line for line in painted(board, width=80).splitlines() if "reward" in line)
        drawn = [BLOCKS.index(mark) for mark in line if mark in BLOCKS]
        assert drawn == sorted(drawn)
        lengths.append(len(drawn))
    assert lengths == [min(step, 36) for step in range(1, 121)]


def test_an_ended_run_shows_nothing_that_is_only_true_while_it_runs() -> None:
    board = board_at(Clock())
    board.status("trainer", trainer(100))
    board.status("eval", evaluating(570))
    board.status("rollout", {"running": 64, "scored": 3904, "failed": 2})
    board.status("sandboxes", {"size": 32, "in_use": 29})
    for name in STAGES:
        board.stage(name, "up")
    board.stage("trainer", "stopping")
    assert "now         stopping" in painted(board)
    board.finish()
    shown = painted(board)
    assert "\u25a0 trainer" in shown
    assert "\u25cf" not in shown, "no stage is up, also when none was stopped in order"
    for stale in ("570 of", "running", "29 of 32", "now  ", "training"):
        assert stale not in shown
    assert "3,904 scored, 2 failed" in shown


def test_what_went_wrong_without_ending_the_run_is_told_once_with_its_time() -> None:
    clock, out = Clock(), io.StringIO()
    board = board_at(clock)
    display = PlainDisplay(board, out)
    clock.now_s += 75.0
    for _ in range(3):
        display.status("trainer", {**trainer(0), "problem": "an evaluation failed"})
    assert out.getvalue().count("an evaluation failed") == 1
    assert painted(board).count("1 m 15 s    an evaluation failed") == 1


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


def on_a_terminal(ending: str, when: Callable[[int, bytes], None] = lambda terminal, seen: None, **env: str) -> str:
    """What a program that shows a display writes to a real pseudo-terminal of its own until it ends.

    `when` is called with the terminal and what was written, each time that something was written.
    """
    pid, main = pty.fork()
    if pid == 0:
        command = [sys.executable, "-c", program(ending)]
        os.execve(sys.executable, command, {**ENV, "TERM": "xterm-256color", **env})
    written, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([main], [], [], 0.2)[0]:
            try:
                written += os.read(main, 65536)
            except OSError:
                break
            when(main, written)
    os.waitpid(pid, 0)
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


def test_what_is_typed_is_not_shown_while_the_panel_is_there_and_again_afterwards() -> None:
    echo: dict[bool, bool] = {}

    def look(terminal: int, seen: bytes) -> None:
        if b"step" in seen:
            # As first seen: between the last of the panel and the line after it, the echo is back already.
            echo.setdefault(b"after" in seen, bool(termios.tcgetattr(terminal)[3] & termios.ECHO))

    on_a_terminal("pass", look)
    assert echo == {False: False, True: True}


def test_a_terminal_that_wants_no_colours_gets_none() -> None:
    colour = re.compile(r"\x1b\[[\d;]*\b(3[0-8]|9[0-7])\b[\d;]*m")
    assert colour.search(on_a_terminal("pass"))
    assert not colour.search(on_a_terminal("pass", NO_COLOR="1"))


def test_a_narrower_terminal_keeps_no_part_of_the_wider_panel() -> None:
    """What stands is wrapped into more rows; all of them are wiped before the panel is drawn at its new width."""
    console = Console(file=io.StringIO(), width=100, height=40, force_terminal=True, color_system=None)
    assert isinstance(console.file, io.StringIO)
    panel: Any = live_panel(Painter(board_at(Clock())), console)
    panel.refresh()
    num_lines = len(painted(board_at(Clock()), width=100).splitlines())
    for width, rows in ((40, 3), (80, 1), (79, 2), (79, 1)):
        written = console.file.tell()
        console.width = width
        panel.refresh()
        ups = console.file.getvalue()[written:].count("\x1b[1A")
        assert ups == num_lines * (rows - 1)


def test_a_dumb_terminal_gets_plain_lines() -> None:
    written = on_a_terminal("pass", TERM="dumb")
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
    result = {"status": "interrupted", "steps": 12, "wall_s": 65.0, "overrides": ["+experiment=x", "run_dir=old"]}
    assert "pipelines.run +experiment=x starts afresh" in closing_lines(result, tmp_path / "report.html")[2]
    (tmp_path / "checkpoints" / "step-10").mkdir(parents=True)
    lines = closing_lines(result, tmp_path / "report.html")
    assert lines[0] == "Interrupted after 12 steps and 1 m 05 s."
    command = f"python -m pipelines.run resume={tmp_path}"
    assert lines[2] == f"Next: {command} goes on from the last checkpoint"


@pytest.mark.parametrize("started", [True, False])
def test_a_resumed_run_that_saved_nothing_names_what_it_went_on_from_with_what_it_had_changed(
    tmp_path: Path, started: bool
) -> None:
    old = tmp_path / "old"
    earlier = {"path": str(old / "checkpoints/step-000004"), "version": 4}
    (old / "checkpoints/step-000004").mkdir(parents=True)
    (old / "overrides.json").write_text('["+experiment=x", "seed=3"]')
    (tmp_path / "new/checkpoints/.step-000005.tmp").mkdir(parents=True)
    result = {"status": "interrupted", "steps": 4, "wall_s": 6.0, "resumed_from": earlier if started else None}
    result["overrides"] = ["+experiment=x", "seed=3", f"resume={old}", "steps=9", "resume_changed=true", "run_dir=new"]
    source = earlier["path"] if started else old
    command = f"python -m pipelines.run resume={source} steps=9 resume_changed=true"
    assert closing_lines(result, tmp_path / "new/report.html")[2].startswith(f"Next: {command} goes on")


def test_the_next_command_keeps_the_choices_of_the_run_but_not_its_seed(tmp_path: Path) -> None:
    result = result_with(before=0.4, after=0.7, delta=0.3, delta_ci95=[0.2, 0.4])
    result["overrides"] = ["dataset=train8", "seed=4", "trainer.lr=1e-3"]
    command = "python -m pipelines.run dataset=train8 trainer.lr=1e-3 -m 'seed=range(3)'"
    assert command in closing_lines(result, tmp_path / "report.html")[2]


def test_the_closing_lines_stand_a_result_with_nothing_in_it(tmp_path: Path) -> None:
    assert len(closing_lines({}, tmp_path / "report.html")) == 3
    assert len(closing_lines({"status": "failed", "metrics": None}, tmp_path / "report.html")) == 3
