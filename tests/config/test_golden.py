"""Every experiment composes and plans, and resolves to exactly what is committed: a changed default shows in a diff."""

import difflib
from pathlib import Path

import pytest
import yaml
from composed import EXPERIMENTS, compose_config

from pipelines.origin import resolve
from pipelines.plan import make_plan
from pipelines.plan_text import plain

GOLDEN = Path(__file__).parent / "golden"
UPDATE = "python -m pytest tests/config --update-golden"


def test_there_is_a_golden_config_for_the_default_and_each_experiment_and_no_other():
    assert sorted(path.stem for path in GOLDEN.glob("*.yaml")) == sorted(["default", *EXPERIMENTS]), f"run: {UPDATE}"


@pytest.mark.parametrize("name", ["default", *EXPERIMENTS])
def test_a_config_resolves_to_what_is_committed(name: str, request: pytest.FixtureRequest):
    resolved, _ = resolve(compose_config(*([] if name == "default" else [f"+experiment={name}"])))
    path, now = GOLDEN / f"{name}.yaml", yaml.safe_dump(resolved, sort_keys=False)
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(now)
    changes = "\n".join(difflib.unified_diff(path.read_text().splitlines(), now.splitlines(), lineterm="", n=2))
    assert not changes, f"a default changed; if that is meant, run: {UPDATE}\n{changes}"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_plans(name: str):
    plan = make_plan(*resolve(compose_config(f"+experiment={name}")))
    assert plan.driver == "trainer"
    assert plan.config["name"] == name


def test_the_default_plans_the_whole_graph():
    plan = make_plan(*resolve(compose_config()))
    assert [stage.name for stage in plan.stages] == ["data", "sandboxes", "fleet", "eval", "rollout", "trainer"]
    assert plan.driver == "trainer"
    text = plain(plan)
    for part in (
        "train train69, 69 tasks; eval eval20, 20 tasks",
        "batch 8 tasks x 8 episodes = 64; in flight 32; max_staleness 3",
        "sandboxes: at most 64 sandboxes at once, by LocalProvider",
        "fleet: 1 x EmbeddedEngine on cpu, 1 router",
        "inert: loss.clip_low, loss.clip_high: (0.2, 0.28); with one optimizer step per batch",
    ):
        assert part in text


def test_the_default_trains_on_the_wide_set_and_tests_on_other_tasks():
    config, _ = resolve(compose_config())
    assert (config["dataset"]["train"], config["dataset"]["train_size"]) == ("train69", 69)
    assert (config["dataset"]["eval"], config["dataset"]["eval_size"]) == ("eval20", 20)


@pytest.mark.parametrize(
    "overrides",
    [["dataset=train8"], ["rollout=sync"], ["loss=gspo"], ["loss=rloo"], ["loss=reinforce_pp"], ["loss=cispo"]],
)
def test_other_options_plan_too(overrides: list[str]):
    assert make_plan(*resolve(compose_config(*overrides))).stages
