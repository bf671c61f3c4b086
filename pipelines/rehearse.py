"""Builds every component once, with nothing behind its needs, to hear what only a constructor can know.

A constructor is cheap and touches nothing outside, by the contract of `pipelines.stage`; it raises `ValueError` with
one line, `<config path>: <value>; <remedy>`, for a value that cannot be meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from pipelines.errors import Problem, did_you_mean, show
from pipelines.signature import Where

_LINE = re.compile(r"(?P<path>[A-Za-z_][\w.\[\]]*): (?P<value>[^;]*); (?P<remedy>.+)", re.DOTALL)


def rehearse(stages: Mapping[str, Any]) -> Iterator[Problem]:
    """The problems that constructors find. Call it only once names and types are known to fit."""
    for name, stage in stages.items():
        try:
            build = instantiate({**stage["run"], "_partial_": True}, _convert_="all")
            build(**dict.fromkeys(stage["needs"]))
        except (InstantiationException, ValueError, TypeError, FileNotFoundError) as error:
            yield _problem(f"stages.{name}.run", stage["run"]["_target_"], error)


def rehearse_fault(fault: Mapping[str, Any], stages: Mapping[str, Any], where: Where) -> tuple[str, list[Problem]]:
    """The fault in words, empty if none would act, and what is wrong with it.

    A fault is what `miles_rl.faults.base` says: it has the name of a `stage`, and an `install`.
    """
    if not fault:
        return "", []
    target = str(fault.get("_target_", ""))
    try:
        built = instantiate(dict(fault), _convert_="all")
        stage = built.stage
        if not callable(built.install):
            raise TypeError("its 'install' is no method")
    except (InstantiationException, ValueError, TypeError, FileNotFoundError, AttributeError) as error:
        return "", [_problem(where(("faults",)), target, error)]
    if stage == "":
        return "", []
    if stage not in stages:
        path = where(("faults", "stage")) if "stage" in fault else where(("faults",))
        return "", [Problem(path, stage, f"no stage of that name; {did_you_mean(str(stage), stages)}")]
    options = ", ".join(f"{key} {show(value)}" for key, value in fault.items() if key not in ("_target_", "stage"))
    name = type(built).__name__
    return f"a fault acts on purpose in stage '{stage}': {name}{f' ({options})' if options else ''}", []


def _problem(path: str, target: str, error: Exception) -> Problem:
    cause = error.__cause__ if isinstance(error, InstantiationException) and error.__cause__ else error
    text = " ".join(str(cause).split())
    match = _LINE.fullmatch(text)
    if match is None:
        return Problem(path, target, text or type(cause).__name__)
    return Problem(match["path"], match["value"], match["remedy"])
