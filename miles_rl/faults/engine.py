"""Faults of inference engines: one that dies, hangs, is slow, or answers with errors."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import Any, Literal

from miles_rl.engine.base import Engine, Replica
from miles_rl.faults.proxy import ProxiedReplica
from miles_rl.faults.strike import check_rate, check_version, struck, when_published


class EngineSignal:
    """A replica, drawn by `seed`, gets `name` `delay_s` after the weights of `at_version` were published: SIGKILL is a
    crash, SIGSTOP a hang. Requests are in flight then.
    """

    stage = "fleet"

    def __init__(
        self, seed: int, name: Literal["SIGKILL", "SIGSTOP"], at_version: int = 2, delay_s: float = 0.05
    ) -> None:
        check_version(at_version)
        self._seed, self._name, self._at_version, self._delay_s = seed, name, at_version, delay_s

    def install(self, component: Any) -> None:
        """See `Fault`."""
        engine = _Watched(component.engine)
        component.engine = engine

        def strike() -> None:
            victim = random.Random(self._seed).choice(engine.replicas)
            struck(f"{self._name} to the replica with pid {victim.pid}")
            os.kill(victim.pid, getattr(signal, self._name))

        def later() -> None:
            asyncio.get_running_loop().call_later(self._delay_s, strike)

        when_published(component, self.stage, self._at_version, later)


class EngineAnswers:
    """Generations are answered `delay_s` late, and a share `error_rate` of them with status 500."""

    stage = "fleet"

    def __init__(self, seed: int, delay_s: float = 0.0, error_rate: float = 0.0) -> None:
        check_rate("error_rate", error_rate)
        if delay_s < 0:
            raise ValueError(f"faults.delay_s: {delay_s}; give 0 or more")
        self._seed, self._delay_s, self._error_rate = seed, delay_s, error_rate

    def install(self, component: Any) -> None:
        """See `Fault`."""
        component.engine = _Proxied(component.engine, self._seed, self._delay_s, self._error_rate)


class _Watched:
    """An engine that remembers its replicas."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self.replicas: list[Replica] = []

    async def launch(self, index: int, model_dir: str, version: int, log_dir: str) -> Replica:
        """See `Engine`."""
        replica = await self._inner.launch(index, model_dir, version, log_dir)
        self.replicas.append(replica)
        return replica


class _Proxied:
    """An engine whose replicas stand behind a proxy."""

    def __init__(self, inner: Engine, seed: int, delay_s: float, error_rate: float) -> None:
        self._inner, self._seed, self._delay_s, self._error_rate = inner, seed, delay_s, error_rate

    async def launch(self, index: int, model_dir: str, version: int, log_dir: str) -> Replica:
        """See `Engine`."""
        replica = await self._inner.launch(index, model_dir, version, log_dir)
        draws = random.Random(f"{self._seed}/{index}")
        return await ProxiedReplica.before(replica, draws, self._delay_s, self._error_rate)
