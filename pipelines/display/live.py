"""The display on a terminal: one panel that stays in place while the run goes on."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipelines.display.board import Board
from pipelines.wording import duration, figure, percent, percent_interval, points

MARKS = {
    "waiting": ("\u25cb", "dim"),
    "starting": ("\u25d0", "yellow"),
    "up": ("\u25cf", "green"),
    "stopping": ("\u25d1", "yellow"),
    "down": ("\u25cf", "dim"),
    "failed": ("\u2716", "bold red"),
}
ASCII_MARKS = {"waiting": ".", "starting": "~", "up": "*", "stopping": "~", "down": "-", "failed": "x"}
BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
ASCII_BLOCKS = "._-=+*%#"
NUM_NOTES = 3


def live(board: Board, console: Console) -> Live:
    """The panel of `board`, drawn anew several times a second; as a context manager it gives the terminal back as it
    was, after errors too. What the program prints meanwhile appears above the panel."""
    painter = Painter(board, unicode=console.encoding.startswith("utf"))
    return Live(
        console=console,
        get_renderable=painter.panel,
        refresh_per_second=6,
        vertical_overflow="ellipsis",
        redirect_stdout=True,
        redirect_stderr=True,
    )


class Painter:
    """Draws a board. `unicode` is False for terminals that can show ASCII only."""

    def __init__(self, board: Board, unicode: bool = True) -> None:
        self._board = board
        self._unicode = unicode

    def panel(self) -> RenderableType:
        """The whole panel as of now."""
        board = self._board
        with board.lock:
            parts = [self._stages(), Text(), self._progress(), Text(), self._figures()]
            notes = [Text(note, "dim", no_wrap=True, overflow="ellipsis") for note in list(board.notes)[-NUM_NOTES:]]
            if notes:
                parts += [Text(), *notes]
            failed = any(state == "failed" for state, _ in board.stages.values())
            seed = "" if board.seed is None else f" - seed {board.seed}"
            title = Text.assemble(" ", (board.name, "bold"), (f"{seed} ", "dim"))
            clock = Text(f" {duration(board.elapsed_s)} ", "dim")
        border = "red" if failed else "cyan"
        return Panel(
            Group(*parts), box=ROUNDED, title=title, title_align="left", subtitle=clock, subtitle_align="right",
            border_style=border, padding=(1, 2),
        )  # fmt: skip

    def _stages(self) -> Text:
        row = Text()
        for name, (state, _) in self._board.stages.items():
            mark, style = MARKS.get(state, ("?", "yellow"))
            mark = mark if self._unicode else ASCII_MARKS.get(state, "?")
            row.append(f"{mark} ", style)
            row.append(f"{name}   ", "bold red" if state == "failed" else "" if state == "up" else "dim")
        for name, (state, detail) in self._board.stages.items():
            if detail and state in ("starting", "stopping", "failed"):
                shown = detail if detail.startswith(f"{name}:") else f"{name}: {detail}"
                row.append(f"\n{shown}", "red" if state == "failed" else "dim")
        return row

    def _progress(self) -> Table:
        board = self._board
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        left = "" if board.left_s is None else f"{duration(board.left_s)} left"
        ahead = " - ".join(part for part in (board.phase, left) if part)
        done = Text.assemble("step ", (str(board.step), "bold"), (f" / {board.steps}", "dim"))
        row.add_row(done, ProgressBar(max(1, board.steps), board.step, complete_style="cyan"), Text(ahead, "dim"))
        return row

    def _figures(self) -> Table:
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        table.add_row("solve rate", self._solve_rate())
        table.add_row("reward", self._reward())
        table.add_row("episodes", self._episodes())
        table.add_row("policy", self._policy())
        table.add_row("pace", self._pace())
        return table

    def _solve_rate(self) -> Text:
        seen = self._board.evaluations
        running = self._board.of("eval", "running")
        if not seen:
            return Text("evaluating" if running else "-", "dim")
        first, last = seen[0], seen[-1]
        text = Text.assemble((percent(first.solve_rate), "bold"), (f" {percent_interval(first.ci95)}", "dim"))
        if len(seen) > 1:
            change = last.solve_rate - first.solve_rate
            colour = "green" if change > 0 else "red" if change < 0 else ""
            text.append(" -> ", "dim")
            text.append(percent(last.solve_rate), f"bold {colour}")
            text.append(f" {percent_interval(last.ci95)} ", "dim")
            text.append(points(change), colour)
        if running:
            text.append(" (evaluating)", "dim")
        return text

    def _reward(self) -> Text:
        rewards = self._board.rewards
        if not rewards:
            return Text(figure(self._board.of("rollout", "reward_mean")))
        return Text.assemble((figure(rewards[-1]), "bold"), "  ", (self._sparkline(rewards), "green"))

    def _sparkline(self, values: Sequence[float], width: int = 36) -> str:
        blocks = BLOCKS if self._unicode else ASCII_BLOCKS
        size = max(1, -(-len(values) // width))
        means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
        low, high = min(means), max(means)
        spread = (high - low) or 1.0
        return "".join(blocks[min(len(blocks) - 1, int((mean - low) / spread * len(blocks)))] for mean in means)

    def _episodes(self) -> Text:
        of = self._board.of
        done, failed = of("rollout", "scored"), of("rollout", "failed") or 0
        text = Text(f"{figure(of('rollout', 'running'))} running, {figure(done)} scored, ")
        text.append(f"{figure(failed)} failed", "red" if failed else "dim")
        if stale := of("rollout", "stale"):
            text.append(f", {figure(stale)} groups too old", "yellow")
        if slow := of("rollout", "waits_for_groups"):
            text.append(f"; waits for {figure(slow)} protected groups", "yellow")
        return text

    def _policy(self) -> Text:
        metric = self._board.metric
        text = _named("KL to rollout", metric("train/train_rollout_kl"))
        text.append_text(_named("staleness", metric("async/staleness_mean")))
        worst = metric("async/staleness_max")
        return text if worst is None else text.append(f"(max {figure(worst)})", "dim")

    def _pace(self) -> Text:
        of = self._board.of
        text = _named("tokens/s", of("fleet", "tokens_per_s"))
        text.append_text(_named("s/step", self._board.metric("perf/step_s")))
        size = of("sandboxes", "size")
        used = None if size is None else f"{figure(of('sandboxes', 'in_use'))} of {figure(size)}"
        return text.append_text(_named("sandboxes in use", used))


def _named(name: str, value: float | str | None) -> Text:
    shown = value if isinstance(value, str) else figure(value)
    return Text.assemble((f"{name} ", "dim"), f"{shown}   ")
