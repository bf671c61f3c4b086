"""All inference engines of a run, behind one router.

Requests go through the router; weights go to every replica directly, because a router has no say in them. New
weights are put in force in place: requests in flight stop between two tokens, and go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from miles_rl.engine.base import Engine, EngineError, Replica
from miles_rl.engine.client import EngineClient
from miles_rl.engine.process import describe_exit, is_frozen
from miles_rl.engine.publish import Publisher, PublishOptions, Weights
from miles_rl.router.base import Router

_PATH = "stages.fleet.run"
_REAP_DELAY_S = 0.2


class Fleet:
    """Stage component: `num_replicas` engines on the policy that `data` starts from, and the router before them.

    `log_dir` gets the output of every process. `pause_mode` is what a publish does to requests in flight: `in_place`
    they go on with the new weights over keys and values of the old, `retract` all theirs is computed again by the new,
    `abort` they end. `flush_cache` asks engines to drop prefixes of the old weights, for those that would serve them
    to later requests otherwise. Timeouts in seconds: `publish_timeout_s` for a publish on all replicas, with the wait
    for an earlier one, `resume_timeout_s` for the continuation after it, `status_timeout_s` for one look at a replica,
    `stop_timeout_s` for the end of all processes, which are killed then.
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
        resume_timeout_s: float = 15.0,
        status_timeout_s: float = 15.0,
        stop_timeout_s: float = 18.0,
    ) -> None:
        if num_replicas < 1:
            raise ValueError(f"{_PATH}.num_replicas: {num_replicas}; give at least 1")
        if pause_mode not in ("in_place", "retract", "abort"):
            raise ValueError(f"{_PATH}.pause_mode: {pause_mode}; choose in_place, retract or abort")
        limits = {"publish": publish_timeout_s, "resume": resume_timeout_s, "status": status_timeout_s}
        for name, value in {**limits, "stop": stop_timeout_s}.items():
            if value <= 0:
                raise ValueError(f"{_PATH}.{name}_timeout_s: {value:g}; give more than 0")
        self._data, self.engine, self._router = data, engine, router
        self._num_replicas, self._log_dir = num_replicas, log_dir
        self._options = PublishOptions(pause_mode, flush_cache, publish_timeout_s, resume_timeout_s, _PATH)
        self._publish_timeout_s, self._status_timeout_s = publish_timeout_s, status_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._replicas: list[Replica] = []
        self._clients: list[EngineClient] = []
        self._publishers: list[Publisher] = []
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
        try:
            await self._launch(policy["model_dir"])
            urls = [replica.url for replica in self._replicas]
            self._clients = [EngineClient(url, timeout_s=self._publish_timeout_s) for url in urls]
            self._publishers = [Publisher(client, self._options) for client in self._clients]
            self._router_url = await self._router.start(urls, self._log_dir)
        except BaseException:
            await self.stop()
            raise

    async def _launch(self, model_dir: str) -> None:
        launched: dict[int, Replica] = {}

        async def launch(index: int) -> None:
            launched[index] = await self.engine.launch(index, model_dir, self._version, self._log_dir)

        try:
            # bounded: start_timeout_s of the engine
            results = await asyncio.gather(*map(launch, range(self._num_replicas)), return_exceptions=True)
        finally:  # also when cancelled: those that are up already have to be stopped
            self._replicas = [launched[index] for index in sorted(launched)]
        _raise_all(results)

    async def endpoints(self) -> dict[str, Any]:
        """`router`: where to send requests; `replicas`: addresses of the engines; `version` in force."""
        return {
            "router": self._router_url,
            "replicas": [replica.url for replica in self._replicas],
            "version": self._version,
        }

    async def publish(self, model_dir: str, version: int, checksum: str) -> dict[str, float]:
        """Put the weights in `model_dir` in force as `version` on every replica, and verify them by `checksum`.

        No replica generates with weights that were not verified: one that has them, or may have, stays paused until a
        later publish succeeds. Returns seconds, the slowest replica's: `pause_s` from the pause to the continuation,
        of which `update_s` loading and `verify_s` the checksum. Raises `EngineError` naming the replicas that do not
        have the new weights, the step that failed, and those that stay paused.
        """
        ends_at = asyncio.get_running_loop().time() + self._publish_timeout_s
        async with self._turn(version, ends_at):  # bounded: ends_at
            if version <= self._version:
                raise EngineError(f"publish: version {version} is not above {self._version}, which is in force")
            weights = Weights(model_dir, version, checksum)
            work = [self._publish_to(index, weights, ends_at) for index in range(len(self._clients))]
            results = await asyncio.gather(*work, return_exceptions=True)  # bounded: ends_at and resume_timeout_s
            _raise_all(results)
            self._version = version
            timings = [result for result in results if isinstance(result, dict)]
            return {name: max(timing[name] for timing in timings) for name in timings[0]}

    async def status(self) -> Mapping[str, Any]:
        """Figures of all replicas together. Raises `EngineError` if a process died or a replica does not answer."""
        self._check_alive()
        looks = [self._figures(index) for index in range(len(self._clients))]
        results = await asyncio.gather(*looks, return_exceptions=True)  # bounded: status_timeout_s of each look
        if any(isinstance(result, EngineError) for result in results):
            await self._explain_death()
        _raise_all(results)
        figures = [result for result in results if isinstance(result, dict)]
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
        """Stop the router, then the replicas; all are tried, the first error is raised. Kills what takes too long."""
        closing: list[Awaitable[None]] = [client.close() for client in self._clients]
        closing.append(self._router.stop())
        closing += [replica.stop() for replica in self._replicas]
        names = [self._name(index) for index in range(len(self._replicas))]
        self._clients, self._replicas = [], []
        limit = asyncio.timeout(self._stop_timeout_s)
        try:
            async with limit:
                results = await asyncio.gather(*closing, return_exceptions=True)
        except TimeoutError as error:
            if not limit.expired():
                raise
            what = ", ".join(["the router", *names])
            raise EngineError(
                f"{_PATH}.stop_timeout_s: {self._stop_timeout_s:g}; {what} did not end in time and were killed"
            ) from error
        _raise_all(results)

    @asynccontextmanager
    async def _turn(self, version: int, ends_at: float) -> AsyncIterator[None]:
        """One publish at a time."""
        limit = asyncio.timeout_at(ends_at)
        try:
            async with limit:
                await self._publishing.acquire()
        except TimeoutError as error:
            raise EngineError(
                f"publish of version {version}: {_PATH}.publish_timeout_s: {self._publish_timeout_s:g}; an earlier "
                "publish did not end in time"
            ) from error
        try:
            yield
        finally:
            self._publishing.release()

    async def _publish_to(self, index: int, weights: Weights, ends_at: float) -> dict[str, float]:
        try:
            return await self._publishers[index].publish(weights, ends_at)
        except EngineError as error:
            await self._explain_death()
            raise EngineError(f"publish of version {weights.version} to {self._name(index)}: {error}") from error

    async def _figures(self, index: int) -> dict[str, Any]:
        client, limit_s = self._clients[index], self._status_timeout_s
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                await client.health(timeout_s=2 * limit_s)  # so that `limit` is the one that ends
                info = await client.server_info(timeout_s=2 * limit_s)
                loads = await client.loads(timeout_s=2 * limit_s)
        except EngineError as error:
            raise EngineError(f"{self._name(index)} is not healthy: {error}") from error
        except TimeoutError as error:
            key = f"{_PATH}.status_timeout_s: {limit_s:g}"
            raise EngineError(f"{self._name(index)} is not healthy: {key}; it did not answer in time") from error
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
        pid = self._replicas[index].pid
        return f"replica {index} (pid {pid}{', stopped by a signal' if is_frozen(pid) else ''})"


def _raise_all(results: Iterable[object]) -> None:
    """Raise what is an exception in `results`: all `EngineError` as one, unless there is another kind."""
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in errors:
        if not isinstance(error, EngineError):
            raise error
    if errors:
        raise EngineError("; ".join(str(error) for error in errors))
