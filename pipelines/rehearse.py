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

from pipelines.errors import Problem

_LINE = re.compile(r"(?P<path>[A-Za-z_][\w.\[\]]*): (?P<value>[^;]*); (?P<remedy>.+)", re.DOTALL)


def rehearse(stages: Mapping[str, Any]) -> Iterator[Problem]:
    """The problems that constructors find. Call it only once names and types are known to fit."""
    for name, stage in stages.items():
        try:
            build = instantiate({**stage["run"], "_partial_": True}, _convert_="all")
            build(**dict.fromkeys(stage["needs"]))
        except (InstantiationException, ValueError, TypeError, FileNotFoundError) as error:
            cause = error.__cause__ if isinstance(error, InstantiationException) and error.__cause__ else error
            yield _problem(name, stage["run"]["_target_"], cause)


def _problem(name: str, target: str, error: BaseException) -> Problem:
    text = " ".join(str(error).split())
    match = _LINE.fullmatch(text)
    if match is None:
        return Problem(f"stages.{name}.run", target, text or type(error).__name__)
    return Problem(match["path"], match["value"], match["remedy"])
