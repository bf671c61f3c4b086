"""Turn a composed config into a checked, ordered graph of stages. Pure: nothing is started or written.

Whatever can be known wrong about a run is found here, so that no run fails an hour in for a typo.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, cast

from pipelines.errors import ConfigError, Problem, did_you_mean
from pipelines.origin import Path, children, origin
from pipelines.rehearse import rehearse, rehearse_fault
from pipelines.schema import RunShell
from pipelines.signature import ALLOWED, TargetError, Where, check_tree, load

_SECRET_KEY = re.compile(r"(^|_)(api_?key|secret|password|access_token|auth_token)$")
_SECRET_VALUE = re.compile(r"\b(sk-|hf_|ghp_|gho_|dtn_|AKIA|xox[bp]-)[A-Za-z0-9_-]{16,}")


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """One stage, ready to be built: `run` is a plain dict for `hydra.utils.instantiate`, times in seconds."""

    name: str
    needs: tuple[str, ...]
    target: str
    run: Mapping[str, Any]
    nodes: int
    gpus_per_node: int
    cpus: float
    start_timeout_s: float
    stop_timeout_s: float
    call_timeout_s: float
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the component says about its options (`describe`): sizes, and under `starts` what it will start."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A graph that passed every check. `stages` is in the order of starting; `driver` names the one that runs."""

    stages: tuple[PlannedStage, ...]
    driver: str
    config: Mapping[str, Any]
    choices: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()
    """Knobs that cannot act under this config, and other things a check wants known."""
    fault: str = ""
    """What goes wrong on purpose, in words; empty if nothing does."""


def make_plan(
    config: Mapping[str, Any],
    raw: Mapping[str, Any] | None = None,
    *,
    choices: Mapping[str, str] | None = None,
    allowed: Collection[str] = ALLOWED,
) -> Plan:
    """Check the resolved `config` and order its stages. `raw` is the same config before references were followed.

    Raises `ConfigError` with every problem found. The functions that the config lists under `checks` are only asked
    once everything else holds, as `check(config) -> [{level, path, value, message, remedy}]` with level `error`,
    `inert` or `note`.
    """
    tree = dict(raw if raw is not None else config)

    def where(path: Path) -> str:
        return origin(tree, path)

    if secrets := list(_check_secrets(config, (), where)):
        raise ConfigError(secrets)  # alone, since other problems show values
    problems = list(_check_top(config))
    stages = cast(dict[str, Any], config["stages"])
    for name, stage in stages.items():
        problems += _check_stage(name, stage, stages, where, allowed)
    problems += _check_cluster(stages, config["cluster"], where)
    problems += check_tree(config["faults"], ("faults",), where, allowed)
    order = list(stages)
    try:
        known = {name: [need for need in stage["needs"] if need in stages] for name, stage in stages.items()}
        order = list(TopologicalSorter(known).static_order())
    except CycleError as error:
        cycle = " -> ".join(reversed(error.args[1]))
        problems.append(Problem("stages", cycle, "a cycle: none of these can start first; remove one of the needs"))
    if not problems:
        problems += _check_drivers(stages, allowed)
    fault = ""
    if not problems:
        fault, found = rehearse_fault(config["faults"], stages, where)
        problems += [*rehearse(stages), *found]
    if problems:
        raise ConfigError(problems)
    notes = _ask_checks(config, allowed)
    planned = tuple(_planned(name, stages[name], allowed) for name in order)
    driver = next(name for name in order if hasattr(load(stages[name]["run"]["_target_"], allowed), "run"))
    return Plan(planned, driver, config, dict(choices or {}), tuple(notes), fault)


def _check_top(config: Mapping[str, Any]) -> Iterator[Problem]:
    known = list(RunShell.__dataclass_fields__)
    for key in config:
        if key not in known:
            yield Problem(str(key), config[key], f"no such key; {did_you_mean(str(key), known)}")
    for key in known:
        if key not in config:
            yield Problem(key, "missing", "set it")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", str(config.get("name"))):
        yield Problem("name", config.get("name"), "names a folder: use letters, digits, '.', '_' and '-'")
    if config.get("steps", 1) < 1:
        yield Problem("steps", config["steps"], "must be at least 1")
    if config.get("seed", 0) < 0:
        yield Problem("seed", config["seed"], "must be at least 0")


def _check_secrets(node: Any, path: Path, where: Where) -> Iterator[Problem]:
    for key, child in children(node):
        if isinstance(child, str) and (_SECRET_VALUE.search(child) or (child and _SECRET_KEY.search(str(key)))):
            remedy = "looks like a secret; name the environment variable or the file that holds it instead"
            yield Problem(where((*path, key)), "(hidden)", remedy)
        yield from _check_secrets(child, (*path, key), where)


def _check_stage(
    name: str, stage: Mapping[str, Any], stages: Collection[str], where: Where, allowed: Collection[str]
) -> Iterator[Problem]:
    for position, need in enumerate(stage["needs"]):
        if need not in stages:
            others = [other for other in stages if other != name]
            path = where(("stages", name, "needs", position))
            yield Problem(path, need, f"no stage of that name; {did_you_mean(need, others)}")
    for key in ("start_timeout_s", "stop_timeout_s", "call_timeout_s"):
        if stage[key] <= 0:
            yield Problem(where(("stages", name, key)), stage[key], "must be above 0")
    resources = stage["resources"]
    for key, least in (("nodes", 1), ("gpus_per_node", 0), ("cpus", 0)):
        if resources[key] < least:
            yield Problem(where(("stages", name, "resources", key)), resources[key], f"must be at least {least}")
    path = ("stages", name, "run")
    if not isinstance(stage["run"], dict) or "_target_" not in stage["run"]:
        yield Problem(where(path), stage["run"], "must be a mapping with the _target_ of a component")
        return
    yield from check_tree(stage["run"], path, where, allowed, stage["needs"])
    yield from _check_component(stage["run"]["_target_"], (*path, "_target_"), where, allowed)


def _check_cluster(stages: Mapping[str, Any], cluster: Mapping[str, Any], where: Where) -> Iterator[Problem]:
    """Does what the stages ask for exist? A cluster is one machine; a stage that cannot be placed would wait."""
    if not 0 < cluster["stall_s"] <= cluster["heartbeat_timeout_s"] / 2:
        remedy = (
            f"give more than 0 and at most half of cluster.heartbeat_timeout_s = {cluster['heartbeat_timeout_s']:g}"
        )
        yield Problem(where(("cluster", "stall_s")), cluster["stall_s"], f"{remedy}: stacks are written before it ends")
    for name, stage in stages.items():
        if stage["resources"]["nodes"] > 1:
            remedy = "this cluster is one machine; give 1, or choose a larger cluster"
            yield Problem(where(("stages", name, "resources", "nodes")), stage["resources"]["nodes"], remedy)
    for key, unit, limit in (("gpus_per_node", "GPUs", "num_gpus"), ("cpus", "CPUs", "num_cpus")):
        wanted = {name: stage["resources"][key] for name, stage in stages.items()}
        if sum(wanted.values()) > cluster[limit]:
            name = max(wanted, key=lambda stage: wanted[stage])
            remedy = f"all stages together want {sum(wanted.values()):g} {unit} and cluster.{limit} is {cluster[limit]}"
            path = where(("stages", name, "resources", key))
            yield Problem(path, wanted[name], f"{remedy}; ask for less, or choose a larger cluster")


def _check_component(target: Any, path: Path, where: Where, allowed: Collection[str]) -> Iterator[Problem]:
    try:
        component = load(target, allowed)
    except TargetError:
        return  # told by check_tree
    for method in ("start", "stop", "status"):
        if not inspect.iscoroutinefunction(getattr(component, method, None)):
            yield Problem(where(path), target, f"is no stage: it has no 'async def {method}'")


def _check_drivers(stages: Mapping[str, Any], allowed: Collection[str]) -> Iterator[Problem]:
    drivers = [name for name, stage in stages.items() if hasattr(load(stage["run"]["_target_"], allowed), "run")]
    if len(drivers) != 1:
        found = ", ".join(drivers) or "none"
        yield Problem("stages", found, "exactly one stage must have a 'run' that drives the graph; choose a pipeline")
    for name, stage in stages.items():
        for need in stage["needs"]:
            if need in drivers:
                yield Problem(f"stages.{name}.needs", need, "drives the run, so no other stage may need it; remove it")


def _ask_checks(config: Mapping[str, Any], allowed: Collection[str]) -> list[str]:
    """Notes of the checks that the config lists. Raises `ConfigError` with the errors they found."""
    problems: list[Problem] = []
    notes: list[str] = []
    for position, name in enumerate(config["checks"]):
        try:
            findings = load(name, allowed)(config)
        except TargetError as error:
            problems.append(Problem(f"checks[{position}]", name, str(error)))
            continue
        for finding in findings:
            text = "; ".join(part for part in (finding["message"], finding.get("remedy", "")) if part)
            problem = Problem(finding["path"], finding["value"], text)
            if finding["level"] == "error":
                problems.append(problem)
            else:
                notes.append(("inert: " if finding["level"] == "inert" else "note: ") + problem.line)
    if problems:
        raise ConfigError(problems)
    return notes


def _planned(name: str, stage: Mapping[str, Any], allowed: Collection[str]) -> PlannedStage:
    run, resources = stage["run"], stage["resources"]
    target = load(run["_target_"], allowed)
    options = {key: value for key, value in run.items() if key != "_target_"}
    figures = dict(target.describe(options)) if hasattr(target, "describe") else _scalars(options)
    return PlannedStage(
        name=name,
        needs=tuple(stage["needs"]),
        target=run["_target_"],
        run=run,
        nodes=resources["nodes"],
        gpus_per_node=resources["gpus_per_node"],
        cpus=resources["cpus"],
        start_timeout_s=stage["start_timeout_s"],
        stop_timeout_s=stage["stop_timeout_s"],
        call_timeout_s=stage["call_timeout_s"],
        figures=figures,
    )


def _scalars(options: Mapping[str, Any]) -> dict[str, Any]:
    """The counts among the options: the sizes of a component that does not describe itself."""
    return {key: n for key, n in options.items() if isinstance(n, int) and not isinstance(n, bool) and key != "seed"}
