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
_OUTPUTS = (
    "result.json metrics.jsonl report.html ledger.sqlite log.txt resolved.yaml plan.txt episodes/ checkpoints/"
    " tensorboard/"
)


def render(plan: Plan) -> RenderableType:
    """The plan as something rich can print."""
    return Group(*_parts(plan))


def show_plan(plan: Plan) -> None:
    """Print the plan, plain where the output is no terminal."""
    console = Console()
    if console.is_terminal:
        console.print(render(plan))
    else:
        print(plain(plan), end="")


def plain(plan: Plan) -> str:
    """The plan as plain text, for `plan.txt`."""
    file = io.StringIO()
    Console(file=file, width=_FILE_WIDTH, color_system=None, force_terminal=False).print(render(plan))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def _parts(plan: Plan) -> Iterator[RenderableType]:
    config = plan.config
    yield Text(f"{config['name']}  seed {config['seed']}  steps {config['steps']}", style="bold")
    if plan.choices:
        yield Text("  ".join(f"{group}={option}" for group, option in sorted(plan.choices.items())))
    yield Text()
    yield _graph(plan)
    cpus = config["cluster"]["num_cpus"]
    yield Text("would start in this order, and stop in reverse:", style="bold")
    yield Text(f"  a private Ray on loopback with {cpus} CPUs, and in it {len(plan.stages)} stage processes")
    for stage in plan.stages:
        if "starts" in stage.figures:
            yield Text(f"  {stage.name}: {stage.figures['starts']}")
    yield Text(f"  the run ends when {plan.driver} is done")
    if plan.fault:
        yield Text()
        yield Text(plan.fault, style="bold red")
    if plan.notes:
        yield Text()
        yield from (Text(note, style="yellow") for note in plan.notes)
    yield Text()
    yield Text.assemble(("outputs ", "bold"), f"{config['run_dir']}/")
    yield Text(f"  {_OUTPUTS}")


def _graph(plan: Plan) -> Table:
    """A row for each stage: its component, what it needs and takes, its sizes."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for stage in plan.stages:
        sizes = "; ".join(f"{key} {show(value)}" for key, value in stage.figures.items() if key != "starts")
        needs = ", ".join(stage.needs) or "nothing"
        table.add_row(stage.name, f"{stage.target}")
        table.add_row("", f"needs {needs}; takes {_resources(stage)}")
        if sizes:
            table.add_row("", sizes)
        table.add_row()
    return table


def _resources(stage: PlannedStage) -> str:
    nodes = f"{stage.nodes} nodes with each " if stage.nodes > 1 else ""
    gpus = f"{stage.gpus_per_node} GPU, " if stage.gpus_per_node else ""
    return f"{nodes}{gpus}{stage.cpus:g} CPU"
