"""Weights change under running requests: no token is served keys of other weights than it may use, and every token
carries the version that wrote it, from the engine to the episode on disk. Real engine, router and fleet; what a token's
log-probability has to be comes from transformers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import pytest_asyncio
import torch
from engines import Http, random_ids
from fleets import checksum_of, running_fleet
from transformers import AutoModelForCausalLM

from miles_rl.engine.client import EngineClient, Generation
from miles_rl.engine.fleet import Fleet
from miles_rl.engine.publish import Publisher
from miles_rl.rollout.agent import Agent
from miles_rl.rollout.chat import ChatRenderer
from miles_rl.rollout.codec import decode, encode
from miles_rl.rollout.policy import TokenPolicy
from miles_rl.rollout.recorder import EpisodeRecord, EpisodeRecorder
from miles_rl.types import Outcome, StopReason, Trajectory
from sandbox_env.episode import PolicyError

pytestmark = pytest.mark.asyncio(loop_scope="module")
TINY = Path(__file__).parents[2] / "miles_rl/model/shipped/tiny"
TOLERANCE = 1e-4
MODES = ["retract", "in_place", "abort"]
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


@dataclass(frozen=True, slots=True)
class Models:
    """Two sets of weights that are in force by turns: `of[version % 2]`."""

    folders: tuple[str, str]
    loaded: tuple[Any, Any]

    @torch.no_grad()
    def logprobs(
        self, version: int, ids: Sequence[int], start: int, temperature: float = 1.0, num_old: int = 0
    ) -> np.ndarray:
        """Of `ids[start:]` under `version`; the keys and values of `ids[:num_old]` from the weights before."""
        model, kept = self.loaded[version % 2], None
        if num_old:
            kept = self.loaded[1 - version % 2](torch.tensor([list(ids[:num_old])]), use_cache=True).past_key_values
        logits = model(torch.tensor([list(ids[num_old:])]), past_key_values=kept).logits[0].float()
        table = torch.log_softmax(logits / temperature, -1)
        return np.array([float(table[i - 1 - num_old, ids[i]]) for i in range(start, len(ids))])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.manual_seed(0)
    old: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    new: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    with torch.no_grad():
        for weight in new.parameters():
            weight += 0.2 * weight.std() * torch.randn_like(weight)
    folder = str(tmp_path_factory.mktemp("new"))
    new.save_pretrained(folder)
    return Models((folder, str(TINY)), (new, old))


@dataclass(slots=True)
class Served:
    """A running fleet of one replica, a client through its router, and the engine itself."""

    fleet: Fleet
    client: EngineClient
    engine: Http
    mode: str
    models: Models
    version: int = 3
    begun: int = 3
    """The version of the update in progress, else `version`."""

    async def update(self) -> None:
        """Publish the other weights."""
        self.begun = self.version + 1
        folder = self.models.folders[(self.version + 1) % 2]
        await self.fleet.publish(folder, self.version + 1, checksum_of(folder))
        self.version += 1

    async def ask(self, prompt: Sequence[int], sampling: dict[str, Any], name: str) -> Generation:
        """A reply, all of one session."""
        return await self.client.generate(prompt, sampling, rid=name, routing_key="s")

    def check(self, version: int, prompt: Sequence[int], reply: Generation, part: slice, num_old: int = 0) -> None:
        """That the `part` of the reply has the log-probabilities of `version`, given all before it."""
        ids = [*prompt, *reply.output_ids]
        wanted = self.models.logprobs(version, ids, len(prompt) + (part.start or 0), num_old=num_old)
        got = np.array(reply.logprobs[part])
        assert np.abs(got - wanted[: len(got)]).max(initial=0.0) < TOLERANCE

    def check_all(self, prompt: Sequence[int], reply: Generation, version: int) -> None:
        """That `version` wrote all of the reply and the keys of all before it."""
        assert set(reply.versions) == {version}
        self.check(version, prompt, reply, slice(0, None))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(models: Models, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    logs = tmp_path_factory.mktemp("logs")
    async with running_fleet(str(TINY), logs, num_replicas=1, pause_mode=MODES[0]) as fleet:
        endpoints = await fleet.endpoints()
        async with EngineClient(endpoints["router"]) as client:
            yield Served(fleet, client, Http(endpoints["replicas"][0]), MODES[0], models)


@pytest_asyncio.fixture(params=MODES, scope="module", loop_scope="module")
async def served(request: pytest.FixtureRequest, started: Served) -> Served:
    """The one engine in each mode: the first is what the fleet was told, the others it is told as it runs."""
    if request.param != started.mode:
        started.mode, fleet = request.param, started.fleet
        options = replace(fleet._options, pause_mode=started.mode)
        fleet._publishers = [Publisher(client, options) for client in fleet._clients]
    return started


async def test_the_two_sets_of_weights_are_told_apart(models: Models) -> None:
    ids = random_ids(80, 5)
    difference = np.abs(models.logprobs(3, ids, 1) - models.logprobs(4, ids, 1))
    assert difference.min() > 0
    assert np.median(difference) > 1000 * TOLERANCE
    mixed = np.abs(models.logprobs(4, ids, 70, num_old=60) - models.logprobs(4, ids, 70))
    assert np.median(mixed) > 100 * TOLERANCE


async def test_no_keys_of_older_weights_serve_a_request_that_starts_after_an_update(served: Served) -> None:
    prompt, old = random_ids(80, 5), served.version
    new = old + 1
    served.check_all(prompt, await served.ask(prompt, SHORT, "first"), old)
    assert (await served.ask(prompt, SHORT, "again")).cached_tokens >= 64
    running = asyncio.create_task(served.ask(prompt, LONG, "long"))
    await served.engine.until_running(1)
    await served.update()
    after = await served.ask(prompt, SHORT, "after")
    if served.mode != "retract":  # a retracted request has computed the prompt anew by now, for others too
        assert after.cached_tokens == 0
    served.check_all(prompt, after, new)
    again = await served.ask(prompt, SHORT, "after-again")
    assert again.cached_tokens >= 64, "what the new weights computed is used again"
    served.check_all(prompt, again, new)
    check_spanning(served, prompt, await running, old)
    over = [*prompt, *(await running).output_ids[:400]]
    served.check_all(over, await served.ask(over, SHORT, "over-the-span"), new)


def check_spanning(served: Served, prompt: Sequence[int], reply: Generation, old: int) -> None:
    """That a request in flight over an update came of it as the pause mode says."""
    if served.mode == "abort":
        assert reply.finish_reason == "abort"
        served.check_all(prompt, reply, old)
        return
    assert (reply.finish_reason, len(reply.output_ids)) == ("length", 600)
    assert reply.versions == sorted(reply.versions)
    assert set(reply.versions) == {old, old + 1}
    split = reply.versions.index(old + 1)
    served.check(old, prompt, reply, slice(0, split))
    # In place, keys of the old weights stay under what the new ones write; the last old token had none yet.
    num_old = len(prompt) + split - 1 if served.mode == "in_place" else 0
    served.check(old + 1, prompt, reply, slice(split, None), num_old)


async def test_replies_among_many_updates_are_each_of_the_weights_they_say(served: Served) -> None:
    """Conversations that share beginnings, while the weights change again and again."""
    draw = random.Random(0)
    beginnings = [random_ids(100, 20 + number) for number in range(3)]
    seen: list[tuple[int, bool, list[int], Generation]] = []
    changing = asyncio.Event()

    async def converse(number: int) -> None:
        ids = [*beginnings[number % 3], *random_ids(draw.randint(0, 40), 30 + number)]
        for turn in range(10_000):
            before, begun, name = served.version, served.begun, f"c{served.version}/{number}/{turn}"
            limit = {"max_new_tokens": draw.randint(5, 60), "ignore_eos": True, "sampling_seed": turn}
            reply = await served.client.generate(ids, limit, rid=name, routing_key=f"c{number}")
            undisturbed = before == begun == served.begun
            seen.append((before, undisturbed, list(ids), reply))
            if changing.is_set():
                return
            ids = [*ids, *reply.output_ids, *random_ids(5, turn)]
            ids = ids if len(ids) < 400 else ids[:150]

    def num_reused() -> int:
        return sum(reply.cached_tokens > 0 for _, undisturbed, _, reply in seen if undisturbed)

    conversations = [asyncio.create_task(converse(number)) for number in range(6)]
    async with asyncio.timeout(90):
        for _ in range(4):
            before = num_reused()
            while num_reused() < before + 2:  # however slow the machine is, between two updates keys are used again
                await asyncio.sleep(0.02)
            await asyncio.sleep(draw.uniform(0.0, 0.1))
            await served.update()
        changing.set()
        await asyncio.gather(*conversations)
    assert len({reply.versions[0] for _, _, _, reply in seen if reply.versions}) >= 4
    for before, undisturbed, prompt, reply in seen:
        check_among_updates(served, before, undisturbed, prompt, reply)


def check_among_updates(
    served: Served, before: int, undisturbed: bool, prompt: Sequence[int], reply: Generation
) -> None:
    """That each token of a reply that was asked under version `before` is of the weights that it says."""
    versions = reply.versions
    if undisturbed:
        served.check_all(prompt, reply, before)
    assert versions == sorted(versions)
    assert min(versions, default=before) >= before, "a token of older weights than were in force when it was asked"
    served.check(before, prompt, reply, slice(0, versions.count(before)))
    if served.mode == "retract" and versions:
        served.check(versions[-1], prompt, reply, slice(versions.index(versions[-1]), None))
    if served.mode == "abort":
        assert len(set(versions)) <= 1


def other_seed(served: Served, seed: int) -> TokenPolicy:
    """A hot conversation, whose replies are long."""
    agent = replace(AGENT, temperature=4.0, turn_tokens=400, seed=seed)
    return TokenPolicy(served.client, ChatRenderer(str(TINY)), agent, "Say something.", "g0.0.0")


async def long_reply(served: Served) -> TokenPolicy:
    """A conversation that has not begun, whose first reply would be long under the weights in force."""
    for seed in range(50):
        policy = other_seed(served, seed)
        await policy.reply(30.0)
        if policy.spans[0].end - policy.spans[0].start > 200:
            return other_seed(served, seed)
    raise AssertionError("no seed gives a long reply")


async def test_versions_reach_the_trainer_and_the_disk_as_the_engine_stamped_them(
    served: Served, tmp_path: Path
) -> None:
    """The weights change in the middle of the first reply, and again between two turns."""
    policy, old = await long_reply(served), served.version
    reply = asyncio.create_task(policy.reply(30.0))
    await served.engine.until_running(1)
    await served.update()
    if served.mode == "abort":
        with pytest.raises(PolicyError, match="abort"):
            await reply
        assert policy.spans == [], "a reply that a pause aborted is a failure and never a reply"
        return
    await reply
    policy.observe("(no output)")
    await served.update()
    await policy.reply(30.0)

    token_ids, mask, logprobs, versions = policy.arrays()
    first, second = policy.spans
    assert set(versions[first.start : first.end]) == {old, old + 1}
    assert set(versions[second.start : second.end]) == {old + 2}
    assert ((versions >= 0) == mask).all()
    split = int(np.argmax(versions == old + 1))
    num_old = split - 1 if served.mode == "in_place" else 0
    logprobs_of: Callable[..., np.ndarray] = served.models.logprobs
    ids = token_ids.tolist()
    parts = [
        logprobs_of(old, ids[:split], first.start, 4.0),
        logprobs_of(old + 1, ids[: first.end], split, 4.0, num_old),
        logprobs_of(old + 2, ids[: second.end], second.start, 4.0),
    ]
    assert np.abs(logprobs[mask] - np.concatenate(parts)).max() < TOLERANCE

    trajectory = Trajectory(
        "g0.0.0", 0, "task", token_ids, mask, logprobs, versions, 1.0, Outcome.SCORED, StopReason.COMPLETED
    )
    assert (trajectory.oldest_version, trajectory.newest_version) == (old, old + 2)
    restored = decode(encode(trajectory))
    assert restored.versions.tolist() == versions.tolist()
    row = recorded(trajectory, tmp_path / "episodes")
    assert row["versions"] == versions.tolist()
    assert (row["oldest_version"], row["newest_version"]) == (old, old + 2)


def recorded(trajectory: Trajectory, folder: Path) -> dict[str, Any]:
    """The trajectory's row on disk."""
    recorder = EpisodeRecorder(folder)
    recorder.record(
        EpisodeRecord(
            kind="train",
            task=trajectory.task,
            sample_id=trajectory.sample_id,
            outcome=trajectory.outcome,
            stop_reason=trajectory.stop_reason,
            started_s=0.0,
            finished_s=1.0,
            reward=trajectory.reward,
            token_ids=trajectory.token_ids,
            loss_mask=trajectory.loss_mask,
            logprobs=trajectory.logprobs,
            versions=trajectory.versions,
        )
    )
    recorder.close()
    (row,) = pq.read_table(folder).to_pylist()
    return row
