"""Damaged weights on a real engine: nothing is ever written with them, and the failure says what and where."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from engines import Http
from fleets import checksum_of

from miles_rl.engine.base import EngineError, Replica
from miles_rl.engine.client import EngineClient
from miles_rl.engine.embedded.engine import EmbeddedEngine
from miles_rl.engine.embedded.random_model import write_random_qwen3
from miles_rl.engine.publish import Publisher, PublishOptions, Weights

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG = {"max_new_tokens": 1500, "ignore_eos": True}
SHORT = {"max_new_tokens": 4, "ignore_eos": True}
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_random_qwen3(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(model: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Replica]:
    launched = await EmbeddedEngine().launch(0, model, 0, str(tmp_path_factory.mktemp("logs")))
    try:
        yield launched
    finally:
        await launched.stop()


def options(pause_mode: str = "in_place") -> PublishOptions:
    return PublishOptions(pause_mode, False, 20.0, 10.0, "stages.fleet.run")


def damaged(model: str, folder: Path) -> str:
    """A copy with one bit of one weight changed."""
    shutil.copytree(model, folder)
    data = bytearray((folder / FILE).read_bytes())
    data[-8] ^= 1
    (folder / FILE).write_bytes(data)
    return str(folder)


def in_time() -> float:
    return asyncio.get_running_loop().time() + 20


class Reread(EngineClient):
    """A disk that gives a file back sound, or damaged in another way, once it was read `after` times."""

    def __init__(self, url: str, file: Path, later: bytes) -> None:
        super().__init__(url)
        self.file, self.later, self.num_looks = file, later, 0

    async def __aenter__(self) -> Reread:
        return self

    async def checksum(self, *, timeout_s: float | None = None) -> str:
        found = await super().checksum(timeout_s=timeout_s)
        self.num_looks += 1
        self.file.write_bytes(self.later)
        return found


async def figures(replica: Replica) -> dict[str, object]:
    return (await Http(replica.url).get("/server_info"))[1]["internal_states"][0]


async def version_of(client: EngineClient) -> int:
    return int((await client.server_info())["weight_version"])


@pytest.mark.parametrize("pause_mode", ["in_place", "retract"])
async def test_no_token_is_written_with_damaged_weights(
    replica: Replica, model: str, tmp_path: Path, pause_mode: str
) -> None:
    folder, right = damaged(model, tmp_path / "damaged"), checksum_of(model)
    async with EngineClient(replica.url) as client:
        old = await version_of(client)
        publisher = Publisher(client, options(pause_mode))
        running = asyncio.create_task(client.generate([5, 6], LONG, rid="over-the-damage"))
        await Http(replica.url).until_running(1)
        wrong = checksum_of(folder)
        told = rf"^checksum failed: its weights have checksum {wrong[:12]}, the trainer's {right[:12]}; sent 2 times,"
        with pytest.raises(
            EngineError, match=rf"{told} the same each time: see the files in {folder}.*; it stays paused"
        ):
            await publisher.publish(Weights(folder, old + 1, right), in_time())
        before = await figures(replica)
        assert before["is_paused"] is True
        later = asyncio.create_task(client.generate([7, 8], SHORT, rid="after-the-damage"))
        assert await asyncio.wait([running, later], timeout=0.3) == (set(), {running, later})

        with pytest.raises(EngineError, match=r"update failed: .*/nowhere.*; it stays paused"):
            await publisher.publish(Weights("/nowhere", old + 1, right), in_time())
        assert await figures(replica) == before, "not a token in all this time"

        await publisher.publish(Weights(model, old + 2, right), in_time())
        reply = await running
        assert len(reply.output_ids) == 1500
        assert set(reply.versions) == {old, old + 2}
        assert (await later).versions == 4 * [old + 2]


async def test_damage_that_the_next_read_does_not_have_costs_one_more_send(
    replica: Replica, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = damaged(model, tmp_path / "damaged")
    wrong, right = checksum_of(folder), checksum_of(model)
    async with Reread(replica.url, Path(folder, FILE), Path(model, FILE).read_bytes()) as client:
        version = await version_of(client) + 1
        timings = await Publisher(client, options()).publish(Weights(folder, version, right), in_time())
        assert client.num_looks == 2
        assert timings["pause_s"] > timings["update_s"] + timings["verify_s"] > 0
        assert f"publish of version {version} to {replica.url}: its weights have checksum {wrong[:12]}" in caplog.text
        assert (await client.generate([5, 6], SHORT, rid="mended")).versions == 4 * [version]


async def test_damage_that_is_another_at_each_read_says_so(replica: Replica, model: str, tmp_path: Path) -> None:
    folder = damaged(model, tmp_path / "damaged")
    other = bytearray(Path(model, FILE).read_bytes())
    other[-12] ^= 1
    right = checksum_of(model)
    async with Reread(replica.url, Path(folder, FILE), bytes(other)) as client:
        version, publisher = await version_of(client) + 1, Publisher(client, options())
        with pytest.raises(EngineError, match=r"sent 2 times, another each time: see the disk of .*; it stays paused"):
            await publisher.publish(Weights(folder, version, right), in_time())
        await publisher.publish(Weights(model, version, right), in_time())


async def test_weights_that_were_refused_leave_the_old_ones_at_work(
    replica: Replica, model: str, tmp_path: Path
) -> None:
    folder = tmp_path / "torn"
    shutil.copytree(model, folder)
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-8])
    async with EngineClient(replica.url) as client:
        old = await version_of(client)
        with pytest.raises(EngineError, match=r"^update failed: [^;]*torn[^;]*$"):
            await Publisher(client, options()).publish(Weights(str(folder), old + 1, checksum_of(model)), in_time())
        assert (await client.generate([5, 6], SHORT, rid="refused")).versions == 4 * [old]
