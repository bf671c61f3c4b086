"""Weights change under running requests: no token is served keys of other weights than it may use, and every token
carries the version that wrote it, from the engine to the episode on disk. Real engine, router and fleet.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from engines import Http, random_ids
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from miles_rl.engine.client import EngineClient, Generation
from miles_rl.engine.embedded.engine import EmbeddedEngine
from miles_rl.engine.embedded.random_model import write_random_qwen3
from miles_rl.engine.fleet import Fleet
from miles_rl.rollout.agent import Agent
from miles_rl.rollout.chat import ChatRenderer
from miles_rl.rollout.policy import TokenPolicy
from miles_rl.rollout.recorder import EpisodeRecord, EpisodeRecorder
from miles_rl.router.sglang import SglangRouter
from miles_rl.types import Outcome, StopReason, Trajectory
from miles_rl.weights.checksum import checksum
from sandbox_env.episode import PolicyError

TINY = Path(__file__).parents[2] / "miles_rl/model/shipped/tiny"
TOLERANCE = 1e-4
LONG = {"max_new_tokens": 600, "ignore_eos": True, "sampling_seed": 1}
SHORT = {"max_new_tokens": 8, "ignore_eos": True, "sampling_seed": 2}
AGENT = Agent(
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    turn_tokens=64,
    session_tokens=512,
    max_turns=4,
    wall_clock_s=60.0,
    command_timeout_s=5.0,
    observation_chars=400,
    request_timeout_s=30.0,
    lease_timeout_s=30.0,
    seed=0,
)


class Data:
    """The stage that knows what the policy starts from."""

    def __init__(self, model_dir: str) -> None:
        self.model_dir = model_dir

    async def initial_policy(self) -> dict[str, Any]:
        return {"model_dir": self.model_dir, "version": 3}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_random_qwen3(folder / name, seed) for seed, name in enumerate(("old", "new"))}


@asynccontextmanager
async def fleet_of(model_dir: str, log_dir: Path, mode: str) -> AsyncIterator[tuple[Fleet, EngineClient, Http]]:
    fleet = Fleet(Data(model_dir), EmbeddedEngine(), SglangRouter(), log_dir=str(log_dir), pause_mode=mode)
    await fleet.start()
    try:
        endpoints = await fleet.endpoints()
        async with EngineClient(endpoints["router"]) as client:
            yield fleet, client, Http(endpoints["replicas"][0])
    finally:
        await fleet.stop()


async def publish(fleet: Fleet, model_dir: str) -> None:
    await fleet.publish(model_dir, 4, checksum(load_file(Path(model_dir) / "model.safetensors").items()))


@torch.no_grad()
def reference(model_dir: str, ids: Sequence[int], start: int) -> np.ndarray:
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    logprobs = torch.log_softmax(model(torch.tensor([list(ids)])).logits[0].float(), -1)
    return np.array([float(logprobs[i - 1, ids[i]]) for i in range(start, len(ids))])


def assert_written_by(model_dir: str, prompt: Sequence[int], reply: Generation) -> None:
    wanted = reference(model_dir, [*prompt, *reply.output_ids], len(prompt))
    assert np.abs(np.array(reply.logprobs) - wanted).max() < TOLERANCE


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_no_keys_of_older_weights_serve_a_request_that_starts_after_an_update(
    mode: str, models: dict[str, str], tmp_path: Path
) -> None:
    prompt = random_ids(80, 5)
    async with fleet_of(models["old"], tmp_path, mode) as (fleet, client, engine):

        async def short(ids: Sequence[int], name: str) -> Generation:
            return await client.generate(ids, SHORT, rid=name, routing_key="s")

        assert_written_by(models["old"], prompt, await short(prompt, "first"))
        assert (await short(prompt, "again")).cached_tokens >= 64
        running = asyncio.create_task(client.generate(prompt, LONG, rid="long", routing_key="s"))
        await engine.until_running(1)
        await publish(fleet, models["new"])
        after = await short(prompt, "after")
        assert set(after.versions) == {4}
        if mode == "in_place":  # a retracted request has computed the prompt anew by now, for others too
            assert after.cached_tokens == 0
        assert_written_by(models["new"], prompt, after)
        again = await short(prompt, "after-again")
        assert again.cached_tokens >= 64, "what the new weights computed is used again"
        assert_written_by(models["new"], prompt, again)

        spanning = await running
        assert sorted(set(spanning.versions)) == [3, 4]
        assert spanning.versions == sorted(spanning.versions)
        split = spanning.versions.index(4)
        before = reference(models["old"], [*prompt, *spanning.output_ids[:split]], len(prompt))
        assert np.abs(np.array(spanning.logprobs[:split]) - before).max() < TOLERANCE
        if mode == "retract":
            whole = reference(models["new"], [*prompt, *spanning.output_ids], len(prompt) + split)
            assert np.abs(np.array(spanning.logprobs[split:]) - whole).max() < TOLERANCE
        longer = [*prompt, *spanning.output_ids[: split + 100]]
        assert_written_by(models["new"], longer, await short(longer, "over-the-span"))


async def test_a_request_that_a_pause_aborts_is_a_failure_and_never_a_reply(tmp_path: Path) -> None:
    async with fleet_of(str(TINY), tmp_path, "abort") as (_, client, engine):
        policy = TokenPolicy(client, ChatRenderer(str(TINY)), AGENT, "Say something.", "g0.0.0")
        reply = asyncio.create_task(policy.reply(30.0))
        try:
            await engine.until_running(1)
            await engine.post("/pause_generation", {"mode": "abort"})
            with pytest.raises(PolicyError, match="abort"):
                await reply
        finally:
            await engine.post("/continue_generation", {})


async def test_versions_reach_the_trainer_and_the_disk_as_the_engine_stamped_them(tmp_path: Path) -> None:
    other = shutil.copytree(TINY, tmp_path / "same-weights")
    async with fleet_of(str(TINY), tmp_path, "in_place") as (fleet, client, _):
        policy = TokenPolicy(client, ChatRenderer(str(TINY)), AGENT, "Write zurin to lotas.md.", "g0.0.0")
        await policy.reply(30.0)
        policy.observe("(no output)")
        await publish(fleet, str(other))
        await policy.reply(30.0)
    token_ids, mask, logprobs, versions = policy.arrays()
    first, second = policy.spans
    assert set(versions[first.start : first.end]) == {3}
    assert set(versions[second.start : second.end]) == {4}
    assert ((versions >= 0) == mask).all()
    trajectory = Trajectory(
        "g0.0.0", 0, "task", token_ids, mask, logprobs, versions, 1.0, Outcome.SCORED, StopReason.COMPLETED
    )
    assert (trajectory.oldest_version, trajectory.newest_version) == (3, 4)
    recorder = EpisodeRecorder(tmp_path / "episodes")
    recorder.record(
        EpisodeRecord(
            kind="train",
            task="task",
            sample_id="g0.0.0",
            outcome=Outcome.SCORED,
            stop_reason=StopReason.COMPLETED,
            started_s=0.0,
            finished_s=1.0,
            reward=1.0,
            token_ids=token_ids,
            loss_mask=mask,
            logprobs=logprobs,
            versions=versions,
        )
    )
    recorder.close()
    (row,) = pq.read_table(tmp_path / "episodes").to_pylist()
    assert row["versions"] == versions.tolist()
    assert (row["oldest_version"], row["newest_version"]) == (3, 4)
