"""From a composed config to plain values, and from a value back to the key that the user wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from pipelines.errors import ConfigError, Problem

Path = tuple[str | int, ...]
"""Keys and list positions from the top of the config down to a value."""

_REFERENCE = re.compile(r"\$\{(\.*)([A-Za-z_][\w.\[\]]*)\}")
_LONGEST_CHAIN = 50


def dotted(path: Path) -> str:
    """`path` as it is written on the command line, like `stages.eval.needs[0]`."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return text.removeprefix(".")


def undotted(text: str) -> Path:
    """The inverse of `dotted`."""
    return tuple(int(i) if i else key for i, key in re.findall(r"\[(\d+)\]|([^.\[\]]+)", text))


def resolve(config: DictConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """`config` with all references followed, and as written.

    Raises `ConfigError` with a problem for each value that is missing and each reference that leads nowhere.
    """
    raw = cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))
    problems: list[Problem] = []
    for path, value in _strings(raw, ()):
        if value == "???":
            problems.append(Problem(dotted(path), value, "has no value; set it"))
        elif "${" in value:
            try:
                OmegaConf.select(config, dotted(path), throw_on_resolution_failure=True)
            except InterpolationToMissingValueError:
                continue
            except OmegaConfBaseException as error:
                reason = str(error).splitlines()[0].partition("while resolving interpolation: ")
                problems.append(Problem(dotted(path), value, (reason[2] or reason[0]).strip('"')))
    if problems:
        raise ConfigError(problems)
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=True, throw_on_missing=True)), raw


def _strings(node: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(node, str):
        yield path, node
        return
    for key, child in children(node):
        yield from _strings(child, (*path, key))


def children(node: Any) -> Iterator[tuple[str | int, Any]]:
    """Keys and values of a mapping, positions and values of a list, nothing of anything else."""
    if isinstance(node, dict):
        for key, child in cast(dict[Any, Any], node).items():
            yield key if isinstance(key, int) else str(key), child
    elif isinstance(node, list):
        yield from enumerate(cast(list[Any], node))


def origin(raw: dict[str, Any], path: Path) -> str:
    """The key to change so that the value at `path` changes: follows each `${reference}` on the way down."""
    for _ in range(_LONGEST_CHAIN):
        node: Any = raw
        for depth in range(len(path) + 1):
            target = _reference(node, path[:depth])
            if target is not None:
                path = target + path[depth:]
                break
            node = dict(children(node)).get(path[depth]) if depth < len(path) else None
        else:
            break
    return dotted(path)


def _reference(node: Any, path: Path) -> Path | None:
    found = _REFERENCE.fullmatch(node) if isinstance(node, str) else None
    if not found:
        return None
    dots, name = found.groups()
    return (path[: -len(dots)] if dots else ()) + undotted(name)
