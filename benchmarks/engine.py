"""The embedded engine against transformers' `generate`: same model, machine and run, in tokens per CPU-second.

    python benchmarks/engine.py [--repeats 3] [--json PATH]

Each measurement is a process of its own with one torch thread; those to be compared alternate, and the median counts.
`core` drives the engine's core without HTTP, `http` a served engine (CPU of the engine's process alone),
`transformers` calls `generate` without scores. The last lines are the load of a reinforcement learning run: 64 callers
at once, prompts of 60 to 300 tokens, in groups of 8 that share one, replies of 20 to 40.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

MODELS: dict[str, dict[str, Any]] = {
    "0.9M": {},
    "5.8M": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}
BATCHES = (1, 16, 64)
PROMPT, REPLY = 64, 64
REQUIRED_RATIO = 1.5


def prompts(batch: int, vocab_size: int) -> list[list[int]]:
    """Random prompts of one length."""
    generator = random.Random(0)
    return [[generator.randrange(2, vocab_size) for _ in range(PROMPT)] for _ in range(batch)]


def rollout_load(vocab_size: int) -> list[tuple[list[int], int]]:
    """Prompts and reply lengths of 8 groups of 8."""
    generator = random.Random(1)
    load: list[tuple[list[int], int]] = []
    for _ in range(8):
        prompt = [generator.randrange(2, vocab_size) for _ in range(generator.randrange(60, 301))]
        load += [(prompt, generator.randrange(20, 41)) for _ in range(8)]
    return load


def jobs(batch: str, vocab_size: int) -> list[tuple[list[int], int]]:
    """Prompts and reply lengths of one measurement."""
    if batch == "rollout":
        return rollout_load(vocab_size)
    return [(prompt, REPLY) for prompt in prompts(int(batch), vocab_size)]


def measure_core(model_dir: str, batch: str) -> float:
    """Tokens per CPU-second of the core."""
    from miles_rl.engine.embedded.core import EngineCore
    from miles_rl.engine.embedded.qwen3_backend import Qwen3Backend
    from miles_rl.engine.embedded.request import Request, SamplingParams

    core = EngineCore(Qwen3Backend(model_dir))
    work = jobs(batch, core.backend.vocab_size)

    def once() -> float:
        core.backend.clear_cache()
        core.waiting.extend(Request("", list(ids), SamplingParams(max_new_tokens=count)) for ids, count in work)
        started = time.process_time()
        while core.step():
            pass
        return sum(count for _, count in work) / (time.process_time() - started)

    once()
    return statistics.median(once() for _ in range(3))


def measure_transformers(model_dir: str, batch: str) -> float:
    """Tokens per CPU-second of `generate`. Prompts of unequal length are padded on the left, as it wants them."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    work = jobs(batch, model.config.vocab_size)
    longest, reply = max(len(ids) for ids, _ in work), max(count for _, count in work)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in work])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in work])

    def once() -> float:
        started = time.process_time()
        model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=reply, eos_token_id=None, pad_token_id=0
        )
        return sum(count for _, count in work) / (time.process_time() - started)

    once()
    return statistics.median(once() for _ in range(3))


async def measure_http(model_dir: str, batch: str) -> float:
    """Tokens per CPU-second of the engine's process while callers ask for all replies at once."""
    from miles_rl.engine.client import EngineClient
    from miles_rl.engine.embedded.engine import EmbeddedEngine

    ticks_per_s = os.sysconf("SC_CLK_TCK")
    with tempfile.TemporaryDirectory() as logs:
        replica = await EmbeddedEngine().launch(0, model_dir, 0, logs)

        def cpu_s() -> float:
            fields = Path(f"/proc/{replica.pid}/stat").read_text().rsplit(")", 1)[1].split()
            return (int(fields[11]) + int(fields[12])) / ticks_per_s

        async with EngineClient(replica.url) as client:
            work = jobs(batch, int((await client.server_info())["vocab_size"]))

            async def once(number: int) -> None:
                await client.flush_cache()
                calls = [
                    client.generate(ids, {"max_new_tokens": count, "ignore_eos": True}, rid=f"{number}-{index}")
                    for index, (ids, count) in enumerate(work)
                ]
                await asyncio.gather(*calls)

            await once(0)
            # CPU time comes in ticks of 10 ms: enough rounds that this does not matter.
            rounds, started = 0, cpu_s()
            while cpu_s() - started < 1.5:
                rounds += 1
                await once(rounds)
            rate = rounds * sum(count for _, count in work) / (cpu_s() - started)
        await replica.stop()
    return rate


def measure(side: str, model_dir: str, batch: str) -> float:
    """One measurement, in this process."""
    import torch

    torch.set_num_threads(1)
    if side == "http":
        return asyncio.run(measure_http(model_dir, batch))
    return {"core": measure_core, "transformers": measure_transformers}[side](model_dir, batch)


def in_own_process(side: str, model_dir: str, batch: str) -> float:
    """One measurement, in a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--model", model_dir, "--batch", batch]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{side}, batch {batch}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def compare(repeats: int) -> list[dict[str, Any]]:
    """All measurements, one row for each model and batch."""
    from miles_rl.engine.embedded.random_model import write_random_qwen3

    rows: list[dict[str, Any]] = []
    print("tokens per CPU-second", flush=True)
    print(" model    batch     core     http  generate  core/gen  http/gen", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, changes in MODELS.items():
            model_dir = write_random_qwen3(Path(folder) / name, **changes)
            for batch in (*map(str, BATCHES), "rollout"):
                rates: dict[str, list[float]] = {"core": [], "http": [], "transformers": []}
                for _ in range(repeats):
                    for side, values in rates.items():
                        values.append(in_own_process(side, model_dir, batch))
                core, http, other = (statistics.median(values) for values in rates.values())
                row = {"model": name, "batch": batch, "core": core, "http": http, "transformers": other}
                rows.append({**row, "core_ratio": core / other, "http_ratio": http / other})
                figures = f"{core:8.0f} {http:8.0f} {other:9.0f} {core / other:9.2f} {http / other:9.2f}"
                print(f"{name:>6} {batch:>8} {figures}", flush=True)
    return rows


def main() -> int:
    """Exit code 1 if a required ratio is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument("--side", choices=["core", "http", "transformers"], help="one measurement only")
    parser.add_argument("--model", help="folder, for --side")
    parser.add_argument("--batch", help="for --side")
    arguments = parser.parse_args()
    if arguments.side:
        print(measure(arguments.side, arguments.model, arguments.batch))
        return 0
    rows = compare(arguments.repeats)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=2))
    missed = [row for row in rows if row["batch"] in ("16", "64") and row["core_ratio"] < REQUIRED_RATIO]
    print(f"required: core/gen at least {REQUIRED_RATIO} at 16 and 64: {'missed' if missed else 'met'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
