"""The part of the Dockerfile language that a provider without Docker can follow: FROM, WORKDIR, COPY, ENV, RUN.

A task's `environment/Dockerfile` says what its sandbox holds. Everything else in the language is refused with the
file, the line and the remedy, since an instruction that is skipped gives a different task.
Source: Dockerfile reference, https://docs.docker.com/reference/dockerfile/
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

KNOWN = ("FROM", "WORKDIR", "COPY", "ENV", "RUN")
BASE_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
"""What images set before any line of a Dockerfile."""
OTHER_PROVIDER = "choose a provider that builds images, for example sandbox=daytona"


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy `sources`, relative to the environment folder, to the absolute `target`.

    `into_folder`: the target was written with a trailing slash, so it is a folder even if it does not exist.
    """

    sources: tuple[str, ...]
    target: str
    into_folder: bool
    where: str


@dataclass(frozen=True, slots=True)
class MakeFolder:
    """Make the absolute folder `path`, from WORKDIR."""

    path: str


@dataclass(frozen=True, slots=True)
class Run:
    """Run `argv` in `workdir` with `env` added to the base environment."""

    argv: tuple[str, ...]
    workdir: str
    env: Mapping[str, str]
    where: str


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """A parsed Dockerfile: its steps in order, and what holds at its end. `base` is the image that FROM names."""

    base: str
    steps: tuple[Copy | MakeFolder | Run, ...]
    env: Mapping[str, str]
    workdir: str


def parse_dockerfile(path: Path) -> Dockerfile:
    """Read a Dockerfile. Raises `ValueError`: `<file>:<line>: <instruction>; <remedy>`."""
    parser = _Parser(path)
    for line, instruction, rest in _instructions(path):
        parser.take(line, instruction, rest)
    return parser.result()


def _instructions(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line number, instruction in capitals, and the rest, with continued lines joined and comments left out."""
    parts: list[str] = []
    first = 0
    for number, raw in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if re.match(r"#\s*escape\s*=", raw, re.IGNORECASE):
            raise ValueError(f"{path}:{number}: {raw.strip()}; continue lines with a backslash")
        # A comment or an empty line inside a continued instruction does not end it.
        if raw.lstrip().startswith("#") or not raw.strip():
            continue
        first = first or number
        text = raw.rstrip()
        parts.append(text.removesuffix("\\"))
        if not text.endswith("\\"):
            yield first, *_split("".join(parts))
            parts, first = [], 0
    if parts:
        yield first, *_split("".join(parts))


def _split(text: str) -> tuple[str, str]:
    word, _, rest = text.strip().partition(" ")
    return word.upper(), rest.strip()


class _Parser:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._line = 0
        self._base = ""
        self._steps: list[Copy | MakeFolder | Run] = []
        self._env: dict[str, str] = {}
        self._workdir = "/"

    def take(self, line: int, instruction: str, rest: str) -> None:
        self._line = line
        if instruction not in KNOWN:
            raise self._error(
                instruction, f"only {', '.join(KNOWN)} are built without Docker: remove it or {OTHER_PROVIDER}"
            )
        if not self._base and instruction != "FROM":
            raise self._error(instruction, "a Dockerfile starts with FROM")
        if not rest:
            raise self._error(instruction, "its arguments are missing")
        if instruction in ("COPY", "RUN") and re.search(r"(?:^|\s)\d*<<-?[\"']?[A-Za-z_]", rest):
            raise self._error(f"{instruction} <<", "write the lines into a file of the environment folder and copy it")
        {"FROM": self._from, "WORKDIR": self._enter, "COPY": self._copy, "ENV": self._set, "RUN": self._run}[
            instruction
        ](rest)

    def result(self) -> Dockerfile:
        if not self._base:
            raise ValueError(f"{self._path}:1: no FROM; a Dockerfile starts with FROM")
        return Dockerfile(self._base, tuple(self._steps), dict(self._env), self._workdir)

    def _from(self, rest: str) -> None:
        words = [word for word in rest.split() if not word.startswith("--platform=")]
        if self._base:
            raise self._error(f"FROM {rest}", f"only one stage is built without Docker: remove it or {OTHER_PROVIDER}")
        if not words or words[0].startswith("--") or "$" in words[0]:
            raise self._error(f"FROM {rest}", "name the image itself")
        self._base = words[0]

    def _enter(self, rest: str) -> None:
        self._workdir = self._absolute(self._expand(_unquote(rest)))
        self._steps.append(MakeFolder(self._workdir))

    def _copy(self, rest: str) -> None:
        if rest.startswith("--"):
            raise self._error(
                f"COPY {rest.split()[0]}", f"copy without options (the mode of the file is kept) or {OTHER_PROVIDER}"
            )
        words = [self._expand(word) for word in self._words(rest)]
        if len(words) < 2:
            raise self._error(f"COPY {rest}", "name a source and a target")
        *sources, target = words
        for source in sources:
            if any(mark in source for mark in "*?["):
                raise self._error(f"COPY {source}", "name the files or their folder, without wildcards")
            if ".." in PurePosixPath(source).parts:
                raise self._error(f"COPY {source}", "copy from within the environment folder")
        into_folder = target.endswith(("/", "/.")) or target == "." or len(sources) > 1
        names = tuple(source.lstrip("/") or "." for source in sources)
        self._steps.append(Copy(names, self._absolute(target), into_folder, f"{self._path}:{self._line}"))

    def _set(self, rest: str) -> None:
        if "\\$" in rest or re.search(r"'[^']*\$[^']*'", rest):
            raise self._error(f"ENV {rest}", "a literal $ is not understood here: set it in a script that is copied")
        name, _, value = rest.partition(" ")
        if "=" not in name:  # the old form: ENV NAME value with spaces
            self._env[name] = self._expand(value.strip())
            return
        # Docker takes the values from before the instruction for all of its pairs.
        pairs = [word.partition("=") for word in self._words(rest)]
        self._env |= {key: self._expand(text) for key, _, text in pairs}

    def _run(self, rest: str) -> None:
        if rest.startswith("--"):
            raise self._error(f"RUN {rest.split()[0]}", f"run without options or {OTHER_PROVIDER}")
        argv = self._json_words(rest)
        if argv is None:
            argv = ["/bin/sh", "-c", rest]
        elif not argv[0].startswith("/"):
            argv = ["/bin/sh", "-c", shlex.join(argv)]
        self._steps.append(Run(tuple(argv), self._workdir, dict(self._env), f"{self._path}:{self._line}"))

    def _words(self, rest: str) -> list[str]:
        words = self._json_words(rest)
        if words is not None:
            return words
        try:
            return shlex.split(rest)
        except ValueError as error:
            raise self._error(rest, f"{error}: close the quotes") from None

    def _json_words(self, rest: str) -> list[str] | None:
        if not rest.startswith("["):
            return None
        try:
            words = json.loads(rest)
        except ValueError:
            return None
        return [str(word) for word in words] or None

    def _expand(self, text: str) -> str:
        """Fill in `$NAME` and `${NAME}` from the ENV lines so far."""

        def value_of(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            if name not in self._env and name not in BASE_ENV:
                raise self._error(f"${name}", "set it with ENV before it is used")
            return self._env.get(name) or BASE_ENV.get(name, "")

        expanded = re.sub(r"\$(?:\{(\w+)\}|(\w+))", value_of, text)
        if "${" in text and re.search(r"\$\{\w*[^\w}]", text):
            raise self._error(text, "use plain ${NAME}, without a default")
        return expanded

    def _absolute(self, path: str) -> str:
        joined = PurePosixPath(self._workdir, path)
        if ".." in joined.parts:
            raise self._error(path, "write the path without '..'")
        return str(joined)

    def _error(self, what: str, remedy: str) -> ValueError:
        return ValueError(f"{self._path}:{self._line}: {what}; {remedy}")


def _unquote(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
