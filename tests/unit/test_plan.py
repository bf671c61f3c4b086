import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_run import ALLOWED, small_config, small_plan, stage

from pipelines.errors import ConfigError
from pipelines.plan import make_plan
from pipelines.plan_text import plain

Change = Callable[[dict[str, Any]], Any]


def source(config: dict[str, Any]) -> dict[str, Any]:
    return config["stages"]["source"]["run"]


def lines(change: Change, tmp_path: Path) -> list[str]:
    config = small_config(tmp_path)
    change(config)
    with pytest.raises(ConfigError) as caught:
        make_plan(config, allowed=ALLOWED)
    return str(caught.value).splitlines()


def test_stages_are_ordered_by_their_needs_and_the_one_that_runs_drives(tmp_path: Path):
    plan = small_plan(tmp_path)
    assert [stage.name for stage in plan.stages] == ["source", "worker"]
    assert plan.driver == "worker"
    assert plan.stages[1].needs == ("source",)


def test_planning_changes_nothing(tmp_path: Path):
    config = small_config(tmp_path)
    before = copy.deepcopy(config)
    make_plan(config, allowed=ALLOWED)
    assert config == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda c: source(c).update(frist=2),
            "stages.source.run.frist: 2; Source takes no 'frist'; did you mean 'first'?",
        ),
        (lambda c: source(c).pop("diary"), "stages.source.run.diary: missing; Source needs it; set it"),
        (lambda c: source(c).update(first="abc"), "stages.source.run.first: abc; must be a whole number"),
        (
            lambda c: source(c).update(first="5"),
            "stages.source.run.first: 5; must be a whole number; write it without quotes",
        ),
        (lambda c: source(c).update(first=True), "stages.source.run.first: true; must be a whole number"),
        (lambda c: source(c).update(first=1.5), "stages.source.run.first: 1.5; must be a whole number"),
        (lambda c: source(c).update(first=None), "stages.source.run.first: null; must be a whole number"),
        (lambda c: source(c).update(step="fast"), "stages.source.run.step: fast; must be a number"),
        (lambda c: source(c).update(label=3), "stages.source.run.label: 3; must be text or null"),
        (
            lambda c: source(c).update(order="upp"),
            "stages.source.run.order: upp; must be one of up, down; did you mean 'up'?",
        ),
        (
            lambda c: source(c).update(sizes=3),
            "stages.source.run.sizes: 3; must be a list, each a whole number or null",
        ),
        (lambda c: source(c).update(sizes=[1, "b"]), "stages.source.run.sizes[1]: b; must be a whole number"),
        (lambda c: source(c).update(options={"a": "b"}), "stages.source.run.options.a: b; must be a whole number"),
        (
            lambda c: source(c).update(shape="square"),
            "stages.source.run.shape: square; must be a Shape, given by its _target_ or null",
        ),
        (
            lambda c: source(c).update(shape={"_target_": "tests.small_stages.NoShape"}),
            "stages.source.run.shape._target_: tests.small_stages.NoShape; is no Shape: it has no 'area'; "
            "name a class that has",
        ),
        (
            lambda c: source(c).update(shape={"_target_": "tests.small_stages.Square", "side": "a"}),
            "stages.source.run.shape.side: a; must be a number",
        ),
        (
            lambda c: source(c).update(shape={"_target_": "os.system", "command": "true"}),
            "stages.source.run.shape._target_: os.system; is outside tests.small_stages.; add a wrapper class there",
        ),
        (
            lambda c: source(c).update(_target_="tests.small_stages.Sauce"),
            "stages.source.run._target_: tests.small_stages.Sauce; no such name in tests.small_stages; "
            "did you mean 'Source'?",
        ),
        (
            lambda c: source(c).update(_target_="tests.small_stages.NoShape"),
            "stages.source.run._target_: tests.small_stages.NoShape; is no stage: it has no 'async def start'",
        ),
        (
            lambda c: c["stages"]["worker"].update(needs=["sauce"]),
            "stages.worker.needs[0]: sauce; no stage of that name; did you mean 'source'?",
        ),
        (
            lambda c: c["stages"]["source"].update(needs=["worker"]),
            "stages: worker -> source -> worker; a cycle: none of these can start first; remove one of the needs",
        ),
        (
            lambda c: c["stages"]["source"].update(run={"first": 3}),
            "stages.source.run: {'first': 3}; must be a mapping with the _target_ of a component",
        ),
        (
            lambda c: c["stages"]["worker"]["run"].update(source=3),
            "stages.worker.run.source: 3; is also a need of this stage, which gives 'source'; remove one",
        ),
        (
            lambda c: c["stages"].update(other=stage("Worker", ("source",), steps=1, diary="x")),
            "stages: worker, other; exactly one stage must have a 'run' that drives the graph; choose a pipeline",
        ),
        (
            lambda c: c["stages"]["worker"].update(call_timeout_s=0),
            "stages.worker.call_timeout_s: 0; must be above 0",
        ),
        (
            lambda c: c["stages"]["worker"]["resources"].update(gpus_per_node=2),
            "stages.worker.resources.gpus_per_node: 2; all stages together want 2 GPUs and cluster.num_gpus is 0; "
            "ask for less, or choose a larger cluster",
        ),
        (
            lambda c: c["stages"]["worker"]["resources"].update(nodes=2),
            "stages.worker.resources.nodes: 2; this cluster is one machine; give 1, or choose a larger cluster",
        ),
        (
            lambda c: c["cluster"].update(stall_s=4),
            "cluster.stall_s: 4; give more than 0 and at most half of cluster.heartbeat_timeout_s = 6: stacks are "
            "written before it ends",
        ),
        (
            lambda c: c.update(faults={"_target_": "tests.small_stages.Limp", "stage": "sauce"}),
            "faults.stage: sauce; no stage of that name; did you mean 'source'?",
        ),
        (
            lambda c: c.update(faults={"_target_": "tests.small_stages.Limp", "stap": 1}),
            "faults.stap: 1; Limp takes no 'stap'; did you mean 'step'?",
        ),
        (
            lambda c: c.update(faults={"_target_": "tests.small_stages.NoShape"}),
            "faults: tests.small_stages.NoShape; 'NoShape' object has no attribute 'stage'",
        ),
        (lambda c: c.update(steps=0), "steps: 0; must be at least 1"),
        (lambda c: c.update(seed=-1), "seed: -1; must be at least 0"),
        (lambda c: c.update(name="a/b"), "name: a/b; names a folder: use letters, digits, '.', '_' and '-'"),
        (lambda c: c.update(sead=1), "sead: 1; no such key; did you mean 'seed'?"),
        (lambda c: c.pop("steps"), "steps: missing; set it"),
        (
            lambda c: c["model"].update(api_key="abc"),
            "model.api_key: (hidden); looks like a secret; name the environment variable or the file that holds it "
            "instead",
        ),
        (
            lambda c: c.update(checks=["tests.small_stages.look"]),
            "checks[0]: tests.small_stages.look; no such name in tests.small_stages; have Limp, NoShape, "
            "Shape, Source, Square, Worker, die_with_parent, ends_by_a_deadline, find_colour, "
            "sleeps_in_the_loop",
        ),
    ],
)
def test_each_mistake_gives_one_line_with_path_value_and_remedy(change: Change, line: str, tmp_path: Path):
    assert line in lines(change, tmp_path)


def test_all_mistakes_are_told_at_once(tmp_path: Path):
    def change(config: dict[str, Any]) -> None:
        config["steps"] = 0
        source(config).update(first="abc", frist=1)

    assert len(lines(change, tmp_path)) == 3


def test_values_that_fit_their_annotations_pass(tmp_path: Path):
    config = small_config(tmp_path)
    source(config).update(first=2, step=3, label=None, order="down", sizes=[1, 2], options={"a": 1})
    source(config)["shape"] = {"_target_": "tests.small_stages.Square", "side": 2}
    assert make_plan(config, allowed=ALLOWED).stages[0].figures == {"first": 2, "starts": "1 child process"}


def test_the_key_named_is_the_one_that_the_user_can_change(tmp_path: Path):
    config = small_config(tmp_path)
    source(config).update(first="abc", shape={"_target_": "tests.small_stages.Square", "side": "b"}, step="fast")
    raw = copy.deepcopy(config)
    raw["stages"]["source"]["run"] = "${rollout}"
    raw["rollout"] = {**source(config), "shape": "${model.shape}", "step": "${..seed}"}
    raw["model"] = {"shape": {"_target_": "tests.small_stages.Square", "side": "b"}}
    with pytest.raises(ConfigError) as caught:
        make_plan(config, raw, allowed=ALLOWED)
    assert str(caught.value).splitlines() == [
        "rollout.first: abc; must be a whole number",
        "seed: fast; must be a number",
        "model.shape.side: b; must be a number",
    ]


def test_a_check_can_refuse_a_config_and_can_note_knobs_that_do_nothing(tmp_path: Path):
    config = small_config(tmp_path)
    config["checks"] = ["tests.small_stages.find_colour"]
    config["model"] = {"colour": "blue"}
    assert make_plan(config, allowed=ALLOWED).notes == ("inert: model.colour: blue; colours do nothing; leave it out",)
    config["model"] = {"colour": "red"}
    with pytest.raises(ConfigError, match=r"^model\.colour: red; too bright; give blue$"):
        make_plan(config, allowed=ALLOWED)


def test_the_text_of_a_plan_names_stages_sizes_what_starts_and_where_outputs_go(tmp_path: Path):
    text = plain(small_plan(tmp_path))
    assert text.index("\nsource ") < text.index("\nworker ")
    for part in ("tests.small_stages.Worker", "steps 3", "source: 1 child process", "2 stage processes", "result.json"):
        assert part in text
    assert f"outputs {tmp_path}/" in text


def test_a_fault_is_told_in_the_plan_and_none_is_not(tmp_path: Path):
    config = small_config(tmp_path)
    assert "on purpose" not in plain(make_plan(config, allowed=ALLOWED))
    config["faults"] = {"_target_": "tests.small_stages.Limp", "step": -2.0}
    text = plain(make_plan(config, allowed=ALLOWED))
    assert "\na fault acts on purpose in stage 'source': Limp (step -2.0)\n" in text
    config["faults"]["stage"] = ""
    assert make_plan(config, allowed=ALLOWED).fault == ""
