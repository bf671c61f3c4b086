"""The family about a background process: a script starts it, and the agent has to stop it."""

from __future__ import annotations

from sandbox_env.suites.minibench.draw import Draw
from sandbox_env.suites.minibench.exercise import Action, Check, kept, ok


def start_script(program: str, says: str) -> str:
    """A script that leaves a process called `program` behind, and its number in a file."""
    return (
        f"#!/bin/bash\n# Starts {program} in the background.\n"
        f"( exec -a {program} sleep 900 > /dev/null 2>&1 < /dev/null ) &\n"
        f"echo $! > {program}.pid\necho {says}\n"
    )


def stopped(program: str, script: str) -> tuple[Check, ...]:
    """`program` was started by `script`, and is not running."""
    return (
        Check(f"{program} was started", "started", (f"{program}.pid",)),
        Check(f"{program} is stopped", "stopped", (program, script)),
    )


def run_and_stop(draw: Draw) -> Action:
    """Start it, and stop it, in one command."""
    script, program = draw.file("sh"), draw.word()
    text = start_script(program, f"{program} runs")
    return Action(
        family="run-and-stop",
        subject=program,
        phrase=draw.pick(
            f"run {script}, then stop the process in {program}.pid",
            f"start {script} and kill the process whose number it writes to {program}.pid",
        ),
        files={script: text.encode()},
        turn=ok(f"bash {script} && kill $(cat {program}.pid)", f"{program} runs\n"),
        checks=(*stopped(program, script), kept(script, text)),
        mistakes=(
            ok(f"bash {script}", f"{program} runs\n"),
            ok(f"cat {script}", text),
            ok(f"bash {script} && rm {program}.pid", f"{program} runs\n"),
        ),
    )


ACTIONS = (run_and_stop,)
