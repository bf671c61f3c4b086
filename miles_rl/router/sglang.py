"""The real sglang-router, policy `manual`: sticky by session key, new sessions to the least loaded replica."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles_rl.engine.base import EngineError
from miles_rl.engine.client import EngineClient
from miles_rl.engine.process import ChildProcess, free_port

_MAX_LAUNCHES = 3
_POLL_TIMEOUT_S = 2.0


class SglangRouter:
    """Implements `Router` with `python -m sglang_router.launch_router`.

    Retries, circuit breaker and health checks are off: a repeated generation would be a second sample, and a replica
    that was slow to answer once would be shut out for minutes; the fleet's status reports a dead one by name.
    `max_idle_s` is how long a silent session stays with its replica, `request_timeout_s` the longest generation.
    Metrics are served on a port of their own on the same host.
    """

    def __init__(
        self,
        policy: str = "manual",
        assignment_mode: str = "min_load",
        max_idle_s: int = 3600,
        request_timeout_s: int = 3600,
        max_payload_bytes: int = 64 << 20,
        start_timeout_s: float = 60.0,
        log_level: str = "warn",
        host: str = "127.0.0.1",
    ) -> None:
        self._options: dict[str, object] = {
            "policy": policy,
            "assignment-mode": assignment_mode,
            "max-idle-secs": max_idle_s,
            "request-timeout-secs": request_timeout_s,
            "max-payload-size": max_payload_bytes,
            "worker-startup-timeout-secs": int(start_timeout_s),
            "worker-startup-check-interval": 1,
            "shutdown-grace-period-secs": 1,
            "log-level": log_level,
        }
        self._host, self._start_timeout_s = host, start_timeout_s
        self._process: ChildProcess | None = None

    @property
    def pid(self) -> int | None:
        """Process id, None before `start`."""
        return None if self._process is None else self._process.pid

    async def start(self, worker_urls: Sequence[str], log_dir: str) -> str:
        """See `Router`. Another process can take a port that was free: then it is launched again on other ports.

        `_MAX_LAUNCHES` times at most, and not once `start_timeout_s` has passed.
        """
        ends_at = time.monotonic() + self._start_timeout_s
        for attempt in range(1, _MAX_LAUNCHES + 1):
            url = self._launch(worker_urls, log_dir)
            assert self._process is not None
            try:
                async with EngineClient(url, timeout_s=_POLL_TIMEOUT_S) as client:

                    async def ready(client: EngineClient = client) -> bool:
                        return await _serves(client, worker_urls)

                    await self._process.wait_ready(ready, self._start_timeout_s, "the router", "router.start_timeout_s")
                return url
            except BaseException as error:
                port_taken = "in use" in self._process.log_tail()
                with contextlib.suppress(EngineError, OSError):
                    await self._process.stop()
                is_last = attempt == _MAX_LAUNCHES or time.monotonic() > ends_at
                if not isinstance(error, EngineError) or not port_taken or is_last:
                    raise
        raise AssertionError("unreachable")

    def exit_code(self) -> int | None:
        """See `Router`."""
        return None if self._process is None else self._process.exit_code()

    async def stop(self) -> None:
        """See `Router`."""
        if self._process is not None:
            await self._process.stop()

    def _launch(self, worker_urls: Sequence[str], log_dir: str) -> str:
        port = free_port(self._host)
        metrics_port = free_port(self._host)
        options = {
            **self._options,
            "host": self._host,
            "port": port,
            "prometheus-host": self._host,
            "prometheus-port": metrics_port,
        }
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        arguments += ["--disable-retries", "--disable-circuit-breaker", "--disable-health-check"]
        arguments += ["--worker-urls", *worker_urls]
        self._process = ChildProcess("sglang_router.launch_router", arguments, log_path=Path(log_dir) / "router.log")
        return f"http://{self._host}:{port}"


async def _serves(client: EngineClient, worker_urls: Sequence[str]) -> bool:
    """Whether the router at the client's address has taken in all our replicas. It answers before it has."""
    try:
        workers: list[dict[str, Any]] = (await client.get_object("/workers"))["workers"]
        known = {str(worker["url"]) for worker in workers if worker["is_healthy"]}
    except (EngineError, KeyError, TypeError):
        return False
    return known == set(worker_urls)
