"""What the display knows: the latest state and figures of every stage, and a short memory of how they moved."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pipelines.wording import clean, interval, number

STATES = ("waiting", "starting", "up", "stopping", "down", "failed")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One finished evaluation: the share of episodes solved, its 95 % interval, the weights it speaks for."""

    solve_rate: float
    ci95: tuple[float, float] | None
    version: int | None


@dataclass(frozen=True, slots=True)
class Progress:
    """An evaluation that still runs: episodes ended and in all, share solved so far, attempts that infrastructure
    failed, expected seconds until its end. None where it is not known yet.
    """

    version: int | None
    done: int
    total: int
    solve_rate: float | None
    infra_failures: int
    left_s: float | None


class Board:
    """An observer of a run that keeps what it is told. Safe to call from several threads.

    Everything a stage says is taken as it comes: an absent, odd or non-finite figure is shown as absent.
    """

    def __init__(
        self,
        name: str,
        seed: int | None,
        stages: Iterable[str],
        total_steps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = clean(name)
        self.seed = seed
        self.total_steps = total_steps
        self.stages: dict[str, tuple[str, str]] = dict.fromkeys(stages, ("waiting", ""))
        self.figures: dict[str, Mapping[str, Any]] = {}
        self.notes: deque[tuple[float, str]] = deque(maxlen=50)
        self.rewards: list[float] = []
        self.evaluations: list[Evaluation] = []
        self.problem = ""
        self.lock = threading.RLock()
        self._clock = clock
        self._began_s = clock()
        self._ended_s: float | None = None
        self._step_times: deque[tuple[int, float]] = deque(maxlen=21)

    def stage(self, name: str, state: str, detail: str = "") -> None:
        """A stage changed its state. One that failed stays so to the eye when it is stopped."""
        with self.lock:
            if self.stages.get(name, ("", ""))[0] != "failed":
                self.stages[name] = (state, clean(detail))

    def status(self, name: str, figures: Mapping[str, Any]) -> None:
        """A stage's heartbeat."""
        with self.lock:
            self.figures[name] = dict(figures)
            if name == "trainer":
                self._take_step()
                self._take_problem(clean(str(figures.get("problem") or "")))
            if name in ("trainer", "eval"):
                self._take_evaluations(figures)

    def note(self, line: str) -> None:
        """Something worth a line. It is kept with the second in which it was said."""
        with self.lock:
            self.notes.append((self.elapsed_s, clean(line)))

    def finish(self) -> None:
        """The run is over: the clock stands still from here, and no stage is up, stopped in order or not."""
        with self.lock:
            for name, (state, _) in self.stages.items():
                self.stages[name] = self.stages[name] if state in ("waiting", "failed") else ("down", "")
            self._ended_s = self._clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the display came up."""
        return (self._clock() if self._ended_s is None else self._ended_s) - self._began_s

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.of("trainer", "step") or 0)

    @property
    def steps(self) -> int:
        """Optimizer steps that the run will do."""
        return int(self.of("trainer", "steps") or self.total_steps)

    @property
    def phase(self) -> str:
        """What the run does now."""
        if self.ending:
            return "stopping"
        return clean(str(self.figures.get("trainer", {}).get("phase", ""))) or "starting"

    @property
    def ended(self) -> bool:
        """The run is over."""
        return self._ended_s is not None

    @property
    def ending(self) -> bool:
        """True if nothing more is to be expected: the run is over, or on its way there, well or not."""
        return self.ended or any(state in ("stopping", "down", "failed") for state, _ in self.stages.values())

    @property
    def first_step(self) -> int | None:
        """The step at which this run began to train, after a resume not 0; None before it did."""
        trainer = self.figures.get("trainer", {})
        first = number(trainer, "first_step")
        return (None if "first_step" in trainer else 0) if first is None else int(first)

    @property
    def progress(self) -> Progress | None:
        """How far the evaluation has come that runs now; None if none does, also if its result came in meanwhile."""
        now: Any = self.figures.get("eval", {}).get("now")
        if not isinstance(now, Mapping) or self.ending:
            return None
        of = {str(name): number(cast("Mapping[str, Any]", now), str(name)) for name in cast("Mapping[str, Any]", now)}
        done, total, version = of.get("done"), of.get("total"), of.get("version")
        version = None if version is None else int(version)
        if done is None or total is None or version in [evaluation.version for evaluation in self.evaluations]:
            return None
        failures = int(of.get("infra_failures") or 0)
        return Progress(version, int(done), int(total), of.get("solve_rate"), failures, of.get("left_s"))

    @property
    def left_s(self) -> float | None:
        """Expected seconds until the last step, from the pace of the last 20 of this run; None without a pace or steps
        to come.
        """
        if len(self._step_times) < 2 or self.ending or self.step >= self.steps:
            return None
        (first, first_s), (last, last_s) = self._step_times[0], self._step_times[-1]
        pace_s = (last_s - first_s) / (last - first)
        return max(0.0, pace_s * (self.steps - last) - (self._clock() - last_s))

    def of(self, stage: str, name: str) -> float | None:
        """The latest figure `name` of `stage`."""
        return number(self.figures.get(stage, {}), name)

    def metric(self, *names: str) -> float | None:
        """The latest training metric under the first of `names` that is there; none that a run before this one had."""
        if self.first_step is None or 0 < self.step <= self.first_step:
            return None
        metrics: Any = self.figures.get("trainer", {}).get("metrics")
        if not isinstance(metrics, Mapping):
            return None
        found = (number(cast("Mapping[str, Any]", metrics), name) for name in names)
        return next((value for value in found if value is not None), None)

    def _take_step(self) -> None:
        if self.first_step is None:
            return  # it loads, or evaluates: that tells nothing of the pace of steps
        if self._step_times and self.step <= self._step_times[-1][0]:
            return
        self._step_times.append((self.step, self._clock()))
        reward = self.metric("rollout/reward_mean")
        if reward is not None and self.step > 0:
            self.rewards.append(reward)

    def _take_problem(self, problem: str) -> None:
        if problem and problem != self.problem:
            self.note(problem)
        self.problem = problem

    def _take_evaluations(self, figures: Mapping[str, Any]) -> None:
        """A list of all of them stands for itself; without one, the stage's own figures are the last that finished.

        Kept in order of version, once each.
        """
        history: Any = figures.get("evaluations")
        if not isinstance(history, Sequence):
            history = [figures]
        entries = [cast("Mapping[str, Any]", e) for e in cast("Sequence[Any]", history) if isinstance(e, Mapping)]
        found = [evaluation for entry in entries if (evaluation := _evaluation(entry)) is not None]
        kept = {evaluation.version: evaluation for evaluation in (*self.evaluations, *found)}
        self.evaluations = sorted(kept.values(), key=lambda e: (e.version is None, e.version))


def _evaluation(figures: Mapping[str, Any]) -> Evaluation | None:
    rate, version = number(figures, "solve_rate"), number(figures, "version")
    if rate is None:
        return None
    return Evaluation(rate, interval(figures, "ci95"), None if version is None else int(version))
