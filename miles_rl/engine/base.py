"""The engine contract: who turns token ids into token ids. Every engine speaks SGLang's native HTTP.

One class here and one YAML in `conf/engine` add an engine. The class only launches and owns processes; requests and
weight control go over HTTP through `miles_rl.engine.client`, the same for every engine.
"""

from __future__ import annotations

from typing import Protocol


class EngineError(Exception):
    """The engine or the router did not answer properly: an infrastructure failure, never a reward."""


class EngineRefusal(EngineError):
    """The engine answered that it did not do what it was asked, and is as it was before."""


class Replica(Protocol):
    """One running engine with an address of its own."""

    @property
    def url(self) -> str:
        """Base address, like `http://127.0.0.1:30000`."""
        ...

    @property
    def pid(self) -> int:
        """Process id of the engine's main process."""
        ...

    @property
    def log_path(self) -> str:
        """File that holds what the engine printed."""
        ...

    def exit_code(self) -> int | None:
        """None while the process lives, else its exit code, minus the signal that ended it."""
        ...

    async def stop(self) -> None:
        """End the process and all that it started; verified. Safe to call twice."""
        ...


class Engine(Protocol):
    """Launches replicas. Constructed from config."""

    async def launch(self, index: int, model_dir: str, version: int, log_dir: str) -> Replica:
        """Start replica `index` on `model_dir` and wait until it is ready. Raises `EngineError` with the log's end."""
        ...
