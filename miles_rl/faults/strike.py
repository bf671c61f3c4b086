"""When a fault strikes, and that it says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

PUBLISHES = {"rollout": "published", "fleet": "publish"}
"""By stage: the method that ends when new weights are in force."""


def struck(what: str) -> None:
    """One line in the run's log, so that what follows can be told from an accident."""
    log.warning("fault: %s", what)


def check_rate(name: str, rate: float) -> None:
    """Raises `ValueError` unless `rate` is a share."""
    if not 0 <= rate <= 1:
        raise ValueError(f"faults.{name}: {rate}; give a share between 0 and 1")


def check_version(at_version: int) -> None:
    """Raises `ValueError` for a version that no publish has."""
    if at_version < 1:
        raise ValueError(f"faults.at_version: {at_version}; give at least 1")


def when_published(component: Any, stage: str, version: int, strike: Callable[[], None]) -> None:
    """Call `strike` once, as soon as the stage has put the weights of `version` in force."""
    name = PUBLISHES[stage]
    inner = getattr(component, name)

    async def published(*args: Any) -> Any:
        result = await inner(*args)
        if (args[0] if name == "published" else args[1]) == version:
            strike()
        return result

    setattr(component, name, published)
