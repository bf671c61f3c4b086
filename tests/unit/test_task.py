"""Reading of tasks in Harbor format."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sandbox_env.task import load_task, load_tasks, require_supported, resolve_env, task_digest, task_set_hash
from sandbox_env.task_toml import dockerfile_workdir

DOCKERFILE = "FROM debian:bookworm-slim\nWORKDIR /srv\n"


def make_task(folder: Path, toml: str = "", dockerfile: str = DOCKERFILE) -> Path:
    for name, content in {
        "task.toml": toml,
        "instruction.md": "Sort the names.\n",
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "true\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def test_an_empty_task_toml_gives_the_defaults_of_the_format(tmp_path: Path):
    task = load_task(make_task(tmp_path / "names"))
    assert (task.name, task.instruction, task.workdir) == ("names", "Sort the names.", "/srv")
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.cpus) == (600.0, 600.0, 1.0)
    assert (task.memory_mb, task.storage_mb, task.docker_image, dict(task.env)) == (2048, 10240, None, {})
    assert task.metadata["harbor"]["schema_version"] == "1.4"
    assert task.metadata["harbor"]["network_mode"] == "public"


def test_every_key_of_a_modern_task_arrives(tmp_path: Path):
    toml = """
    schema_version = "1.1"
    [task]
    name = "org/names"
    [metadata]
    difficulty = "easy"
    [agent]
    timeout_sec = 900
    [verifier]
    timeout_sec = 12.5
    env = {KEY = "${KEY}"}
    [environment]
    docker_image = "org/names:1"
    cpus = 2
    memory_mb = 4096
    storage_mb = 512
    workdir = "/data"
    network_mode = "no-network"
    env = {LANG = "C"}
    [environment.healthcheck]
    command = "true"
    """
    task = load_task(make_task(tmp_path / "names", toml))
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.cpus) == (900.0, 12.5, 2.0)
    assert (task.memory_mb, task.storage_mb, task.workdir, task.docker_image) == (4096, 512, "/data", "org/names:1")
    assert dict(task.env) == {"LANG": "C"}
    assert task.metadata["difficulty"] == "easy"
    harbor = task.metadata["harbor"]
    assert harbor["task"] == {"name": "org/names"}
    assert harbor["verifier_env"] == {"KEY": "${KEY}"}
    assert harbor["healthcheck"] == {"command": "true"}
    assert harbor["network_mode"] == "no-network"
    assert "unknown_keys" not in harbor


def test_the_older_keys_mean_the_same(tmp_path: Path):
    toml = """
    version = "1.0"
    [environment]
    memory = "2G"
    storage = "512M"
    allow_internet = false
    """
    task = load_task(make_task(tmp_path / "old", toml))
    assert (task.memory_mb, task.storage_mb) == (2048, 512)
    assert task.metadata["harbor"]["schema_version"] == "1.0"
    assert task.metadata["harbor"]["network_mode"] == "no-network"


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ('schema_version = "9.0"', "schema_version: '9.0'; use one of"),
        ("[agent]\ntimeout_sec = 0", "agent.timeout_sec: 0; write a finite number above 0"),
        ("[agent]\ntimeout_sec = true", "agent.timeout_sec: True; write"),
        ("[verifier]\ntimeout_sec = inf", "verifier.timeout_sec: inf; write"),
        ('[verifier]\nenvironment_mode = "own"', "verifier.environment_mode: 'own'; use one of shared, separate"),
        ("[environment]\nmemory_mb = 1.5", "environment.memory_mb: 1.5; write a whole number"),
        ('[environment]\nmemory = "lots"', "environment.memory: 'lots'; write a size like"),
        ('[environment]\nmemory = "1G"\nmemory_mb = 2048', "it disagrees with memory_mb = 2048"),
        ("[environment]\ngpus = -1", "environment.gpus: -1; write a whole number"),
        ('[environment]\nworkdir = "app"', "environment.workdir: 'app'; use an absolute path"),
        ('[environment]\nnetwork_mode = "some"', "environment.network_mode: 'some'; use one of public"),
        ('[environment]\nnetwork_mode = "public"\nallow_internet = false', "environment.allow_internet: False; it dis"),
        ("[environment]\nenv = {PORT = 80}", "environment.env.PORT: 80; write a string"),
        ("[environment]\ndocker_image = 3", "environment.docker_image: 3; write a non-empty string"),
        ('environment = "big"', "environment: 'big'; write a table, [environment]"),
        ("steps = 3", "steps: 3; write an array of tables"),
        ("[agent\n", "not valid TOML"),
    ],
)
def test_a_fault_names_file_key_value_and_remedy(tmp_path: Path, toml: str, said: str):
    folder = make_task(tmp_path / "bad", toml)
    with pytest.raises(ValueError, match=r"task\.toml") as caught:
        load_task(folder)
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(folder / "task.toml"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", ["task.toml", "instruction.md", "tests/test.sh"])
def test_a_missing_part_is_named(tmp_path: Path, part: str):
    folder = make_task(tmp_path / "bad")
    (folder / part).unlink()
    with pytest.raises(ValueError, match=f"{part}: missing"):
        load_task(folder)


def test_unknown_keys_are_kept_and_listed(tmp_path: Path):
    task = load_task(make_task(tmp_path / "new", "[agent]\nmood = 1\n[future]\nx = 1"))
    assert task.metadata["harbor"]["unknown_keys"] == ["future", "agent.mood"]


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[environment]\ngpus = 1", "environment.gpus: 1"),
        ('[[steps]]\nname = "one"', "steps: 1"),
        ('[verifier]\nenvironment_mode = "separate"', "verifier.environment_mode: 'separate'"),
    ],
)
def test_what_we_cannot_run_is_read_and_refused_at_use(tmp_path: Path, toml: str, said: str):
    task = load_task(make_task(tmp_path / "other", toml))
    with pytest.raises(ValueError, match="leave this task out") as caught:
        require_supported(task)
    assert said in str(caught.value)


def test_a_multi_step_task_keeps_its_parts_elsewhere_and_can_still_be_read(tmp_path: Path):
    folder = make_task(tmp_path / "steps", '[[steps]]\nname = "one"')
    (folder / "instruction.md").unlink()
    (folder / "tests" / "test.sh").unlink()
    assert load_task(folder).metadata["harbor"]["steps"] == [{"name": "one"}]


def test_a_task_without_dockerfile_and_image_is_refused_at_use(tmp_path: Path):
    folder = make_task(tmp_path / "bare")
    require_supported(load_task(folder))
    (folder / "environment" / "Dockerfile").unlink()
    with pytest.raises(ValueError, match="neither a Dockerfile nor a docker_image"):
        require_supported(load_task(folder))


@pytest.mark.parametrize(
    ("dockerfile", "workdir"),
    [
        ("FROM a\nRUN true\n", None),
        ("FROM a\nWORKDIR /one\nworkdir /two\n", "/two"),
        ("FROM a\nWORKDIR /one\n# WORKDIR /no\nWORKDIR two\n", "/one/two"),
        ("FROM a AS base\nWORKDIR /one\nFROM b\nRUN true\n", None),
        ("FROM a AS base\nWORKDIR /one\nFROM base\nRUN true\n", "/one"),
        ("FROM a\nENV HOME_DIR=/home/x B=2\nWORKDIR ${HOME_DIR}/sub\n", "/home/x/sub"),
        ("FROM a\nENV HOME_DIR /home/x\nWORKDIR $HOME_DIR\n", "/home/x"),
        ('FROM a\nRUN true && \\\n  WORKDIR /no\nWORKDIR "/yes"\n', "/yes"),
    ],
)
def test_the_workdir_is_where_the_dockerfile_ends(tmp_path: Path, dockerfile: str, workdir: str | None):
    (tmp_path / "Dockerfile").write_text(dockerfile)
    assert dockerfile_workdir(tmp_path / "Dockerfile") == workdir


def test_a_workdir_that_only_docker_can_know_is_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match=r"WORKDIR: '\$WHERE'; set environment.workdir"):
        load_task(make_task(tmp_path / "x", "", "FROM a\nWORKDIR $WHERE\n"))


def test_the_digest_sees_content_names_and_exec_bits_but_not_the_place(tmp_path: Path):
    first, second = make_task(tmp_path / "a" / "names"), make_task(tmp_path / "b" / "names")
    same = task_digest(first)
    assert task_digest(second) == same
    (second / "tests" / "test.sh").chmod(0o755)
    assert task_digest(second) != same
    (second / "tests" / "test.sh").chmod(0o600)
    assert task_digest(second) == same
    (second / "solution" / "solve.sh").rename(second / "solution" / "solve2.sh")
    assert task_digest(second) != same
    (first / "instruction.md").write_text("Sort the names!\n")
    assert task_digest(first) != same


def test_a_link_in_a_task_counts_by_its_target_and_is_not_followed(tmp_path: Path):
    folder = make_task(tmp_path / "names")
    (folder / "link").symlink_to("one")
    first = task_digest(folder)
    (folder / "link").unlink()
    (folder / "link").symlink_to("two")
    assert task_digest(folder) != first


def test_the_hash_of_a_set_ignores_order_and_sees_every_task(tmp_path: Path):
    for name in ("one", "two", "three"):
        make_task(tmp_path / name)
    tasks = load_tasks(tmp_path)
    assert [task.name for task in tasks] == ["one", "three", "two"]
    assert task_set_hash(tasks) == task_set_hash(tasks[::-1])
    assert task_set_hash(tasks) != task_set_hash(tasks[:2])
    renamed = dataclasses.replace(tasks[0], name="four")
    assert task_set_hash([renamed, *tasks[1:]]) != task_set_hash(tasks)


def test_a_folder_without_tasks_is_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match="no task in it"):
        load_tasks(tmp_path)


def test_variables_are_resolved_at_use_and_never_stored(tmp_path: Path):
    toml = """
    [environment]
    env = {A = "${SECRET}", B = "x-${MISSING:-none}-y", C = "plain", D = "${EMPTY:-full}"}
    [solution]
    env = {E = "${SECRET}"}
    """
    task = load_task(make_task(tmp_path / "env", toml))
    assert task.env["A"] == "${SECRET}"
    environ = {"SECRET": "s", "EMPTY": ""}
    assert resolve_env(task, environ) == {"A": "s", "B": "x-none-y", "C": "plain", "D": "full"}
    assert resolve_env(task, environ, table="solution") == {"E": "s"}
    with pytest.raises(ValueError, match=r"environment.env: \$\{SECRET\}; set the variable SECRET"):
        resolve_env(task, {})
