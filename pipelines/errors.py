"""Errors of a config, each as one line that says what to change: `<config path>: <value>; <remedy>`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to change in a config: the key as the user can write it, its value, and what to do."""

    path: str
    value: Any
    remedy: str

    @property
    def line(self) -> str:
        """The problem in one line."""
        return f"{self.path}: {show(self.value)}; {self.remedy}"


class ConfigError(Exception):
    """The config cannot run. Nothing was started."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple({problem.line: problem for problem in problems}.values())
        super().__init__("\n".join(problem.line for problem in self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


def show(value: Any) -> str:
    """`value` as a person writes it in YAML, in one line of bounded length."""
    if value is None:
        text = "null"
    elif isinstance(value, bool):
        text = str(value).lower()
    else:
        text = str(value)
    text = " ".join(text.split()) or "''"
    return text if len(text) <= 80 else text[:77] + "..."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A remedy that names the nearest of `known`, or all of them if none is near."""
    known = sorted(set(known))
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean '{near[0]}'?"
    return f"have {', '.join(known)}" if known else "there are none"


def explain(error: Exception, overrides: Sequence[str]) -> Problem | None:
    """What a person should change after `error`, raised by Hydra while it composed; None if it is not about config."""
    if isinstance(error, ConfigError):
        return None
    if isinstance(error, MissingConfigException):
        return _unknown_option(error)
    if isinstance(error, OverrideParseException):
        detail = [line for line in str(error).splitlines() if not line.startswith(("Error parsing", "See "))]
        return Problem("command line", error.override, f"not of the form key=value ({'; '.join(detail)})")
    if isinstance(error, OSError) and error.filename:
        reason = (error.strerror or "it cannot be made").lower()
        return Problem("run_dir", error.filename, f"{reason}: give a folder that can be written")
    if isinstance(error, YAMLError):
        mark = getattr(error, "problem_mark", None)
        where = f"{mark.name}, line {mark.line + 1}" if mark is not None else "conf"
        return Problem(where, getattr(error, "problem", None) or "unreadable", "correct the YAML")
    cause = error if isinstance(error, OmegaConfBaseException) else (error.__cause__ or error.__context__)
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return _wrong_key_or_value(error, cause, overrides)
    if isinstance(error, HydraException | OmegaConfBaseException):
        return _composition(str(error), overrides)
    if isinstance(error, ValueError) and str(error).startswith("Config group override must be"):
        bad = next((o for o in overrides if o.endswith("=null")), overrides[-1] if overrides else "")
        key, _, value = bad.partition("=")
        return Problem(key, value, "name one option of the group")
    return None


def _unknown_option(error: MissingConfigException) -> Problem:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    known = list(error.options or [])
    if not group or not known:
        return Problem(group or "conf", option, "no such group or option")
    hint = did_you_mean(option, known)
    choices = "" if hint.startswith("have") else f" (have {', '.join(sorted(known))})"
    return Problem(group, option, f"no such option of {group}{choices}; {hint}")


_TYPES = {
    "to Integer": "must be a whole number",
    "to Float": "must be a number",
    "a valid bool": "must be true or false",
    "is not Optional": "must not be null",
    "is not a ListConfig": "must be a list, like [a,b]",
    "Unsupported interpolation type": "must be a plain value here",
}


def _wrong_key_or_value(error: Exception, cause: OmegaConfBaseException, overrides: Sequence[str]) -> Problem:
    path, message = str(cause.full_key), str(cause).splitlines()[0]
    value = _given(error, path, overrides)
    if "Interpolation key" in message or "resolving interpolation" in message:
        return Problem(path, value, message)
    if "Missing mandatory value" in message:
        return Problem(path, "???", "has no value; set it")
    if re.search(r"Key '.*' (not in|is not in struct)", message):
        parent: Any = cause.parent_node
        known = [str(key) for key in parent] if hasattr(parent, "keys") else []
        known = [key for key in known if key != "hydra" and not key.startswith("_")]
        stage = re.match(r"(stages\.\w+\.run)\.", path)
        if stage and not known:  # Hydra does not follow the reference that stands there
            return Problem(path, value, f"{stage[1]} is taken from a group; write GROUP.{cause.key} instead")
        return Problem(path, value, f"no such key; {did_you_mean(str(cause.key), known)}")
    remedy = next((text for mark, text in _TYPES.items() if mark in message), message)
    return Problem(path, cause.value if cause.value is not None else value, remedy)


def _given(error: Exception, path: str, overrides: Sequence[str]) -> str:
    """The value that the user gave for `path`, or the file that did."""
    found = re.match(r"In '([^']+)'", str(error))
    if found:
        return f"in conf/{found[1]}.yaml"
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if key == path or key.startswith(path + "."):
            return value
    return "?"


def _composition(message: str, overrides: Sequence[str]) -> Problem:
    """Hydra's own refusals, which carry no path but in their text."""
    found = re.search(r"Could not override '([^']+)'\. No match in the defaults list", message)
    if found:
        file = re.match(r"In '([^']+)'", message)
        if file:
            return Problem(found[1], f"in conf/{file[1]}.yaml", "no such group in the defaults list of conf/run.yaml")
        value = next((o.partition("=")[2] for o in overrides if o.startswith(found[1] + "=")), "?")
        return Problem(found[1], value, f"write +{found[1]}={value}")
    found = re.search(r"An item is already at '([^']+)'", message)
    if found:
        value = next((o.partition("=")[2] for o in overrides if o.startswith(f"+{found[1]}=")), "?")
        return Problem(found[1], value, f"the key exists; write {found[1]}={value} without the +")
    found = re.search(r"Ambiguous value for argument '([^=]+)=(.*)'", message)
    if found:
        return Problem(found[1], found[2], f"to sweep over these add -m; for a list write {found[1]}=[{found[2]}]")
    found = re.search(r"Multiple values for (\S+)\.", message)
    if found:
        value = next((o.partition("=")[2] for o in overrides if o.startswith(f"+{found[1]}=")), "?")
        return Problem(found[1], value, f"the key exists; write {found[1]}={value} without the +")
    return Problem("config", " ".join(overrides), message.splitlines()[0])
