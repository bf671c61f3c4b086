"""An observer that keeps what it was told."""

from collections.abc import Mapping
from typing import Any


class Notes:
    """States as (stage, state), and lines."""

    def __init__(self) -> None:
        self.states: list[tuple[str, str]] = []
        self.lines: list[str] = []

    def stage(self, name: str, state: str, detail: str = "") -> None:
        self.states.append((name, state))

    def status(self, name: str, figures: Mapping[str, Any]) -> None:
        self.lines.append(f"{name} {dict(figures)}")

    def note(self, line: str) -> None:
        self.lines.append(line)
