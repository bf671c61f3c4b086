"""All inference engines of a run, behind one router.

Requests go through the router; weights go to every replica directly, because a router has no say in them. New
weights are put in force in place: requests in flight stop between two tokens, and go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from typing import Any

from miles_rl.engine.base import Engine, EngineError, Replica
from miles_rl.engine.client import EngineClient
from miles_rl.engine.process import describe_exit
from miles_rl.router.base import Router

_REAP_DELAY_S = 0.2


class Fleet:
    """Stage component: `num_replicas` engines on the policy that `data` starts from, and the router before them.

    `log_dir` gets the output of every process. `pause_mode` is what a publish does to requests in flight (`in_place`,
    `retract`, `abort`); `flush_cache` asks engines to drop prefixes of the old weights, for those that would serve
    them otherwise. Timeouts in seconds; `publish_timeout_s` holds for each step of a publish.
    """

    def __init__(
        self,
        data: Any,
        engine: Engine,
        router: Router,
        num_replicas: int = 1,
        log_dir: str = "engines",
        pause_mode: str = "in_place",
        flush_cache: bool = False,
        publish_timeout_s: float = 120.0,
        status_timeout_s: float = 15.0,
    ) -> None:
        if num_replicas < 1:
            raise ValueError(f"stages.fleet.run.num_replicas: {num_replicas}; give at least 1")
        if pause_mode not in ("in_place", "retract", "abort"):
            raise ValueError(f"stages.fleet.run.pause_mode: {pause_mode}; choose in_place, retract or abort")
        self._data, self.engine, self._router = data, engine, router
        self._num_replicas, self._log_dir = num_replicas, log_dir
        self._pause_mode, self._flush_cache = pause_mode, flush_cache
        self._publish_timeout_s, self._status_timeout_s = publish_timeout_s, status_timeout_s
        self._replicas: list[Replica] = []
        self._clients: list[EngineClient] = []
        self._router_url = ""
        self._version = -1
        self._publishing = asyncio.Lock()

    @staticmethod
    def describe(options: Mapping[str, Any]) -> dict[str, Any]:
        """Sizes for the plan, and what will be started."""
        replicas, engine = options.get("num_replicas", 1), options["engine"]
        kind = engine["_target_"].rsplit(".", 1)[-1]
        return {"replicas": replicas, "starts": f"{replicas} x {kind} on {engine.get('device', 'gpu')}, 1 router"}

    async def start(self) -> None:
        """Launch all replicas at once, then the router. Raises `EngineError`, leaving nothing behind."""
        policy = await self._data.initial_policy()
        self._version = int(policy["version"])
        launches = [
            self.engine.launch(index, policy["model_dir"], self._version, self._log_dir)
            for index in range(self._num_replicas)
        ]
        results = await asyncio.gather(*launches, return_exceptions=True)  # bounded: start_timeout_s of the engine
        self._replicas = [result for result in results if not isinstance(result, BaseException)]
        try:
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            urls = [replica.url for replica in self._replicas]
            self._clients = [EngineClient(url, timeout_s=self._publish_timeout_s) for url in urls]
            self._router_url = await self._router.start(urls, self._log_dir)
        except BaseException:
            await self.stop()
            raise

    async def endpoints(self) -> dict[str, Any]:
        """`router`: where to send requests; `replicas`: addresses of the engines; `version` in force."""
        return {
            "router": self._router_url,
            "replicas": [replica.url for replica in self._replicas],
            "version": self._version,
        }

    async def publish(self, model_dir: str, version: int, checksum: str) -> dict[str, float]:
        """Put the weights in `model_dir` in force as `version` on every replica, and verify them by `checksum`.

        Generation goes on afterwards in any case. Returns seconds, the slowest replica's: `pause_s` from the pause to
        the continuation, of which `update_s` loading and `verify_s` the checksum. Raises `EngineError` naming the
        replicas that do not have the new weights.
        """
        async with self._publishing:  # bounded: publish_timeout_s of each step of the publish before
            if version <= self._version:
                raise EngineError(f"publish: version {version} is not above {self._version}, which is in force")
            work = [self._publish_to(index, model_dir, version, checksum) for index in range(len(self._clients))]
            results = await asyncio.gather(*work, return_exceptions=True)  # bounded: publish_timeout_s of each step
            errors = [result for result in results if isinstance(result, BaseException)]
            for error in errors:
                if not isinstance(error, EngineError):
                    raise error
            if errors:
                raise EngineError("; ".join(str(error) for error in errors))
            self._version = version
            timings = [result for result in results if isinstance(result, dict)]
            return {name: max(timing[name] for timing in timings) for name in timings[0]}

    async def status(self) -> Mapping[str, Any]:
        """Figures of all replicas together. Raises `EngineError` if a process died or a replica does not answer."""
        self._check_alive()
        try:
            # bounded: status_timeout_s of each question
            figures = await asyncio.gather(*(self._figures(index) for index in range(len(self._clients))))
        except EngineError:
            await self._explain_death()
            raise
        prompt_tokens = sum(figure["prompt_tokens"] for figure in figures)
        return {
            "version": self._version,
            "replica_versions": [figure["version"] for figure in figures],
            "num_replicas": len(figures),
            "tokens_generated": sum(figure["generated_tokens"] for figure in figures),
            "prompt_tokens": prompt_tokens,
            "running": sum(figure["running"] for figure in figures),
            "waiting": sum(figure["waiting"] for figure in figures),
            "cache_hit_rate": sum(figure["cached_tokens"] for figure in figures) / max(1, prompt_tokens),
        }

    async def stop(self) -> None:
        """Stop the router, then the replicas; all are tried, the first error is raised."""
        closing: list[Awaitable[None]] = [client.close() for client in self._clients]
        closing.append(self._router.stop())
        closing += [replica.stop() for replica in self._replicas]
        results = await asyncio.gather(*closing, return_exceptions=True)  # bounded: the grace of each process
        self._clients, self._replicas = [], []
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _publish_to(self, index: int, model_dir: str, version: int, checksum: str) -> dict[str, float]:
        client = self._clients[index]
        started = time.monotonic()
        try:
            try:
                await client.pause(self._pause_mode)
                paused = time.monotonic()
                await client.update_weights_from_disk(model_dir, version, flush_cache=self._flush_cache)
                updated = time.monotonic()
                actual = await client.checksum()
                verified = time.monotonic()
            finally:
                # Also when the caller is cancelled: an engine that stays paused would hang every rollout.
                await asyncio.shield(asyncio.ensure_future(client.resume()))  # bounded: publish_timeout_s of the client
        except EngineError as error:
            await self._explain_death()
            raise EngineError(f"publish of version {version} to {self._name(index)}: {error}") from error
        if actual != checksum:
            raise EngineError(
                f"publish of version {version} to {self._name(index)}: its weights have checksum {actual[:12]}, "
                f"the trainer's {checksum[:12]}"
            )
        return {
            "pause_s": time.monotonic() - started,
            "update_s": updated - paused,
            "verify_s": verified - updated,
        }

    async def _figures(self, index: int) -> dict[str, Any]:
        client, limit_s = self._clients[index], self._status_timeout_s
        try:
            await client.health(timeout_s=limit_s)
            info = await client.server_info(timeout_s=limit_s)
            loads = await client.loads(timeout_s=limit_s)
        except EngineError as error:
            raise EngineError(f"{self._name(index)} is not healthy: {error}") from error
        state: Mapping[str, Any] = (info.get("internal_states") or [{}])[0]
        return {
            "version": info.get("weight_version"),
            "generated_tokens": state.get("num_generated_tokens", 0),
            "prompt_tokens": state.get("num_prompt_tokens", 0),
            "cached_tokens": state.get("num_cached_tokens", 0),
            "running": sum(load.get("num_running_reqs", 0) for load in loads),
            "waiting": sum(load.get("num_waiting_reqs", 0) for load in loads),
        }

    async def _explain_death(self) -> None:
        """After a failed call: a process that is dying closes its sockets a moment before it can be reaped."""
        self._check_alive()
        await asyncio.sleep(_REAP_DELAY_S)
        self._check_alive()

    def _check_alive(self) -> None:
        """Raises `EngineError` naming every process that ended."""
        deaths = [
            f"{self._name(index)} {describe_exit(code)}; log {replica.log_path}"
            for index, replica in enumerate(self._replicas)
            if (code := replica.exit_code()) is not None
        ]
        if (code := self._router.exit_code()) is not None:
            deaths.append(f"the router {describe_exit(code)}; logs in {self._log_dir}")
        if deaths:
            raise EngineError("; ".join(deaths))

    def _name(self, index: int) -> str:
        return f"replica {index} (pid {self._replicas[index].pid})"
