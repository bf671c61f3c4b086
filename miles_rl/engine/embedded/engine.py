"""Launches the embedded engine as replicas. Imports no torch: only the child process does."""

from __future__ import annotations

import contextlib
import re
import socket
from pathlib import Path
from typing import Literal

from miles_rl.engine.base import EngineError, Replica
from miles_rl.engine.client import EngineClient
from miles_rl.engine.process import ChildProcess


class EmbeddedReplica:
    """One engine process. Implements `Replica`."""

    def __init__(self, url: str, process: ChildProcess) -> None:
        self._url, self._process = url, process

    @property
    def url(self) -> str:
        """Base address."""
        return self._url

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def log_path(self) -> str:
        """File that holds what the engine printed."""
        return str(self._process.log_path)

    def exit_code(self) -> int | None:
        """None while it lives, else its exit code, minus the signal that ended it."""
        return self._process.exit_code()

    async def stop(self) -> None:
        """End it; safe to call twice."""
        await self._process.stop()


class EmbeddedEngine:
    """Implements `Engine` with `python -m miles_rl.engine.embedded`.

    `device` is `cpu`, `cuda` or `cuda:N`. Key-value memory in GiB is per replica. `max_context` shortens the model's
    own context (tokens). Timeouts in seconds. `deterministic`: the bits of a reply depend on the weights, the request
    and its `sampling_seed` alone, never on the batch, the order of arrival, the prefix cache or a pause; also after a
    restart on the same machine. None where that can be had: on the CPU, in float32, with one thread, on the fast path.
    """

    def __init__(
        self,
        device: str = "cpu",
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        backend: Literal["auto", "qwen3", "transformers"] = "auto",
        num_threads: int = 1,
        max_context: int | None = None,
        max_running: int = 128,
        max_prefill_tokens: int = 2048,
        running_kv_gib: float = 1.0,
        prefix_cache_gib: float = 0.25,
        start_timeout_s: float = 120.0,
        max_step_s: float = 120.0,
        deterministic: bool | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
            raise ValueError(f"engine.device: {device}; give cpu, cuda or cuda:N")
        least = {"num_threads": num_threads, "max_running": max_running, "max_prefill_tokens": max_prefill_tokens}
        for name, value in {**least, "running_kv_gib": running_kv_gib, "start_timeout_s": start_timeout_s}.items():
            if value <= 0:
                raise ValueError(f"engine.{name}: {value}; give more than 0")
        if deterministic:
            _check_deterministic(device, dtype, backend, num_threads)
        self._options: dict[str, object] = {
            "device": device,
            "dtype": dtype,
            "backend": backend,
            "num-threads": num_threads,
            "max-running": max_running,
            "max-prefill-tokens": max_prefill_tokens,
            "running-kv-gib": running_kv_gib,
            "prefix-cache-gib": prefix_cache_gib,
            "max-step-s": max_step_s,
        }
        if max_context is not None:
            self._options["max-context"] = max_context
        if deterministic is not None:
            self._options["deterministic"] = str(deterministic).lower()
        self._num_threads, self._start_timeout_s, self._host = num_threads, start_timeout_s, host

    async def launch(self, index: int, model_dir: str, version: int, log_dir: str) -> Replica:
        """Start replica `index` and wait until it serves. Raises `EngineError` with the log's end."""
        options = {**self._options, "model": model_dir, "weight-version": version}
        # The socket is bound here and inherited, so no other process can take the port in between.
        with socket.socket() as bound:
            bound.bind((self._host, 0))
            url = f"http://{self._host}:{bound.getsockname()[1]}"
            arguments = [f"--{name}={value}" for name, value in options.items()]
            process = ChildProcess(
                "miles_rl.engine.embedded",
                [*arguments, f"--fd={bound.fileno()}"],
                log_path=Path(log_dir) / f"engine_{index}.log",
                env={"OMP_NUM_THREADS": str(self._num_threads), "TOKENIZERS_PARALLELISM": "false"},
                pass_fds=[bound.fileno()],
            )
        replica = EmbeddedReplica(url, process)
        try:
            async with EngineClient(url, timeout_s=5.0) as client:
                what, key = f"replica {index}", "engine.start_timeout_s"
                await process.wait_ready(client.is_healthy, self._start_timeout_s, what, key)
        except BaseException:
            with contextlib.suppress(EngineError, OSError):
                await replica.stop()
            raise
        return replica


def _check_deterministic(device: str, dtype: str, backend: str, num_threads: int) -> None:
    """Raises `ValueError` for settings under which bits depend on the batch."""
    wanted = {
        "device": (device, device == "cpu", "cpu"),
        "dtype": (dtype, dtype in ("auto", "float32"), "float32"),
        "backend": (backend, backend != "transformers", "auto"),
        "num_threads": (num_threads, num_threads == 1, "1"),
    }
    for name, (value, is_right, remedy) in wanted.items():
        if not is_right:
            raise ValueError(
                f"engine.deterministic: true; engine.{name} is {value}; set engine.{name}={remedy} "
                "or engine.deterministic=false"
            )
