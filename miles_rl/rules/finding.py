"""What a rule finds, and how it reads a config."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

from hydra.utils import get_class

Config = dict[str, Any]
Finding = dict[str, Any]
Level = Literal["error", "inert", "note"]


def finding(level: Level, path: str, value: object, message: str, remedy: str) -> Finding:
    """A finding at the config key `path`: `error` refuses the run, `inert` is a knob that cannot act."""
    return {"level": level, "path": path, "value": value, "message": message, "remedy": remedy}


def option(config: Mapping[str, Any], path: str) -> Any:
    """The value at `path`; if it is not written there, the default of the component's constructor.

    None if the config has no such part, or the value is null.
    """
    *parents, name = path.split(".")
    node: Any = config
    for key in parents:
        if not isinstance(node, Mapping) or key not in node:
            return None
        node = node[key]
    if not isinstance(node, Mapping):
        return None
    if name in node or "_target_" not in node:
        return node.get(name)
    parameter = inspect.signature(get_class(node["_target_"])).parameters.get(name)
    return None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default


def options(config: Mapping[str, Any], *paths: str) -> list[Any] | None:
    """The values at all `paths`; None if one of them is missing or null, so that a rule has nothing to say."""
    values = [option(config, path) for path in paths]
    return None if any(value is None for value in values) else values
