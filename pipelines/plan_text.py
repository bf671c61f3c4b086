"""A plan for people: the graph in order, its sizes, what would be started, and where the outputs go."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipelines.errors import show
from pipelines.plan import Plan, PlannedStage

_FILE_WIDTH = 120
_OUTPUTS = "result.json metrics.jsonl report.html log.txt resolved.yaml plan.txt episodes/ checkpoints/ tensorboard/"


def render(plan: Plan) -> RenderableType:
    """The plan as something rich can print."""
    return Group(*_parts(plan))


def plain(plan: Plan) -> str:
    """The plan as plain text, for `plan.txt`."""
    file = io.StringIO()
    Console(file=file, width=_FILE_WIDTH, color_system=None, force_terminal=False).print(render(plan))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def _parts(plan: Plan) -> Iterator[RenderableType]:
    config = plan.config
    yield Text(f"{config['name']}  seed {config['seed']}  steps {config['steps']}", style="bold")
    if plan.choices:
        yield Text("choices  " + "  ".join(f"{group}={option}" for group, option in plan.choices.items()))
    yield Text()
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("stage", "needs", "component", "resources", "sizes"):
        table.add_column(heading, overflow="fold")
    for stage in plan.stages:
        sizes = "  ".join(f"{key} {show(value)}" for key, value in stage.figures.items() if key != "starts")
        table.add_row(stage.name, " ".join(stage.needs) or "-", stage.target, _resources(stage), sizes)
    yield table
    yield Text()
    yield Text("would start, in this order, and stop in reverse:", style="bold")
    yield Text(
        f"  a private Ray on loopback with {config['cluster']['num_cpus']} CPUs, {len(plan.stages)} stage processes"
    )
    for stage in plan.stages:
        if "starts" in stage.figures:
            yield Text(f"  {stage.name}: {stage.figures['starts']}")
    yield Text(f"the run ends when '{plan.driver}' is done")
    if plan.notes:
        yield Text()
        yield from (Text(note, style="yellow") for note in plan.notes)
    yield Text()
    yield Text(f"outputs  {config['run_dir']}/")
    yield Text(f"         {_OUTPUTS}")


def _resources(stage: PlannedStage) -> str:
    gpus = f" x {stage.gpus_per_node} GPU" if stage.gpus_per_node else ""
    return f"{stage.nodes} node{'s' if stage.nodes > 1 else ''}{gpus}, {stage.cpus:g} CPU"
