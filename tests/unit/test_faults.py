"""Every fault does what it says, to the real part that it is meant for."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from composed import compose_config
from engines import Http, random_ids
from hydra.utils import instantiate
from local_boxes import write_task
from tiny_policy import make_batch, make_trainer, write_policy

from miles_rl.engine.embedded.engine import EmbeddedEngine
from miles_rl.engine.embedded.random_model import write_random_qwen3
from miles_rl.faults.process import ClockJump, WorkerLoss
from miles_rl.faults.proxy import ProxiedReplica
from miles_rl.faults.sandbox import SandboxFault
from miles_rl.faults.trainer import CorruptedUpdate, DiskFull, NanGradient
from miles_rl.loss.policy import PolicyLoss
from miles_rl.trainer.base import NonFiniteError
from miles_rl.trainer.checkpoint import stored_tensors
from miles_rl.weights.checksum import checksum
from pipelines.errors import ConfigError
from pipelines.origin import resolve
from pipelines.plan import make_plan
from sandbox_env.pool import LeasedSandbox, SandboxPool
from sandbox_env.providers.local import LocalProvider
from sandbox_env.sandbox import SandboxError
from sandbox_env.verifier import verify

ROOT = Path(__file__).parents[2]
OPTIONS = sorted(path.stem for path in (ROOT / "conf/faults").glob("*.yaml"))
VERSION = 6
"""Of the weights that a step on `make_batch` makes, plus one: its batches are consumed by 6."""


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_names_a_stage_and_passes_the_plan(name: str) -> None:
    resolved, raw = resolve(compose_config(f"faults={name}"))
    plan = make_plan(resolved, raw)
    fault = instantiate(resolved["faults"])
    assert fault.stage in {"", *(stage.name for stage in plan.stages)}
    assert (fault.stage == "") == (name == "none")
    assert callable(fault.install)


def test_a_stage_that_is_none_is_refused_in_one_line() -> None:
    resolved, raw = resolve(compose_config("faults=worker_loss", "faults.stage=fleets"))
    with pytest.raises(ConfigError) as caught:
        make_plan(resolved, raw)
    assert len(str(caught.value).splitlines()) == 1
    assert str(caught.value).startswith("faults.stage: fleets; ")


async def test_the_proxy_delays_and_fails_generations_only_and_closes_with_the_engine(tmp_path: Path) -> None:
    model = write_random_qwen3(tmp_path / "model", 0)
    inner = await EmbeddedEngine().launch(0, model, 0, str(tmp_path))
    replica = await ProxiedReplica.before(inner, random.Random(0), delay_s=0.2, error_rate=0.5)
    try:
        http = Http(replica.url)
        statuses: list[int] = []
        for number in range(12):
            started = time.monotonic()
            body = {
                "input_ids": random_ids(5, number),
                "sampling_params": {"max_new_tokens": 2},
                "return_logprob": True,
            }
            status, answer = await http.post("/generate", body)
            statuses.append(status)
            assert status == 500 or (len(answer["output_ids"]) == 2 and time.monotonic() - started >= 0.2)
        expected = random.Random(0)
        assert statuses == [500 if expected.random() < 0.5 else 200 for _ in range(12)]
        assert (await http.get("/health"))[0] == 200
        assert (await http.get("/server_info"))[1] == (await Http(inner.url).get("/server_info"))[1]
    finally:
        await replica.stop()
    assert inner.exit_code() is not None


class Tasks:
    def __init__(self, task: Any) -> None:
        self.task = task

    async def all_tasks(self) -> list[Any]:
        return [self.task]


async def faulty_pool(folder: Path, **options: Any) -> tuple[Any, SandboxPool]:
    task = write_task(folder / "task")
    pool = SandboxPool(Tasks(task), LocalProvider(), 4, op_grace_s=1.0)
    await pool.start()
    SandboxFault(seed=0, **options).install(pool)
    return task, pool


async def test_sandboxes_are_not_made_at_the_rate_that_was_asked_for(tmp_path: Path) -> None:
    task, pool = await faulty_pool(tmp_path, create_failure_rate=0.5)
    failed = 0
    for _ in range(20):
        try:
            await pool.release(await pool.lease(task, 20))
        except SandboxError:
            failed += 1
    draws = random.Random(0)
    assert failed == sum(draws.random() < 0.5 for _ in range(20))
    await pool.stop()


async def test_a_command_that_never_returns_is_ended_by_the_pool(tmp_path: Path) -> None:
    task, pool = await faulty_pool(tmp_path, exec_hang_rate=1.0)
    sandbox = LeasedSandbox(pool, await pool.lease(task, 20))
    started = time.monotonic()
    with pytest.raises(SandboxError):
        await sandbox.exec("true", timeout_s=0.5)
    assert time.monotonic() - started < 15
    await sandbox.close()
    await pool.stop()


async def test_a_verifier_that_cannot_start_is_no_reward(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task, pool = await faulty_pool(tmp_path, verifier_breaks_after=1)
    outcomes = []
    for _ in range(2):
        sandbox = LeasedSandbox(pool, await pool.lease(task, 20))
        outcomes.append(await verify(sandbox, task))
        await sandbox.close()
    await pool.stop()
    assert [(str(v.outcome), v.reward) for v in outcomes] == [("scored", 1.0), ("verifier_failed", None)]
    told = [record.message for record in caplog.records if record.message.startswith("fault: ")]
    assert [line.split(" of ")[1] for line in told] == [f"{task.name} cannot start"]


class Loop:
    """What a trainer fault replaces the trainer of."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer


def loaded(tmp_path: Path, fault: Any) -> Any:
    loop = Loop(make_trainer(PolicyLoss()))
    fault.install(loop)
    loop.trainer.load(write_policy(tmp_path / "model"), None)
    return loop.trainer


def test_a_gradient_that_is_not_a_number_leaves_the_weights_as_they_were(tmp_path: Path) -> None:
    trainer = loaded(tmp_path, NanGradient(seed=0, at_version=VERSION + 1))
    before = trainer.export(str(tmp_path / "before"))
    with pytest.raises(NonFiniteError, match="the step was not taken"):
        trainer.step(make_batch(np.random.default_rng(0)))
    assert trainer.export(str(tmp_path / "after")) == before


def test_a_gradient_is_only_spoilt_in_its_own_step(tmp_path: Path) -> None:
    trainer = loaded(tmp_path, NanGradient(seed=0, at_version=VERSION + 2))
    assert np.isfinite(trainer.step(make_batch(np.random.default_rng(0)))["train/grad_norm"])


def test_damaged_weights_no_longer_have_their_checksum(tmp_path: Path) -> None:
    trainer = loaded(tmp_path, CorruptedUpdate(seed=0, at_version=2))
    for version, same in ((1, True), (2, False)):
        folder = tmp_path / f"v{version:06d}"
        digest = trainer.export(str(folder))
        assert (checksum(stored_tensors(folder)) == digest) is same


def test_a_full_disk_fails_the_save_and_no_other(tmp_path: Path) -> None:
    trainer = loaded(tmp_path, DiskFull(seed=0, at_version=2))
    for name in ("step-000001", "step-000002"):
        (tmp_path / name).mkdir()
    trainer.save(str(tmp_path / "step-000001"))
    with pytest.raises((OSError, RuntimeError)):
        trainer.save(str(tmp_path / "step-000002"))
    assert torch.load(tmp_path / "step-000001/trainer_state.pt", weights_only=True)


DYING = """
import sys
sys.path[:0] = [{tests!r}, {root!r}]
import numpy as np
from pathlib import Path
from tiny_policy import make_batch, make_trainer, write_policy
from miles_rl.loss.policy import PolicyLoss
from miles_rl.faults.trainer import CheckpointKill, TrainerCrash
class Loop: pass
loop = Loop()
loop.trainer = make_trainer(PolicyLoss())
{fault}.install(loop)
loop.trainer.load(write_policy(Path({folder!r}, "model")), None)
{act}
print("lived on")
"""


@pytest.mark.parametrize(
    ("fault", "act"),
    [
        (
            "TrainerCrash(0, 7, 0.0)",
            "loop.trainer.step(make_batch(np.random.default_rng(0))); import time; time.sleep(5)",
        ),
        ("CheckpointKill(0, 2)", "loop.trainer.save({folder!r} + '/step-000002')"),
    ],
)
def test_a_trainer_that_is_to_die_dies_by_a_signal_that_nothing_can_catch(tmp_path: Path, fault: str, act: str) -> None:
    act = act.format(folder=str(tmp_path))
    code = DYING.format(tests=str(ROOT / "tests"), root=str(ROOT), fault=fault, folder=str(tmp_path), act=act)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "lived on" not in done.stdout


class Publishing:
    async def published(self, version: int) -> None:
        pass


async def test_the_wall_clock_jumps_at_its_version_and_the_monotonic_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "time", time.time)  # put back afterwards
    component = Publishing()
    ClockJump(seed=0, jump_s=-3600.0, at_version=2).install(component)
    wall, monotonic = time.time(), time.monotonic()
    await component.published(1)
    assert time.time() - wall < 60
    await component.published(2)
    assert -3700 < time.time() - wall < -3500
    assert 0 <= time.monotonic() - monotonic < 60


def test_a_worker_is_lost_at_its_version() -> None:
    lost = WorkerLoss(seed=0, stage="rollout", at_version=2)
    assert lost.stage == "rollout"
    code = f"""
import sys, asyncio
sys.path[:0] = [{str(ROOT)!r}]
from miles_rl.faults.process import WorkerLoss
class Publishing:
    async def published(self, version): print("published", version, flush=True)
component = Publishing()
WorkerLoss(0, "rollout", 2).install(component)
for version in (1, 2, 3): asyncio.run(component.published(version))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["published", "1", "published", "2"]


def test_a_rate_that_is_no_share_is_refused() -> None:
    with pytest.raises(ValueError, match=r"faults\.create_failure_rate: 1\.5; give a share between 0 and 1"):
        SandboxFault(seed=0, create_failure_rate=1.5)
    with pytest.raises(ValueError, match=r"faults\.exec_hang_rate: -0\.1; give a share between 0 and 1"):
        SandboxFault(seed=0, exec_hang_rate=-0.1)


@pytest.mark.parametrize("name", ["engine_crash", "nan_gradient", "worker_loss", "clock_back"])
def test_a_version_at_which_nothing_can_strike_is_refused(name: str) -> None:
    for value, words in (("0", "faults.at_version: 0; give at least 1"), ("41", "the fault never strikes")):
        resolved, raw = resolve(compose_config(f"faults={name}", f"faults.at_version={value}"))
        with pytest.raises(ConfigError, match=words):
            make_plan(resolved, raw)
