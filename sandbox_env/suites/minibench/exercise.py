"""What a generated exercise is: the world at the start, how it is done, how it goes wrong, how it is scored.

    Action      one command that a person may ask for; the families of `files.py`, `text.py`, ... build these
    Exercise    a whole task: one action, two actions in a row, or a look at the world and then an action

Everything is computed by the generator: the text that each command prints and the content that each check expects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sandbox_env.suites.base import DemoTurn
from sandbox_env.suites.minibench.draw import Draw

BASE_IMAGE = "debian:bookworm-slim"
SCM_IMAGE = "buildpack-deps:bookworm-scm"
"""Debian bookworm with git: for the tasks that need it."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of test.sh: a function of its prelude, the arguments, and what its passing shows."""

    name: str
    function: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Action:
    """One command and all that belongs to it. `phrase` is the request in lower case, without a full stop.

    `mistakes` are wrong commands with what they print; none of them passes `checks`. `files` maps names to content.
    """

    family: str
    subject: str
    phrase: str
    files: Mapping[str, bytes]
    turn: DemoTurn
    checks: tuple[Check, ...]
    mistakes: tuple[DemoTurn, ...]
    image: str = BASE_IMAGE


@dataclass(frozen=True, slots=True)
class Exercise:
    """One task before it is written. `turns` solve it; each of `mistakes` is a whole attempt that does not."""

    family: str
    subject: str
    instruction: str
    files: Mapping[str, bytes]
    turns: tuple[DemoTurn, ...]
    checks: tuple[Check, ...]
    mistakes: tuple[tuple[DemoTurn, ...], ...]
    image: str = BASE_IMAGE
    actions: tuple[str, ...] = field(default=())
    """Families of the actions in it, in order."""

    @property
    def name(self) -> str:
        """Name of the task, such as `count-lines-kastel`."""
        return f"{self.family}-{self.subject}"


ActionBuilder = Callable[[Draw], Action]


def sentence(phrase: str) -> str:
    """The phrase as a sentence."""
    return f"{phrase[0].upper()}{phrase[1:]}."


def single(action: Action) -> Exercise:
    """The exercise that asks for this one action."""
    return Exercise(
        family=action.family,
        subject=action.subject,
        instruction=sentence(action.phrase),
        files=action.files,
        turns=(action.turn,),
        checks=action.checks,
        mistakes=tuple((mistake,) for mistake in action.mistakes),
        image=action.image,
        actions=(action.family,),
    )


def holds(path: str, text: str) -> Check:
    """The regular file `path` has this content; its last newline is optional."""
    return Check(f"{path} holds what was asked for", "holds", (path, text.removesuffix("\n")))


def kept(path: str, text: str) -> Check:
    """The regular file `path` is as it was."""
    return Check(f"{path} is unchanged", "holds", (path, text.removesuffix("\n")))


def absent(path: str) -> Check:
    """There is nothing called `path`."""
    return Check(f"{path} is gone", "absent", (path,))


def folder(path: str) -> Check:
    """`path` is a folder and no link."""
    return Check(f"{path} is a folder", "folder", (path,))


def mode(path: str, pattern: str, meaning: str) -> Check:
    """The octal mode of `path` matches the shell pattern."""
    return Check(f"{path} {meaning}", "mode", (path, pattern))


def ok(command: str, output: str = "") -> DemoTurn:
    """A command that succeeds."""
    return DemoTurn(command, output)


def bad_option(command: str, exit_code: int = 1) -> DemoTurn:
    """A command of coreutils whose second word is an option that its program does not have."""
    program, option = command.split()[:2]
    text = f"{program}: invalid option -- '{option[1]}'\nTry '{program} --help' for more information.\n"
    return DemoTurn(command, text, exit_code)


def not_found(command: str, message: str, path: str, exit_code: int = 1) -> DemoTurn:
    """A command that fails because `path` does not exist; `message` is what stands before the name."""
    return DemoTurn(command, f"{message}{path}: No such file or directory\n", exit_code)


def no_source(program: str, source: str, target: str) -> DemoTurn:
    """`cp` or `mv` from a name that is not there."""
    text = f"{program}: cannot stat '{source}': No such file or directory\n"
    return DemoTurn(f"{program} {source} {target}", text, 1)
