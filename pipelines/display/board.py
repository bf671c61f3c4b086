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
        self.notes: deque[str] = deque(maxlen=50)
        self.rewards: list[float] = []
        self.evaluations: list[Evaluation] = []
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
            if name == "eval":
                self._take_evaluations(figures)

    def note(self, line: str) -> None:
        """Something worth a line."""
        with self.lock:
            self.notes.append(clean(line))

    def finish(self) -> None:
        """The run is over: the clock stands still from here."""
        with self.lock:
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
        """What the training loop does now."""
        return clean(str(self.figures.get("trainer", {}).get("phase", "")))

    @property
    def left_s(self) -> float | None:
        """Expected seconds until the last step, from the pace of the last 20; None without a pace or a future."""
        over = self._ended_s is not None or any(state == "failed" for state, _ in self.stages.values())
        if len(self._step_times) < 2 or over:
            return None
        (first, first_s), (last, last_s) = self._step_times[0], self._step_times[-1]
        pace_s = (last_s - first_s) / (last - first)
        return max(0.0, pace_s * (self.steps - last) - (self._clock() - last_s))

    def of(self, stage: str, name: str) -> float | None:
        """The latest figure `name` of `stage`."""
        return number(self.figures.get(stage, {}), name)

    def metric(self, *names: str) -> float | None:
        """The latest training metric under the first of `names` that is there."""
        metrics: Any = self.figures.get("trainer", {}).get("metrics")
        if not isinstance(metrics, Mapping):
            return None
        found = (number(cast("Mapping[str, Any]", metrics), name) for name in names)
        return next((value for value in found if value is not None), None)

    def _take_step(self) -> None:
        if self._step_times and self.step <= self._step_times[-1][0]:
            return
        self._step_times.append((self.step, self._clock()))
        reward = self.metric("rollout/reward_mean")
        if reward is not None and self.step > 0:
            self.rewards.append(reward)

    def _take_evaluations(self, figures: Mapping[str, Any]) -> None:
        """The stage's `history` is all of them; without one, its own figures are the last that finished."""
        history: Any = figures.get("history")
        if isinstance(history, Sequence):
            entries = cast("Sequence[Any]", history)
            found = [_evaluation(cast("Mapping[str, Any]", e)) for e in entries if isinstance(e, Mapping)]
            self.evaluations = [evaluation for evaluation in found if evaluation is not None]
        elif (latest := _evaluation(figures)) is not None and latest not in self.evaluations[-1:]:
            self.evaluations.append(latest)


def _evaluation(figures: Mapping[str, Any]) -> Evaluation | None:
    rate, version = number(figures, "solve_rate"), number(figures, "version")
    if rate is None:
        return None
    return Evaluation(rate, interval(figures, "ci95"), None if version is None else int(version))
