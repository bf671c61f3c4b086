"""The stage contract: what a component must offer to be hosted as a stage of a graph.

A component is a plain class, built from config inside its own process. The names in `needs` become constructor
arguments. Methods that other stages call are `async`, so that a component works the same whether its needs are
plain objects (in tests) or handles of other processes (in a run).

A constructor is cheap and touches nothing outside: the planner builds each component once, to hear its `ValueError`
of one line, `<config path>: <value>; <remedy>`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


class StageError(Exception):
    """A stage failed. The message starts with the stage's name."""


class StageTimeout(StageError):
    """A deadline passed: the stage did not answer, or ended a call of its own by a deadline. It may be stuck."""


@runtime_checkable
class Stage(Protocol):
    """Start in topological order, stop in reverse. `status` is the heartbeat: a small dict of figures.

    A `status` that raises, or does not answer in time, fails the run with the stage's name; background work of a
    component reports its failure this way. It is also asked while `start` runs, for progress; then an error means
    nothing, since `start` tells its own.

    Two methods are optional. `async facts()` gives what `result.json` should know of the stage, once all are up.
    `describe(options)`, a static or class method, gives the sizes that a plan shows for the options of a config, and
    under `starts` a phrase for what the stage would start.
    """

    async def start(self) -> None:
        """Bring up all that the stage owns; returns when it can serve."""
        ...

    async def stop(self) -> None:
        """Take it all down, verified. Called after errors too, and once even if `start` failed."""
        ...

    async def status(self) -> Mapping[str, Any]:
        """Figures for the display. Raises the error that broke the stage's background work, if any."""
        ...


@runtime_checkable
class Driver(Stage, Protocol):
    """A stage that drives the run: no other stage needs it, and the run ends when its `run` returns."""

    async def run(self) -> Mapping[str, Any]:
        """Do the work of the run; returns its metrics for `result.json`."""
        ...
