"""The suite minibench: its tasks, splits, cache and demonstrations."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shutil
from collections import Counter
from multiprocessing.queues import Queue
from pathlib import Path

import pytest

from sandbox_env.suites.minibench import writer
from sandbox_env.suites.minibench.compose import HELD_OUT_COMPOSITIONS
from sandbox_env.suites.minibench.demonstrations import draw_demonstrations
from sandbox_env.suites.minibench.draw import WORDS
from sandbox_env.suites.minibench.exercise import Exercise
from sandbox_env.suites.minibench.plan import ACTIONS, AREAS, make_plan
from sandbox_env.suites.minibench.suite import Minibench
from sandbox_env.task import Task, require_supported, task_digest, task_set_hash


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Minibench:
    return Minibench(str(tmp_path_factory.mktemp("minibench")))


def pairs_of(exercises: tuple[Exercise, ...]) -> set[frozenset[str]]:
    return {frozenset(exercise.actions) for exercise in exercises if len(exercise.actions) == 2}


def names_of(tasks: list[Task]) -> set[str]:
    return {task.name for task in tasks}


def test_there_are_89_tasks_in_disjoint_splits_and_8_of_them_are_the_narrow_set(suite: Minibench):
    sizes = {split: len(names_of(suite.tasks(split))) for split in suite.splits()}
    assert sizes == {"train69": 69, "eval20": 20, "train8": 8, "all": 89}
    train, evaluation = names_of(suite.tasks("train69")), names_of(suite.tasks("eval20"))
    assert not train & evaluation
    assert train | evaluation == names_of(suite.tasks("all"))
    assert names_of(suite.tasks("train8")) < train


def test_an_unknown_split_is_an_error_that_names_the_known_ones(suite: Minibench):
    with pytest.raises(ValueError, match="'train70'; minibench has the splits train69, eval20, train8, all"):
        suite.tasks("train70")


def test_every_task_is_a_whole_harbor_task_that_can_run(suite: Minibench):
    for task in suite.tasks("all"):
        require_supported(task)
        assert task.workdir == "/app"
        assert "unknown_keys" not in task.metadata["harbor"]
        assert (task.path / "solution" / "solve.sh").stat().st_mode & 0o111
        for line in (task.path / "environment" / "Dockerfile").read_text().splitlines():
            assert line.split()[0] in ("FROM", "WORKDIR", "COPY")


@pytest.mark.parametrize("seed", range(4))
def test_no_instruction_of_eval_is_in_train_and_its_pairs_are_held_out(seed: int):
    plan = make_plan(seed)
    instructions = [exercise.instruction for exercise in (*plan.train, *plan.evaluation)]
    assert len(set(instructions)) == 89
    assert len({exercise.name for exercise in (*plan.train, *plan.evaluation)}) == 89
    assert len(pairs_of(plan.evaluation)) >= 2
    assert pairs_of(plan.evaluation) <= set(HELD_OUT_COMPOSITIONS)
    assert len(pairs_of(plan.train)) >= 8
    assert not pairs_of(plan.train) & set(HELD_OUT_COMPOSITIONS)


def test_train_has_every_action_and_many_tasks_that_need_several_turns():
    plan = make_plan(0)
    assert {exercise.family for exercise in plan.train} >= set(ACTIONS)
    assert len(AREAS) >= 8
    assert len({exercise.family for exercise in plan.train}) >= 12
    turns = Counter(len(exercise.turns) for exercise in plan.train)
    assert turns[2] >= 8
    assert turns[3] >= 1
    assert sum(len(exercise.turns) > 1 for exercise in plan.evaluation) >= 4


def test_the_narrow_set_is_mostly_long_repetitive_tasks():
    families = Counter(exercise.family for exercise in make_plan(0).narrow)
    assert families["repeat-word"] == 6
    assert len(families) == 3


def test_tasks_are_small_enough_for_a_small_policy():
    plan = make_plan(0)
    for exercise in (*plan.train, *plan.evaluation):
        assert len(exercise.instruction.split()) <= 25
        assert all(len(turn.observation) <= 200 and "\n" not in turn.command for turn in exercise.turns)
        assert all(content.count(b"\n") <= 12 for name, content in exercise.files.items() if name.endswith(".txt"))
        if exercise.family != "repeat-word":
            assert all(len(turn.command.split()) <= 16 for turn in exercise.turns)


def test_no_word_is_part_of_another_so_that_grep_finds_only_what_it_should():
    assert len(set(WORDS)) == 96
    assert not [pair for pair in itertools.permutations(WORDS, 2) if pair[0] in pair[1]]


def test_names_in_a_wrong_place_are_not_in_the_instruction_of_a_look():
    for exercise in make_plan(0).train:
        if exercise.family in ("note-file", "note-word", "find-kind", "find-word", "git-switch"):
            answer = exercise.turns[0].observation.split()
            last = exercise.turns[-1].command
            assert any(word in last and word not in exercise.instruction for word in answer), exercise.name


def test_the_same_seed_gives_the_same_tasks_and_another_seed_others(tmp_path: Path, suite: Minibench):
    again = Minibench(str(tmp_path / "again"))
    other = Minibench(str(tmp_path / "other"), seed=1)
    assert task_set_hash(again.tasks("all")) == task_set_hash(suite.tasks("all"))
    assert task_set_hash(other.tasks("all")) != task_set_hash(suite.tasks("all"))


def test_the_umask_of_the_user_does_not_change_the_tasks(tmp_path: Path, suite: Minibench):
    before = os.umask(0o077)
    try:
        private = Minibench(str(tmp_path)).tasks("train8")
    finally:
        os.umask(before)
    assert task_set_hash(private) == task_set_hash(suite.tasks("train8"))


@pytest.mark.parametrize("damage", ["task", "file", "content", "manifest", "extra", "link"])
def test_a_torn_cache_is_written_again(tmp_path: Path, damage: str):
    whole = Minibench(str(tmp_path))
    wanted, folder = task_set_hash(whole.tasks("all")), whole.folder
    victim = sorted(folder.iterdir())[3]
    if damage == "task":
        shutil.rmtree(victim)
    elif damage == "file":
        (victim / "tests" / "test.sh").unlink()
    elif damage == "content":
        (victim / "instruction.md").write_text("")
    elif damage == "manifest":
        (folder / writer.MANIFEST).write_text("{")
    elif damage == "extra":
        (folder / "stray").mkdir()
    else:
        shutil.rmtree(folder)
        folder.symlink_to(tmp_path / "nowhere")
    assert task_set_hash(Minibench(str(tmp_path)).tasks("all")) == wanted
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == [folder.name]


def write_in_process(root: str, hashes: Queue[str]) -> None:
    hashes.put(task_set_hash(Minibench(root).tasks("all")))


def test_two_processes_that_start_at_once_get_the_same_whole_suite(tmp_path: Path, suite: Minibench):
    context = multiprocessing.get_context("fork")
    hashes = context.Queue()
    workers = [context.Process(target=write_in_process, args=(str(tmp_path), hashes)) for _ in range(2)]
    for worker in workers:
        worker.start()
    found = {hashes.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join(timeout=60)
    assert found == {task_set_hash(suite.tasks("all"))}


def test_a_lock_that_is_never_given_back_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writer, "LOCK_TIMEOUT_S", 0.1)
    with (
        writer._locked(tmp_path / ".lock"),
        pytest.raises(TimeoutError, match="end the process that holds it"),
    ):
        Minibench(str(tmp_path)).tasks("all")


def test_demonstrations_are_deterministic_and_as_often_mistaken_as_asked(suite: Minibench):
    first = suite.demonstrations(2000, seed=3, mistake_rate=0.3)
    assert list(first) == list(suite.demonstrations(2000, seed=3, mistake_rate=0.3))
    assert list(first) != list(suite.demonstrations(2000, seed=4, mistake_rate=0.3))
    assert 0.25 < sum(demonstration.mistaken for demonstration in first) / 2000 < 0.35
    assert not any(demonstration.mistaken for demonstration in suite.demonstrations(200, seed=3, mistake_rate=0.0))


def test_demonstrations_show_every_family_but_no_task_and_no_held_out_pair(suite: Minibench):
    plan = make_plan(0)
    taken = {exercise.instruction for exercise in (*plan.train, *plan.evaluation)}
    drawn = list(draw_demonstrations(4000, seed=0, mistake_rate=0.3, exclude=taken))
    assert not taken & {demonstration.instruction for _, demonstration in drawn}
    families = {demonstration.family for _, demonstration in drawn}
    held_out = {exercise.family for exercise in plan.evaluation if len(exercise.actions) == 2}
    assert {exercise.family for exercise in (*plan.train, *plan.evaluation)} - held_out <= families
    assert not held_out & families
    pairs = pairs_of(tuple(exercise for exercise, _ in drawn))
    assert not pairs & set(HELD_OUT_COMPOSITIONS)
    assert len(pairs) >= 90
    assert [demonstration for _, demonstration in drawn] == suite.demonstrations(4000, seed=0, mistake_rate=0.3)


def test_a_mistake_is_never_the_right_way_and_there_are_several_for_each_family():
    kinds: dict[str, set[int]] = {}
    for exercise, _ in draw_demonstrations(1500, seed=1, mistake_rate=1.0, exclude=set()):
        kinds.setdefault(exercise.family, set()).update(range(len(exercise.mistakes)))
        assert exercise.turns not in exercise.mistakes
        assert len(set(exercise.mistakes)) == len(exercise.mistakes)
    assert min(len(found) for found in kinds.values()) >= 3


@pytest.mark.parametrize(("count", "rate"), [(-1, 0.0), (1, -0.1), (1, 1.1), (1, float("nan"))])
def test_demonstrations_refuse_what_makes_no_sense(suite: Minibench, count: int, rate: float):
    with pytest.raises(ValueError, match="demonstrations: "):
        suite.demonstrations(count, seed=0, mistake_rate=rate)


def test_the_manifest_names_what_is_on_disk(suite: Minibench):
    manifest = json.loads((suite.folder / writer.MANIFEST).read_text())
    assert {name: task_digest(suite.folder / name) for name in manifest} == manifest
