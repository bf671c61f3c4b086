"""The embedded engine on a CUDA device: the same numbers, the same protocol. Skipped where there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Http, random_ids, run_to_end, running_engine
from safetensors.torch import load_file

from miles_rl.engine.embedded.core import EngineCore
from miles_rl.engine.embedded.qwen3_backend import Qwen3Backend
from miles_rl.engine.embedded.random_model import write_random_qwen3
from miles_rl.engine.embedded.request import Request, SamplingParams
from miles_rl.engine.embedded.transformers_backend import TransformersBackend
from miles_rl.weights.checksum import checksum

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LENGTHS = (1, 16, 17, 100, 129, 500, 1000)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_random_qwen3(folder / name, seed) for seed, name in enumerate(("old", "new"))}


@torch.no_grad()
def reference(model_dir: str, ids: Sequence[int], start: int, dtype: torch.dtype) -> list[float]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    model = model.to("cuda").eval()
    table = torch.log_softmax(model(torch.tensor([list(ids)], device="cuda")).logits[0].float(), -1)
    return [float(table[index - 1, ids[index]]) for index in range(start, len(ids))]


def differences(model_dir: str, requests: list[Request], dtype: torch.dtype) -> list[float]:
    found: list[float] = []
    for request in requests:
        wanted = reference(model_dir, request.ids, request.num_prompt, dtype)
        found += [abs(a - b) for a, b in zip(request.logprobs, wanted, strict=True)]
    return found


def work(turn: int = 0, previous: Sequence[Request] = ()) -> list[Request]:
    prompts = [r.ids + random_ids(5, turn) for r in previous] or [random_ids(n, n) for n in LENGTHS]
    return [Request(str(i), prompt, SamplingParams(max_new_tokens=5 + 9 * i)) for i, prompt in enumerate(prompts)]


def test_float32_logprobs_agree_over_turns_and_an_update(models: dict[str, str]) -> None:
    core = EngineCore(Qwen3Backend(models["old"], device="cuda"))
    first = run_to_end(core, work())
    assert max(differences(models["old"], first, torch.float32)) < 1e-4
    second = run_to_end(core, work(1, first))
    assert max(differences(models["old"], second, torch.float32)) < 1e-4
    assert sum(request.num_cached for request in second) > 0
    core.install(core.backend.stage(models["new"]), "1")
    third = run_to_end(core, work(2, second))
    assert max(differences(models["new"], third, torch.float32)) < 1e-4
    assert {request.num_cached for request in third} == {0}


def test_bfloat16_logprobs_stay_close(models: dict[str, str]) -> None:
    core = EngineCore(Qwen3Backend(models["old"], device="cuda", dtype="bfloat16"))
    found = differences(models["old"], run_to_end(core, work()), torch.bfloat16)
    assert sum(found) / len(found) < 0.1


def test_transformers_computes_on_the_device_too(models: dict[str, str]) -> None:
    core = EngineCore(TransformersBackend(models["old"], device="cuda"))
    assert max(differences(models["old"], run_to_end(core, work()[:4]), torch.float32)) < 1e-4


def test_the_engine_serves_and_updates_on_the_device(models: dict[str, str], tmp_path: Path) -> None:
    with running_engine(models["old"], str(tmp_path), device="cuda") as replica:
        asyncio.run(_serve_and_update(Http(replica.url), models["new"]))


async def _serve_and_update(engine: Http, new: str) -> None:
    running = asyncio.create_task(engine.generate(random_ids(9, 1), max_new_tokens=1500, ignore_eos=True))
    await engine.until_running(1)
    await engine.post("/pause_generation", {"mode": "in_place"})
    status, _ = await engine.post("/update_weights_from_disk", {"model_path": new, "weight_version": "1"})
    assert status == 200
    _, answer = await engine.post("/weights_checker", {"action": "checksum"})
    assert answer["per_engine_checksum"] == checksum(load_file(Path(new) / "model.safetensors").items())
    await engine.post("/continue_generation", {})
    assert [span["version"] for span in (await running)["meta_info"]["weight_versions"]] == ["0", "1"]
