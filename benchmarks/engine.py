"""The embedded engine against transformers' `generate`: same model, machine and run, in tokens per CPU-second.

    python benchmarks/engine.py [--rounds 5] [--json PATH]

Each side is a process of its own with one torch thread; they take turns, and the median over the rounds counts.
`core` drives the engine's core without HTTP, `http` a served engine (CPU of the engine's process alone),
`transformers` calls `generate` without scores. The last lines are the load of a reinforcement learning run: 64 callers
at once, prompts of 60 to 300 tokens, in groups of 8 that share one, replies of 20 to 40.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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


def core_rate(model_dir: str, batch: str) -> Iterator[float]:
    """Tokens per CPU-second of the core, measured anew at each step of the iterator."""
    from miles_rl.engine.embedded.core import EngineCore
    from miles_rl.engine.embedded.qwen3_backend import Qwen3Backend
    from miles_rl.engine.embedded.request import Request, SamplingParams

    core = EngineCore(Qwen3Backend(model_dir))
    work = jobs(batch, core.backend.vocab_size)
    while True:
        core.backend.clear_cache()
        core.waiting.extend(Request("", list(ids), SamplingParams(max_new_tokens=count)) for ids, count in work)
        started = time.process_time()
        while core.step():
            pass
        yield sum(count for _, count in work) / (time.process_time() - started)


def transformers_rate(model_dir: str, batch: str) -> Iterator[float]:
    """The same of `generate`. Prompts of unequal length are padded on the left, as it wants them."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    work = jobs(batch, model.config.vocab_size)
    longest, reply = max(len(ids) for ids, _ in work), max(count for _, count in work)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in work])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in work])
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": reply, "eos_token_id": None, "pad_token_id": 0}
    while True:
        started = time.process_time()
        model.generate(ids, attention_mask=mask, **options)
        yield sum(count for _, count in work) / (time.process_time() - started)


def http_rate(model_dir: str, batch: str) -> Iterator[float]:
    """The same of the process of a served engine, while callers ask for all replies at once."""
    from miles_rl.engine.client import EngineClient
    from miles_rl.engine.embedded.engine import EmbeddedEngine

    ticks_per_s = os.sysconf("SC_CLK_TCK")

    def cpu_s(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / ticks_per_s

    async def once(url: str, number: int) -> int:
        async with EngineClient(url) as client:
            await client.flush_cache()
            work = jobs(batch, int((await client.server_info())["vocab_size"]))
            calls = [
                client.generate(ids, {"max_new_tokens": count, "ignore_eos": True}, rid=f"{number}-{index}")
                for index, (ids, count) in enumerate(work)
            ]
            return sum(len(reply.output_ids) for reply in await asyncio.gather(*calls))

    with tempfile.TemporaryDirectory() as logs:
        replica = asyncio.run(EmbeddedEngine().launch(0, model_dir, 0, logs))
        for number in itertools.count():
            # CPU time comes in ticks of 10 ms: enough rounds that this does not matter.
            num_tokens, started = 0, cpu_s(replica.pid)
            while cpu_s(replica.pid) - started < 0.5:
                num_tokens += asyncio.run(once(replica.url, number))
            yield num_tokens / (cpu_s(replica.pid) - started)


SIDES = {"core": core_rate, "http": http_rate, "transformers": transformers_rate}


def serve(side: str, model_dir: str, batch: str) -> None:
    """Measure once for every line that comes in, and print the rate; the first, a warm-up, goes unprinted."""
    import torch

    torch.set_num_threads(1)
    rates = SIDES[side](model_dir, batch)
    next(rates)
    for _ in sys.stdin:
        print(next(rates), flush=True)


def start(side: str, model_dir: str, batch: str) -> subprocess.Popen[str]:
    """A process that serves one side."""
    command = [sys.executable, __file__, "--side", side, "--model", model_dir, "--batch", batch]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)


def measure(model_dir: str, batch: str, rounds: int) -> dict[str, list[float]]:
    """Rates of all sides, round by round: what else the machine does meets all of them."""
    processes = {side: start(side, model_dir, batch) for side in SIDES}
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    try:
        for side in [*SIDES] * rounds:
            process = processes[side]
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            rates[side].append(float(process.stdout.readline()))
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return rates


def compare(rounds: int) -> list[dict[str, Any]]:
    """All measurements, one row for each model and batch; ratios are medians over the rounds."""
    from miles_rl.engine.embedded.random_model import write_random_qwen3

    rows: list[dict[str, Any]] = []
    print("tokens per CPU-second", flush=True)
    print(" model    batch     core     http  generate  core/gen  http/gen", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, changes in MODELS.items():
            model_dir = write_random_qwen3(Path(folder) / name, **changes)
            for batch in (*map(str, BATCHES), "rollout"):
                rates = measure(model_dir, batch, rounds)
                row: dict[str, Any] = {"model": name, "batch": batch}
                row |= {side: statistics.median(values) for side, values in rates.items()}
                for side in ("core", "http"):
                    pairs = zip(rates[side], rates["transformers"], strict=True)
                    row[f"{side}_ratio"] = statistics.median(ours / other for ours, other in pairs)
                rows.append(row)
                figures = f"{row['core']:8.0f} {row['http']:8.0f} {row['transformers']:9.0f}"
                print(f"{name:>6} {batch:>8} {figures} {row['core_ratio']:9.2f} {row['http_ratio']:9.2f}", flush=True)
    return rows


def main() -> int:
    """Exit code 1 if a required ratio is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument("--side", choices=list(SIDES), help="serve measurements of one side")
    parser.add_argument("--model", help="folder, for --side")
    parser.add_argument("--batch", help="for --side")
    arguments = parser.parse_args()
    if arguments.side:
        serve(arguments.side, arguments.model, arguments.batch)
        return 0
    rows = compare(arguments.rounds)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=2))
    missed = [row for row in rows if row["batch"] in ("16", "64") and row["core_ratio"] < REQUIRED_RATIO]
    print(f"required: core/gen at least {REQUIRED_RATIO} at 16 and 64: {'missed' if missed else 'met'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
