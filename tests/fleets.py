"""Fleets of real engines behind the real router, for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from miles_rl.engine.embedded.engine import EmbeddedEngine
from miles_rl.engine.fleet import Fleet
from miles_rl.router.sglang import SglangRouter
from miles_rl.weights.checksum import checksum


class Data:
    """The stage that knows what the policy starts from."""

    def __init__(self, model_dir: str) -> None:
        self.model_dir = model_dir

    async def initial_policy(self) -> dict[str, Any]:
        """Weights and their version."""
        return {"model_dir": self.model_dir, "version": 3}


def checksum_of(model_dir: str) -> str:
    """Checksum of the weights in a folder."""
    return checksum(load_file(Path(model_dir) / "model.safetensors").items())


@asynccontextmanager
async def running_fleet(model_dir: str, log_dir: Path, num_replicas: int = 2, **options: Any) -> AsyncIterator[Fleet]:
    """A fleet on `model_dir` as version 3."""
    made = Fleet(
        Data(model_dir),
        EmbeddedEngine(),
        SglangRouter(),
        num_replicas=num_replicas,
        log_dir=str(log_dir),
        **options,
    )
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
