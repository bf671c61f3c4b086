"""Who watches a run: the launcher tells, a display shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Observer(Protocol):
    """Called from the driver's event loop; each call returns at once."""

    def stage(self, name: str, state: str, detail: str = "") -> None:
        """Stage `name` is now `waiting`, `starting`, `up`, `stopping`, `down` or `failed`."""
        ...

    def status(self, name: str, figures: Mapping[str, Any]) -> None:
        """The latest figures that stage `name` gave of itself."""
        ...

    def note(self, line: str) -> None:
        """A line for the person who watches."""
        ...
