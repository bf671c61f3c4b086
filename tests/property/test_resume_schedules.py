"""Runs that are killed anywhere, several times in a row, and go on: the real collector, scheduler and ledger."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import shutil
import sqlite3
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import INFRA_FAILURES, Options, staleness_of, written_by

from miles_rl.rollout.collector import Collector, PlayedSample
from miles_rl.rollout.groups import Sample
from miles_rl.rollout.ledger import LEDGER_FILE, Ledger, LedgerError, Resumed
from miles_rl.rollout.ledger_schema import RUN_ENDED
from miles_rl.rollout.scheduler import FailureLimits
from miles_rl.types import Outcome, WeightVersion
from pipelines.ledger.consistency import check

STEPS = 6
FAST_DISK = next((path for path in (Path("/dev/shm"),) if path.is_dir()), None)


class RunEnded(Exception):
    """The process is no more."""


class MortalLedger(Ledger):
    """A ledger whose process is killed at a given write: in the middle of a transaction, before or after its commit.

    What is left are copies of its files as they lie then, in `grave`.
    """

    writes_left, after_drop = -1, 0

    def kill_at(self, end: End, grave: Path) -> None:
        self.writes_left, self.after_drop, self.grave = end.num_writes, end.after_drop, grave

    def written(self) -> None:
        if self.writes_left == 1:
            self.grave.mkdir()
            for file in self.path.parent.glob(LEDGER_FILE + "*"):
                shutil.copy(file, self.grave)
        self.writes_left -= self.writes_left > 0
        if self.writes_left == 0:
            raise RunEnded

    def drop(self, group_id: int, reason: str, cursor: Mapping[str, Any]) -> None:
        super().drop(group_id, reason, cursor)
        if self.after_drop:
            self.writes_left, self.after_drop = min(self.writes_left, self.after_drop), 0
            self.written()

    def _move(self, *args: Any, **columns: Any) -> None:
        super()._move(*args, **columns)
        self.written()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with super()._transaction():
            yield
            self.written()
        self.written()


@dataclass(slots=True)
class End:
    """How a run ends: at which write, whether it could say so, and what then happens to its ledger.

    With `after_drop` it is at that write after a group was dropped, if one is before: those moments are rare.
    """

    num_writes: int
    after_drop: int
    stopped: bool
    damage: str


@dataclass(slots=True)
class Run:
    """A run's folder and what is left there: its complete checkpoints, and after its end its ledger.

    `batches`: the samples that were trained at each version, by it or by the runs that it goes on from.
    """

    folder: Path
    batches: dict[WeightVersion, list[str]]
    checkpoints: list[WeightVersion] = field(default_factory=list[WeightVersion])

    @property
    def grave(self) -> Path:
        return self.folder / "grave"

    def checkpoint(self, version: WeightVersion) -> Path:
        return self.folder / f"step-{version:06d}"

    def damage(self, kind: str) -> None:
        ledger = self.grave / LEDGER_FILE
        if kind == "removed":
            ledger.unlink()
        elif kind == "overwritten":
            ledger.write_bytes(bytes(100) + ledger.read_bytes()[100:])
            for log in self.grave.glob(LEDGER_FILE + "-*"):
                log.unlink()


@dataclass(slots=True, kw_only=True)
class Lineage:
    """The runs that went on from one another, and what must be true of them."""

    options: Options
    rng: random.Random
    failure_rate: float
    keep: int
    folder: Path
    runs: list[Run] = field(default_factory=list[Run])
    wrote: defaultdict[str, list[list[WeightVersion]]] = field(default_factory=lambda: defaultdict(list))
    """Versions of the tokens of each sample, for every time that it was scored."""
    over: set[str] = field(default_factory=set[str])
    """Samples that must not run again: what the resumed ledger says has ended."""
    engine_version: Callable[[], WeightVersion] = int

    def go_on(self, end: End | None) -> bool:
        """One process: from the newest checkpoint there is, or the start, to `end`. Whether it came to its own end."""
        ledger, resumed, version, batches = self._resumed()
        run = Run(ledger.path.parent, batches)
        self.runs.append(run)
        if end is not None and not end.stopped:
            ledger.kill_at(end, run.grave)
        try:
            asyncio.run(self._train(run, ledger, resumed, version, end))
            ended = None
        except RunEnded:
            ended = end
        ledger.close()
        if not run.grave.exists():
            run.grave.mkdir()
            shutil.copy(ledger.path, run.grave)
        assert check(run.grave / LEDGER_FILE) == [], "the ledger is consistent at any moment"
        self._check_order(run.grave / LEDGER_FILE)
        if ended is not None:
            run.damage(ended.damage)
        return ended is None

    def _resumed(self) -> tuple[MortalLedger, Resumed, WeightVersion, dict[WeightVersion, list[str]]]:
        path = self.folder / f"run-{len(self.runs)}" / LEDGER_FILE
        earlier = next((run for run in reversed(self.runs) if run.checkpoints), None)
        if earlier is None:
            self.over = set()
            return MortalLedger(path), Resumed(), 0, {}
        version = self.rng.choice(earlier.checkpoints)
        sources = [earlier.grave / LEDGER_FILE, earlier.checkpoint(version) / LEDGER_FILE]
        with contextlib.suppress(LedgerError):
            Ledger.resume(sources[:1], self.folder / "killed-meanwhile" / LEDGER_FILE, version)[0].close()
        before = next(rows for rows in map(rows_of, sources) if rows is not None)
        ledger, resumed = MortalLedger.resume(sources, path, version)
        states = {str(sample_id): str(state) for sample_id, state, *_ in rows_of(path) or []}
        assert states == {str(row[0]): turned_back(row, version) for row in before}
        assert check(path) == []
        self.over = {sample_id for sample_id, state in states.items() if state != "leased"}
        assert isinstance(ledger, MortalLedger)
        return ledger, resumed, version, {v: ids for v, ids in earlier.batches.items() if v < version}

    async def _train(
        self, run: Run, ledger: MortalLedger, resumed: Resumed, version: WeightVersion, end: End | None
    ) -> None:
        """The training loop, as far as the rollouts see it."""
        scheduler = self.options.scheduler(
            order=self.options.order(**resumed.cursor),
            version=version,
            groups=resumed.groups,
            next_group_id=resumed.next_group_id,
        )
        scheduler.count_earlier(resumed.failures, resumed.stale_by_task, resumed.trained_by_task)
        collector = Collector(scheduler, ledger, self._play, batch_timeout_s=30, stop_timeout_s=30)
        self.engine_version = lambda: scheduler.engine_version
        collector.start()
        if not any(earlier.checkpoints for earlier in self.runs):
            self._checkpoint(run, ledger, version)
        while version < STEPS:
            batch = await collector.next_batch()
            assert batch.version == version
            assert len({group.group_id for group in batch.groups}) == self.options.num_groups
            for trajectory in batch.trajectories:
                assert trajectory.versions.tolist()[1:] in self.wrote[trajectory.sample_id], "it is what was played"
                assert staleness_of(trajectory, version) <= self.options.max_staleness
            run.batches[version] = [t.sample_id for t in batch.trajectories]
            await self._some_time()
            version += 1
            collector.published(version)
            await self._some_time()
            if self.rng.random() < 0.6:
                self._checkpoint(run, ledger, version)
            if end is not None and end.stopped and version > end.num_writes % STEPS:
                break
        await collector.finish()
        if version < STEPS:
            raise RunEnded

    def _checkpoint(self, run: Run, ledger: MortalLedger, version: WeightVersion) -> None:
        folder = run.checkpoint(version)
        folder.mkdir()
        ledger.save(folder)
        ledger.written()
        run.checkpoints = [*run.checkpoints, version][-self.keep :]
        ledger.written()
        ledger.committed(version, run.checkpoints)

    async def _play(self, sample: Sample, on_ready: Callable[[str], None]) -> PlayedSample:
        """Every turn of the event loop, a token by the weights of that moment; two tasks take far longer."""
        assert sample.sample_id not in self.over, f"{sample.sample_id} had ended, and runs again"
        await self._some_time()
        on_ready(f"box-{sample.sample_id}")
        versions = [self.engine_version()]
        for _ in range(self.rng.randint(*((20, 80) if sample.task in ("t0", "t1") else (0, 3)))):
            await asyncio.sleep(0)
            versions.append(self.engine_version())
        if self.rng.random() < self.failure_rate:
            return PlayedSample(self.rng.choice(INFRA_FAILURES), detail="injected")
        self.over.add(sample.sample_id)
        self.wrote[sample.sample_id].append(versions)
        return PlayedSample(Outcome.SCORED, written_by(sample, versions))

    async def _some_time(self) -> None:
        for _ in range(self.rng.randint(0, 8)):
            await asyncio.sleep(0)

    def check_end(self) -> None:
        """What the surviving lineage trained."""
        ledger, batches = self.runs[-1].grave / LEDGER_FILE, self.runs[-1].batches
        with contextlib.closing(sqlite3.connect(ledger)) as database:
            trained = database.execute(
                "SELECT trained_version, sample_id FROM samples WHERE state = 'trained'"
            ).fetchall()
            sizes = dict(
                database.execute("SELECT trained_version, COUNT(*) FROM groups WHERE ended = 'trained' GROUP BY 1")
            )
        assert sorted(trained) == sorted((version, name) for version, names in batches.items() for name in names)
        assert sizes == dict.fromkeys(range(STEPS), self.options.num_groups)
        names = [name for batch in batches.values() for name in batch]
        assert len(names) == len(set(names)), "nothing is trained twice"

    def _check_order(self, ledger: Path) -> None:
        """Which tasks the groups are of, at any moment: the undisturbed order, and what was too old once more."""
        with contextlib.closing(sqlite3.connect(ledger)) as database:
            opened = [task for (task,) in database.execute("SELECT task FROM groups ORDER BY group_id")]
            again = Counter(task for (task,) in database.execute("SELECT task FROM groups WHERE ended = 'stale'"))
            cursor = {key: json.loads(value) for key, value in database.execute("SELECT key, value FROM cursor")}
        assert follows_the_order(opened, self.options, again)
        order = self.options.order()
        drawn = Counter(order.next() for _ in range(cursor.get("drawn", 0)))
        assert Counter(opened) + Counter(cursor.get("requeued", ())) == drawn + again, "no task is lost"


def follows_the_order(opened: list[str], options: Options, again: Counter[str]) -> bool:
    """Whether `opened` is the undisturbed order with some tasks of `again` put in between, each used up."""
    order = options.order()
    fresh = [order.next() for _ in opened]
    starts = {0}
    """How many of `fresh` may have been drawn so far; the others were queued again."""
    for number, task in enumerate(opened):
        starts = {s + 1 for s in starts if fresh[s] == task} | starts
        starts = {s for s in starts if Counter(opened[: number + 1]) - Counter(fresh[:s]) <= again}
        starts = {s for s in starts if s <= number + 1 and Counter(fresh[:s]) <= Counter(opened[: number + 1])}
    return bool(starts)


def rows_of(path: Path) -> list[tuple[object, ...]] | None:
    """Id, state, reason, newest version, end of the group and version that trained it; None if it cannot be read."""
    if not path.is_file():
        return None
    try:
        with contextlib.closing(sqlite3.connect(path)) as database:
            return database.execute(
                "SELECT sample_id, state, reason, newest_version, ended, g.trained_version"
                " FROM samples JOIN groups g USING (group_id)"
            ).fetchall()
    except sqlite3.DatabaseError:
        return None


def turned_back(row: tuple[object, ...], version: WeightVersion) -> str:
    """The state that a sample must have after a resume to the checkpoint of `version`, in plain words."""
    _, state, reason, newest, ended, trained = row
    group_is_wanted = ended == "" or (ended == "trained" and trained >= version)  # type: ignore[operator]
    if not group_is_wanted or state == "failed" or (state == "discarded" and reason != RUN_ENDED):
        return str(state)
    return "scored" if newest is not None and newest <= version else "leased"  # type: ignore[operator]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("miles_rl.rollout.collector")
    logger.disabled = True
    yield
    logger.disabled = False


ENDS = st.builds(
    End,
    num_writes=st.integers(1, 150),
    after_drop=st.integers(0, 4),
    stopped=st.sampled_from([False, False, False, True]),
    damage=st.sampled_from(["none", "none", "none", "removed", "overwritten"]),
)
OPTIONS = st.builds(
    Options,
    num_groups=st.integers(1, 3),
    group_size=st.integers(1, 3),
    max_staleness=st.integers(0, 3),
    concurrency=st.integers(3, 12),
    admission=st.sampled_from(["sample", "group"]),
    protect_after=st.sampled_from([None, 0, 1, 2]),
    short_groups=st.sampled_from(["discard", "train"]),
    limits=st.sampled_from([FailureLimits(2, 10**6), FailureLimits(10**6, 10**6)]),
    num_tasks=st.integers(1, 6),
    seed=st.integers(0, 100),
)


@settings(max_examples=300, deadline=None)
@given(
    options=OPTIONS,
    ends=st.lists(ENDS, min_size=1, max_size=5),
    seed=st.integers(0, 10**6),
    failure_rate=st.sampled_from([0.0, 0.1, 0.3]),
    keep=st.integers(1, 3),
)
def test_whenever_it_is_killed_and_however_often_a_run_goes_on_without_losing_or_repeating_what_was_trained(
    options: Options, ends: list[End], seed: int, failure_rate: float, keep: int
) -> None:
    with tempfile.TemporaryDirectory(dir=FAST_DISK) as folder:
        lineage = Lineage(
            options=options, rng=random.Random(seed), failure_rate=failure_rate, keep=keep, folder=Path(folder)
        )
        for end in [*ends, None]:
            if lineage.go_on(end):
                break
        lineage.check_end()
