"""The real collector, scheduler and ledger, killed at any moment and resumed, again and again.

A life runs stub episodes in virtual time. It ends by a kill between two transactions of the ledger: the files are
copied as they lie, the write-ahead log included, and nothing is closed. What the ledger has to know is kept beside it
in plain dictionaries.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import random
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import INFRA_FAILURES, Options, staleness_of, written_by

from miles_rl.rollout.collector import Collector, PlayedSample
from miles_rl.rollout.groups import Sample
from miles_rl.rollout.ledger import LEDGER_FILE, Ledger, Resumed
from miles_rl.rollout.scheduler import FailureLimits
from miles_rl.simulator.clock import run as run_in
from miles_rl.types import Outcome, Trajectory, WeightVersion

KEPT = 2


class Killed(asyncio.CancelledError):
    """The process is gone; nobody is told."""


@dataclass
class Attempt:
    """What the ledger was told of one attempt."""

    sample: Sample
    newest: WeightVersion | None = None
    trained: WeightVersion | None = None
    failed: bool = False


@dataclass
class Told:
    """What the ledger was told up to now."""

    attempts: dict[str, Attempt] = field(default_factory=dict[str, Attempt])
    dropped: set[int] = field(default_factory=set[int])
    sizes: dict[int, int] = field(default_factory=dict[int, int])
    tasks: dict[int, str] = field(default_factory=dict[int, str])

    def back_to(self, version: WeightVersion) -> Told:
        """What of it a resume from the checkpoint of `version` still holds true."""
        told = copy.deepcopy(self)
        for attempt in told.attempts.values():
            if attempt.trained is not None and attempt.trained >= version:
                attempt.trained = None
            if attempt.trained is None and attempt.newest is not None and attempt.newest > version:
                attempt.newest = None
        return told

    def open_groups(self) -> dict[int, tuple[str, tuple[int, ...], set[int]]]:
        """Of each group that is neither trained nor dropped: task, attempts that count, members that are scored."""
        done = {a.sample.group_id for a in self.attempts.values() if a.trained is not None} | self.dropped
        groups: dict[int, tuple[str, tuple[int, ...], set[int]]] = {}
        for group_id, size in self.sizes.items():
            if group_id in done:
                continue
            numbers, scored = [0] * size, set[int]()
            for a in self.attempts.values():
                if a.sample.group_id == group_id:
                    numbers[a.sample.index] = max(numbers[a.sample.index], a.sample.attempt + a.failed)
                    scored |= {a.sample.index} if a.newest is not None else set()
            groups[group_id] = (self.tasks[group_id], tuple(numbers), scored)
        return groups


class FragileLedger(Ledger):
    """Remembers what it was told, and kills the process before its transaction number `fuse` of those in `counted`."""

    fuse: float = math.inf
    counted: str = ""
    on_kill: Callable[[], None]
    told: Told

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.dropping: set[int] = set()

    def _tick(self, what: str) -> None:
        if self.counted in (what, ""):
            self.fuse -= 1
        if self.fuse > 0:
            return
        if self.counted != "dead":
            self.counted, self.fuse = "dead", 0
            self.on_kill()
        raise Killed

    def admit(self, sample: Sample, version: WeightVersion, group_size: int, cursor: Mapping[str, Any]) -> None:
        self._tick("admit")
        super().admit(sample, version, group_size, cursor)
        self.told.attempts[sample.sample_id] = Attempt(sample)
        self.told.sizes[sample.group_id], self.told.tasks[sample.group_id] = group_size, sample.task

    def run(self, sample_id: str, sandbox_id: str) -> None:
        self._tick("run")
        super().run(sample_id, sandbox_id)

    def score(self, trajectory: Trajectory) -> None:
        self._tick("score")
        super().score(trajectory)
        self.told.attempts[trajectory.sample_id].newest = int(trajectory.versions.max())

    def fail(self, sample_id: str, outcome: Outcome, detail: str) -> None:
        self._tick("fail")
        super().fail(sample_id, outcome, detail)
        self.told.attempts[sample_id].failed = True

    def train(self, groups: Mapping[int, Sequence[str]], version: WeightVersion) -> None:
        self._tick("train")
        super().train(groups, version)
        for sample_id in (sample_id for sample_ids in groups.values() for sample_id in sample_ids):
            self.told.attempts[sample_id].trained = version

    def drop(self, group_id: int, reason: str, cursor: Mapping[str, Any]) -> None:
        self._tick("drop")
        super().drop(group_id, reason, cursor)
        self.dropping.add(group_id)
        if not self._db.in_transaction:
            self._told_of_drops()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        with super().together():
            yield
        self._told_of_drops()

    def _told_of_drops(self) -> None:
        self.told.dropped |= self.dropping
        self.dropping.clear()

    def committed(self, version: WeightVersion, kept: Sequence[WeightVersion]) -> None:
        self._tick("committed")
        super().committed(version, kept)


@dataclass
class Life:
    """One run from start or resume to its kill or its end, in `folder`."""

    folder: Path
    options: Options
    rng: random.Random
    ledger: FragileLedger
    resumed: Resumed
    version: WeightVersion
    trained: dict[WeightVersion, list[str]]
    failure_rate: float
    origin: tuple[Life, WeightVersion, str] | None = None
    """The life, the version and the damage that this one was resumed from."""
    snapshots: dict[WeightVersion, Told] = field(default_factory=dict[int, Told])
    played: list[str] = field(default_factory=list[str])

    def checkpoint(self, version: WeightVersion) -> Path:
        return self.folder / f"step-{version}"

    async def to_the_end(self, num_versions: int, checkpoint_every: int) -> bool:
        """Whether it came to its end, and was not killed."""
        gone = asyncio.get_running_loop().create_future()
        self.ledger.on_kill = lambda: self._die(gone)
        trainer = asyncio.create_task(self._train(num_versions, checkpoint_every))
        await asyncio.wait([trainer, gone], return_when=asyncio.FIRST_COMPLETED)
        if not gone.done():
            await trainer
            return True
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        return False

    async def _train(self, num_versions: int, checkpoint_every: int) -> None:
        scheduler = self.options.scheduler(
            order=self.options.order(**self.resumed.cursor),
            version=self.version,
            groups=self.resumed.groups,
            next_group_id=self.resumed.next_group_id,
        )
        scheduler.count_earlier(self.resumed.failures, self.resumed.stale_by_task, self.resumed.trained_by_task)
        self.core = Collector(scheduler, self.ledger, self._play, batch_timeout_s=1e6, stop_timeout_s=1e3)
        self.core.start()
        if self.origin is None:
            await self._save()
        while self.version < num_versions:
            batch = await self.core.next_batch()
            assert batch.version == self.version
            assert len({g.group_id for g in batch.groups}) == self.options.num_groups
            assert max(staleness_of(t, batch.version) for t in batch.trajectories) <= self.options.max_staleness
            self.trained[self.version] = [t.sample_id for t in batch.trajectories]
            await asyncio.sleep(self.rng.random())
            self.version += 1
            self.core.published(self.version)
            if self.version % checkpoint_every == 0:
                await self._save()
        await self.core.finish()

    async def _save(self) -> None:
        """Samples go on beside it; the checkpoint is whole a moment before the ledger hears of it."""
        self.checkpoint(self.version).mkdir()
        await asyncio.sleep(self.rng.random() / 4)
        told = copy.deepcopy(self.ledger.told)
        self.ledger.save(self.checkpoint(self.version))
        await asyncio.sleep(self.rng.random() / 4)
        self.snapshots[self.version] = told
        kept = sorted(self.snapshots)[-KEPT:]
        self.snapshots = {version: self.snapshots[version] for version in kept}
        self.ledger.committed(self.version, kept)

    async def _play(self, sample: Sample, on_ready: Callable[[str], None]) -> PlayedSample:
        assert self.core.scheduler.num_running <= self.options.concurrency
        self.played.append(sample.sample_id)
        slowness = 6 if sample.task == "t0" else 1
        await asyncio.sleep(self.rng.random() * 0.2)
        on_ready(f"box-{sample.sample_id}")
        versions = [self.core.scheduler.engine_version]
        for _ in range(self.rng.randint(1, 3)):
            await asyncio.sleep(self.rng.random() * slowness)
            versions.append(self.core.scheduler.engine_version)
        if self.rng.random() < self.failure_rate:
            return PlayedSample(self.rng.choice(INFRA_FAILURES), detail="injected")
        return PlayedSample(Outcome.SCORED, written_by(sample, versions))

    def _die(self, gone: asyncio.Future[None]) -> None:
        gone.set_result(None)
        killed = self.folder / "killed"
        killed.mkdir()
        for path in self.folder.glob(f"{LEDGER_FILE}*"):
            if not path.name.endswith("-shm"):
                shutil.copy(path, killed)


def first_life(folder: Path, options: Options, rng: random.Random, failure_rate: float) -> Life:
    ledger = FragileLedger(folder / LEDGER_FILE)
    ledger.told = Told()
    return Life(folder, options, rng, ledger, Resumed(), 0, {}, failure_rate)


def damaged(path: Path, how: str, rng: random.Random) -> None:
    """Make the ledger that the killed run left unreadable, or let it have lost its last transactions."""
    wal = path.with_name(f"{LEDGER_FILE}-wal")
    if how == "gone":
        path.unlink()
    elif how == "header":
        path.write_bytes(bytes(100) + path.read_bytes()[100:])
        wal.unlink()  # it would have a good copy of the header
    elif how == "lost":
        wal.write_bytes(wal.read_bytes()[: rng.randrange(wal.stat().st_size + 1)])


def next_life(old: Life, folder: Path, version: WeightVersion, damage: str) -> Life:
    """Resume `old` from its checkpoint of `version`, and compare with what its ledger was told."""
    killed = old.folder / "killed" / LEDGER_FILE
    sources = [killed, old.checkpoint(version) / LEDGER_FILE]
    ledger, resumed = FragileLedger.resume(sources, folder / LEDGER_FILE, version)
    assert isinstance(ledger, FragileLedger)
    if damage == "lost":
        ledger.told = read_back(ledger.path)
    else:
        ledger.told = (old.ledger.told if damage == "none" else old.snapshots[version]).back_to(version)
    found = {g.group_id: (g.task, g.attempts, set(g.scored)) for g in resumed.groups}
    assert found == ledger.told.open_groups()
    for group in resumed.groups:
        for index, trajectory in group.scored.items():
            assert trajectory.sample_id == f"g{group.group_id}.{index}.{group.attempts[index]}"
            assert trajectory.newest_version <= version
    trained = {v: ids for v, ids in old.trained.items() if v < version}
    assert trained == {v: ids for v, ids in trained_in(ledger.path).items() if v is not None}
    origin = (old, version, damage)
    return Life(folder, old.options, old.rng, ledger, resumed, version, trained, old.failure_rate, origin)


def successor(life: Life, folder: Path, damage: str, from_older: bool) -> Life:
    """What follows a kill. A life that wrote no checkpoint leaves nothing: it is begun again as it was."""
    if life.snapshots:
        version = sorted(life.snapshots)[0 if from_older else -1]
        damaged(life.folder / "killed" / LEDGER_FILE, damage, life.rng)
        return next_life(life, folder, version, damage)
    if life.origin is None:
        return first_life(folder, life.options, life.rng, life.failure_rate)
    old, version, damage = life.origin
    return next_life(old, folder, version, damage)


def rows_of(path: Path, statement: str) -> list[Any]:
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as reader:
        rows = reader.execute(statement).fetchall()
    reader.close()
    return rows


def trained_in(path: Path) -> dict[WeightVersion, list[str]]:
    trained: dict[WeightVersion, list[str]] = {}
    for version, sample_id in rows_of(
        path,
        "SELECT trained_version, sample_id FROM samples WHERE state = 'trained'"
        " ORDER BY trained_version, group_id, sample_index",
    ):
        trained.setdefault(version, []).append(sample_id)
    return trained


def read_back(path: Path) -> Told:
    """What a ledger that lost its end says it was told; only that much can be known of it."""
    told = Told()
    for group_id, task, size, ended in rows_of(path, "SELECT group_id, task, size, ended FROM groups"):
        told.sizes[group_id], told.tasks[group_id] = size, task
        told.dropped |= {group_id} if ended in ("stale", "short") else set()
    for group_id, index, attempt, task, state, newest, trained in rows_of(
        path,
        "SELECT group_id, sample_index, attempt, task, state, newest_version, trained_version FROM samples",
    ):
        sample = Sample(group_id, index, attempt, task)
        told.attempts[sample.sample_id] = Attempt(sample, newest, trained, state == "failed")
    return told


def check_accounts(life: Life, num_versions: int) -> None:
    """Of a life that came to its end: every sample that any life admitted, and that counts, has one end."""
    options, path = life.options, life.ledger.path
    members: dict[tuple[int, int], list[tuple[int, str, str]]] = {}
    for group_id, index, attempt, state, reason in rows_of(
        path, "SELECT group_id, sample_index, attempt, state, reason FROM samples ORDER BY attempt"
    ):
        members.setdefault((group_id, index), []).append((attempt, state, reason))
    groups = rows_of(path, "SELECT group_id, task, size, ended, trained_version FROM groups")
    for group_id, _, size, ended, trained_version in groups:
        states = Counter[str]()
        for index in range(size):
            attempts = members.pop((group_id, index), [])
            assert [number for number, _, _ in attempts] == list(range(len(attempts)))
            assert all(state == "failed" for _, state, _ in attempts[:-1])
            states.update(state for _, state, _ in attempts[-1:])
            if attempts and attempts[-1][1] == "discarded":
                assert attempts[-1][2] == (ended or "the run ended")
        assert set(states) <= {"trained", "discarded", "failed"}
        assert (ended == "trained") == (trained_version is not None) == (states["trained"] > 0)
        if ended == "trained":
            assert states["discarded"] == 0
            assert states["trained"] == size or (options.short_groups == "train" and states["trained"] >= min(2, size))
    assert not members
    assert Counter(version for *_, version in groups if version is not None) == dict.fromkeys(
        range(num_versions), options.num_groups
    )
    in_ledger = trained_in(path)
    assert {v: sorted(ids) for v, ids in life.trained.items()} == {v: sorted(ids) for v, ids in in_ledger.items()}
    everything = [sample_id for ids in in_ledger.values() for sample_id in ids]
    assert len(everything) == len(set(everything))
    check_order(life, [(task, ended) for _, task, _, ended, _ in groups])


def check_order(life: Life, groups: Sequence[tuple[str, str]]) -> None:
    """No task was skipped, and none came twice but for a group that was too old."""
    cursor = life.core.scheduler.order.cursor()
    undisturbed = life.options.order()
    drawn = Counter(undisturbed.next() for _ in range(cursor["drawn"]))
    opened, stale = Counter(task for task, _ in groups), Counter(task for task, ended in groups if ended == "stale")
    assert opened + Counter(cursor["requeued"]) == drawn + stale


@st.composite
def life_options(draw: st.DrawFn) -> Options:
    group_size = draw(st.integers(1, 3))
    admission: Literal["sample", "group"] = draw(st.sampled_from(["sample", "group"]))
    short_groups: Literal["halt", "discard", "train"] = draw(st.sampled_from(["halt", "discard", "train"]))
    return Options(
        num_groups=draw(st.integers(1, 2)),
        group_size=group_size,
        max_staleness=draw(st.integers(0, 3)),
        concurrency=draw(st.integers(group_size, 8)),
        admission=admission,
        protect_after=draw(st.sampled_from([None, 0, 1])),
        short_groups=short_groups,
        limits=FailureLimits(10**6 if short_groups == "halt" else 2, 10**6),
        num_tasks=draw(st.integers(2, 5)),
    )


moments = st.one_of(
    st.tuples(st.just(""), st.integers(1, 130)),
    st.tuples(st.sampled_from(["drop", "committed", "train", "fail"]), st.integers(1, 4)),
)
kills = st.lists(
    st.tuples(moments, st.sampled_from(["none", "none", "lost", "header", "gone"]), st.booleans()),
    min_size=1,
    max_size=4,
)


@settings(max_examples=100, deadline=None)
@given(
    options=life_options(),
    kills=kills,
    seed=st.integers(0, 10**6),
    checkpoint_every=st.integers(1, 3),
    failure_rate=st.sampled_from([0.0, 0.15]),
)
def test_killed_at_any_moments_the_run_loses_nothing_scored_and_trains_nothing_twice(
    options: Options,
    kills: list[tuple[tuple[str, int], str, bool]],
    seed: int,
    checkpoint_every: int,
    failure_rate: float,
) -> None:
    num_versions = 5
    with tempfile.TemporaryDirectory() as root:
        rng = random.Random(seed)
        life = first_life(Path(root) / "0", options, rng, failure_rate)
        for number, (moment, damage, from_older) in enumerate(kills, 1):
            life.ledger.counted, life.ledger.fuse = moment
            ended = run_in(life.to_the_end(num_versions, checkpoint_every), "virtual")
            life.ledger.close()
            if ended:
                break
            life = successor(life, Path(root) / str(number), damage, from_older)
        else:
            assert run_in(life.to_the_end(num_versions, checkpoint_every), "virtual")
            life.ledger.close()
        check_accounts(life, num_versions)
