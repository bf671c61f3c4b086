"""The fault contract: what goes wrong in a run on purpose, to see that it recovers or fails by name.

One class here and one YAML in `conf/faults` add a fault. Nothing else of the project knows of faults: an installed one
replaces a public collaborator of a component (`Fleet.engine`, `SandboxPool.provider`, `TrainingLoop.trainer`) or wraps
one of its methods.
"""

from __future__ import annotations

from typing import Any, Protocol


class Fault(Protocol):
    """Constructed from config in every stage's process; acts in one."""

    @property
    def stage(self) -> str:
        """Name of the stage in whose process it acts; empty for no fault."""
        ...

    def install(self, component: Any) -> None:
        """Called once in that process, when the stage's component is built and not yet started.

        Whenever it strikes afterwards, a line `fault: ...` goes to the log (`strike.struck`).
        """
        ...


class NoFault:
    """Nothing goes wrong on purpose."""

    stage = ""

    def install(self, component: Any) -> None:
        """Never called: no stage has an empty name."""
