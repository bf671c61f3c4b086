"""The router contract: one address before all replicas of a fleet.

A router keeps a session on one replica, by the header `miles_rl.engine.client.ROUTING_HEADER`, so that a later turn
finds its prefix cached, and gives a new session to the least loaded replica. It never sends a request twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Router(Protocol):
    """Launches and owns one router. Constructed from config."""

    async def start(self, worker_urls: Sequence[str], log_dir: str) -> str:
        """Launch it before the replicas at `worker_urls` and wait until it serves; returns its base address.

        Raises `EngineError` with the log's end.
        """
        ...

    def exit_code(self) -> int | None:
        """None while it lives or before it was started, else how it ended."""
        ...

    async def stop(self) -> None:
        """End it; verified. Safe to call twice."""
        ...
