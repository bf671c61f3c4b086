"""`python -m miles_rl.engine.embedded --model DIR --port PORT`: the engine as a process of its own.

It dies with the process that started it, unless told `--standalone`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket

import torch

from miles_rl.engine.embedded.backend import Backend
from miles_rl.engine.embedded.core import EngineCore
from miles_rl.engine.embedded.qwen3 import why_not
from miles_rl.engine.embedded.server import EngineServer, serve
from miles_rl.engine.embedded.weights import WeightsError, read_config
from miles_rl.engine.process import die_with_parent

_log = logging.getLogger("embedded")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of the engine."""
    parser = argparse.ArgumentParser(prog="python -m miles_rl.engine.embedded", description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder with config.json and weights")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one and logs it")
    parser.add_argument("--fd", type=int, help="an inherited bound socket instead of host and port")
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--backend", default="auto", choices=["auto", "qwen3", "transformers"])
    parser.add_argument("--num-threads", type=int, default=1, help="torch threads; more than the free cores hurts")
    parser.add_argument("--max-context", type=int, help="shorten the model's own context, in tokens")
    parser.add_argument("--max-running", type=int, default=128, help="requests computed at a time")
    parser.add_argument("--max-queued", type=int, default=4096, help="requests held at a time")
    parser.add_argument("--max-prefill-tokens", type=int, default=2048, help="prompt tokens in one step")
    parser.add_argument("--running-kv-gib", type=float, default=1.0)
    parser.add_argument("--prefix-cache-gib", type=float, default=0.25)
    parser.add_argument(
        "--deterministic",
        default="auto",
        choices=["auto", "true", "false"],
        help="replies whose bits do not depend on the batch; auto where this machine can",
    )
    parser.add_argument("--max-body-bytes", type=int, default=16 << 20)
    parser.add_argument("--max-step-s", type=float, default=120.0, help="a longer model step is unhealthy")
    parser.add_argument("--standalone", action="store_true", help="outlive the process that started it")
    return parser.parse_args(argv)


def make_backend(arguments: argparse.Namespace) -> Backend:
    """The fast path where it covers the model, else transformers. Raises `WeightsError`."""
    options = {
        "dtype": arguments.dtype,
        "device": arguments.device,
        "max_context": arguments.max_context,
        "running_kv_gib": arguments.running_kv_gib,
        "prefix_cache_gib": arguments.prefix_cache_gib,
    }
    deterministic = {"auto": None, "true": True, "false": False}[arguments.deterministic]
    reason = why_not(read_config(arguments.model))
    if arguments.backend == "qwen3" and reason is not None:
        raise WeightsError(f"backend qwen3: does not cover {reason}; use auto")
    if arguments.backend == "transformers" or reason is not None:
        from miles_rl.engine.embedded.transformers_backend import TransformersBackend

        if deterministic:
            cause = f"the model has {reason}" if reason else "backend is transformers"
            raise WeightsError(
                f"engine.deterministic: true; {cause}, which only transformers computes, and not bit for bit; "
                "set engine.deterministic=false"
            )
        _log.info("computing with transformers (%s)", reason or "as asked")
        return TransformersBackend(arguments.model, **options)
    from miles_rl.engine.embedded.qwen3_backend import Qwen3Backend

    return Qwen3Backend(arguments.model, **options, deterministic=deterministic)


def bind(arguments: argparse.Namespace) -> socket.socket:
    """The socket to listen on."""
    if arguments.fd is not None:
        return socket.socket(fileno=arguments.fd)
    bound = socket.socket(socket.AF_INET6 if ":" in arguments.host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((arguments.host, arguments.port))
    return bound


async def run(arguments: argparse.Namespace, core: EngineCore) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    info = {
        "engine": "embedded",
        "served_model_name": arguments.model,
        "device": arguments.device,
        "dtype": arguments.dtype,
        "deterministic": core.backend.deterministic,
        "dp_size": 1,
        "tp_size": 1,
        "max_running_requests": arguments.max_running,
        "max_total_num_tokens": core.backend.cache_figures().max_tokens,
    }
    server = EngineServer(
        core,
        model_dir=arguments.model,
        info=info,
        max_body_bytes=arguments.max_body_bytes,
        max_queued=arguments.max_queued,
        max_step_s=arguments.max_step_s,
    )
    await serve(server, core, [bind(arguments)], stop)


def main() -> None:
    """Entry point."""
    arguments = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    # Its tracebacks are about malformed HTTP, like a router's probe for HTTP/2; the server logs its own failures.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    if not arguments.standalone:
        die_with_parent(os.getppid())
    torch.set_num_threads(arguments.num_threads)
    try:
        backend = make_backend(arguments)
    except WeightsError as error:
        raise SystemExit(f"error: {error}") from error
    core = EngineCore(
        backend,
        weight_version=arguments.weight_version,
        max_running=arguments.max_running,
        max_prefill_tokens=arguments.max_prefill_tokens,
    )
    asyncio.run(run(arguments, core))


if __name__ == "__main__":
    main()
