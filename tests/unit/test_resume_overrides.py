import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from composed import compose_config
from omegaconf import OmegaConf

from pipelines.errors import ConfigError
from pipelines.origin import resolve
from pipelines.result import config_hash
from pipelines.resume import check_resumed, resume_of, with_saved_overrides


def saved(run_dir: Path, *overrides: str) -> Path:
    """A run's folder with the overrides of its command line."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "overrides.json").write_text(json.dumps(overrides))
    return run_dir


def composed(run_dir: str, *overrides: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config of a command line, resolved and raw."""
    config = compose_config(*overrides)
    OmegaConf.update(config, "run_dir", run_dir)
    return resolve(config)


def wrote(run_dir: Path, *overrides: str) -> Path:
    """A run's folder with its resolved config."""
    run_dir.mkdir(parents=True)
    config, _ = composed(str(run_dir), *overrides)
    (run_dir / "resolved.yaml").write_text(yaml.safe_dump(config))
    return run_dir


def notes(run: Path, *overrides: str, multirun: bool = False) -> list[str]:
    config, raw = composed("/elsewhere/new", f"resume={run}", *overrides)
    return check_resumed(config, raw, multirun)


def problems(run: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        notes(run, *overrides)
    return str(refused.value).splitlines()


def test_the_overrides_of_the_run_come_before_those_that_are_given_now(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", "+experiment=smoke", "seed=3", "rollout=sync")
    words = ["--cfg", "job", f"resume={run}", "steps=9"]
    assert with_saved_overrides(words) == ["--cfg", "job", "+experiment=smoke", "seed=3", "rollout=sync", *words[2:]]
    assert with_saved_overrides([f"resume={run}/checkpoints/step-000004"])[:3] == [
        "+experiment=smoke",
        "seed=3",
        "rollout=sync",
    ]


def test_what_is_given_again_replaces_what_was_saved(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", "+experiment=smoke", "seed=3", "++rollout.num_groups=4", "~loss.kl", "name=a")
    words = [f"resume={run}", "+experiment=other", "rollout.num_groups=8", "loss.kl=0.1", "seed=4"]
    assert with_saved_overrides(words) == ["name=a", *words]


def test_what_belongs_to_one_launch_is_not_repeated_and_a_fault_does_not_come_again(tmp_path: Path) -> None:
    run = saved(
        tmp_path / "run",
        "run_dir=/there",
        "resume=older",
        "resume_changed=true",
        "plan_only=false",
        "faults=engine_crash",
        "faults.seed=3",
        "hydra.verbose=true",
        "hydra/job_logging=none",
        "resumed_name=kept",
    )
    assert with_saved_overrides([f"resume={run}"]) == ["resumed_name=kept", f"resume={run}"]


def test_a_chain_of_resumes_repeats_each_override_once(tmp_path: Path) -> None:
    first = saved(tmp_path / "first", "seed=3", "name=a")
    second = saved(tmp_path / "second", *with_saved_overrides([f"resume={first}", "seed=4"]))
    assert with_saved_overrides([f"resume={second}"]) == ["name=a", "seed=4", f"resume={second}"]


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["resume=a", "steps=3", "resume=b"], "b"),
        (["resume='a b'"], "a b"),
        (["++resume=a"], "a"),
        (["resume=null"], None),
        (["resume_changed=true", "data.resume=x"], None),
        ([], None),
    ],
)
def test_the_last_resume_of_a_command_line_counts(words: list[str], value: str | None) -> None:
    assert resume_of(words) == value


def test_a_command_line_that_resumes_nothing_or_a_run_without_overrides_is_left_alone(tmp_path: Path) -> None:
    for words in (["seed=3"], [], ["resume=null", "seed=3"], [f"resume={tmp_path}/missing", "seed=3"]):
        assert with_saved_overrides(words) == words


@pytest.mark.parametrize("content", ["[", '{"a": 1}', "[1]"])
def test_saved_overrides_that_cannot_be_read_are_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "overrides.json").write_text(content)
    with pytest.raises(ConfigError) as refused:
        with_saved_overrides([f"resume={tmp_path}"])
    (line,) = str(refused.value).splitlines()
    assert line.startswith("resume: ")
    assert "repeat the overrides of that run by hand" in line


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_a_sweep_cannot_resume(tmp_path: Path, flag: str) -> None:
    with pytest.raises(ConfigError, match="this is a sweep; leave out -m"):
        with_saved_overrides([flag, f"resume={tmp_path}", "seed=1,2"])
    with pytest.raises(ConfigError, match="this is a sweep; leave out -m"):
        notes(tmp_path, multirun=True)


def test_the_same_config_goes_on_wherever_it_writes_and_whatever_fault_there_was(tmp_path: Path) -> None:
    run = wrote(tmp_path / "run", "+experiment=smoke", "+faults.seed=3")
    assert notes(run, "+experiment=smoke") == []
    assert notes(run / "checkpoints/step-000001", "+experiment=smoke", "plan_only=true", "checks=[]") == []


def test_each_difference_is_one_line_under_the_key_that_the_user_changes(tmp_path: Path) -> None:
    run = wrote(tmp_path / "run", "rollout.num_groups=8", "loss=grpo")
    lines = problems(run, "rollout.num_groups=4", "steps=77", "+rollout.agent.extra=[1,2]")
    remedy = f"; differs from the config of {run}; take it back, or give resume_changed=true"
    assert sorted(lines) == sorted(
        [
            f"steps: 40 -> 77{remedy}",
            f"rollout.num_groups: 8 -> 4{remedy}",
            f"rollout.agent.extra: (absent) -> [1, 2]{remedy}",
        ]
    )


def test_many_differences_are_listed_up_to_a_limit_and_counted(tmp_path: Path) -> None:
    run = wrote(tmp_path / "run")
    lines = problems(run, *(f"+rollout.agent.x{n}=1" for n in range(50)))
    assert len(lines) == 21
    assert "30 more keys differ; give resume_changed=true" in lines[-1]


def test_a_number_of_another_type_and_a_list_of_another_length_are_differences(tmp_path: Path) -> None:
    run = wrote(tmp_path / "run", "+rollout.agent.x=1", "+rollout.agent.y=[1,2]")
    lines = problems(run, "+rollout.agent.x=1.0", "+rollout.agent.y=[1,2,3]")
    assert [line.partition(";")[0] for line in lines] == [
        "rollout.agent.x: 1 -> 1.0",
        "rollout.agent.y: [1, 2] -> [1, 2, 3]",
    ]


def test_a_change_that_is_wanted_is_noted(tmp_path: Path) -> None:
    run = wrote(tmp_path / "run")
    found = notes(run, "steps=77", "resume_changed=true")
    assert [text.partition(": ")[2] for text in found] == ["steps: 40 -> 77"]
    assert all(text.startswith("changed since ") for text in found)


def test_a_run_without_its_config_is_resumed_with_a_note_and_one_with_a_broken_one_is_not(tmp_path: Path) -> None:
    (note,) = notes(tmp_path)
    assert "it is not known whether the config has changed" in note
    (tmp_path / "resolved.yaml").write_text("{a: [")
    (line,) = problems(tmp_path)
    assert "resolved.yaml; cannot be read" in line


def test_the_hash_of_a_config_does_not_tell_what_it_goes_on_from() -> None:
    def hashed(*overrides: str) -> str:
        config: Mapping[str, Any] = composed("/new", *overrides)[0]
        return config_hash(config)

    assert hashed() == hashed("resume=runs/a", "resume_changed=true") == hashed("resume=runs/b")
    assert hashed() != hashed("seed=1")
