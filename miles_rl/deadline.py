"""A deadline that says whose it was: the config key, its value, what was waited for, and what to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def deadline(path: str, seconds: float, what: str) -> AsyncIterator[None]:
    """Bound the body to `seconds`. `TimeoutError` names `path`, the key that holds the number, and `what` was late."""
    clock = asyncio.timeout(seconds)
    try:
        async with clock:
            yield
    except TimeoutError as error:
        if not clock.expired():
            raise
        raise TimeoutError(f"{path}: {seconds:g}; {what} did not end in time; raise it, or see log.txt") from error
