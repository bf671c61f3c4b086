"""Does a `_target_` and its options fit the class that it names? Checked by the constructor's signature."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Union, cast, get_args, get_origin

from pipelines.errors import Problem, did_you_mean, show
from pipelines.origin import Path, children
from pipelines.typecheck import mismatches

ALLOWED = ("miles_rl.", "sandbox_env.", "pipelines.")
"""Prefixes of what a config may build. Third-party classes get a wrapper under one of them."""

_RESERVED = ("_target_", "_partial_", "_convert_", "_recursive_", "_args_")

Where = Callable[[Path], str]
"""From the path of a value to the key that the user can change."""


class TargetError(Exception):
    """A `_target_` cannot be loaded; the message is the remedy."""


def check_tree(
    node: Any, path: Path, where: Where, allowed: Collection[str], injected: Collection[str] = ()
) -> Iterator[Problem]:
    """Problems of every `_target_` in `node`; the top one is also given the arguments `injected`."""
    if isinstance(node, dict) and "_target_" in node:
        spec = cast(dict[str, Any], node)
        try:
            target = load(spec["_target_"], allowed)
            parameters = list(inspect.signature(target).parameters.values())
        except TargetError as error:
            yield Problem(where((*path, "_target_")), spec["_target_"], str(error))
        except (TypeError, ValueError):
            yield Problem(where((*path, "_target_")), spec["_target_"], "cannot be called; name a class or a function")
        else:
            yield from _wrong_names(target.__name__, parameters, spec, path, where, injected)
            yield from _wrong_types(target, _options(spec), path, where, allowed)
    for key, child in children(node):
        yield from check_tree(child, (*path, key), where, allowed)


def targets(node: Any) -> Iterator[str]:
    """Every `_target_` in `node`, the outer before the inner."""
    if isinstance(node, dict) and "_target_" in node:
        yield str(cast(dict[str, Any], node)["_target_"])
    for _, child in children(node):
        yield from targets(child)


def _options(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in spec.items() if key not in _RESERVED}


def _wrong_names(
    name: str,
    parameters: Collection[inspect.Parameter],
    spec: Mapping[str, Any],
    path: Path,
    where: Where,
    injected: Collection[str],
) -> Iterator[Problem]:
    """Options and needs that the constructor called `name` does not take, and arguments that nobody gives it."""
    options = _options(spec)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key, value in options.items():
        if key in injected:
            yield Problem(where((*path, key)), value, f"is also a need of this stage, which gives {key!r}; remove one")
        elif key not in named and not open_ended:
            free = [other for other in named if other not in injected and other not in options] or named
            yield Problem(where((*path, key)), value, f"{name} takes no '{key}'; {did_you_mean(key, free)}")
    for need in injected:
        if need not in named and not open_ended:
            yield Problem(where((*path[:-1], "needs")), need, f"{name} takes no '{need}'; remove it from needs")
    required = [] if spec.get("_partial_") else [key for key, p in named.items() if p.default is p.empty]
    for key in required:
        if key not in options and key not in injected:
            yield Problem(where((*path, key)), "missing", f"{name} needs it; set it")


def _wrong_types(
    target: Any, options: Mapping[str, Any], path: Path, where: Where, allowed: Collection[str]
) -> Iterator[Problem]:
    hints = annotations_of(target)
    for key, value in options.items():
        expected = hints.get(key, Any)
        for below, wrong, remedy in mismatches(value, expected):
            yield Problem(where((*path, key, *below)), wrong, remedy)
        if key in hints and expected != Any and isinstance(value, dict) and "_target_" in value:
            yield from _wrong_object(cast(dict[str, Any], value), expected, (*path, key), where, allowed)


def _wrong_object(
    spec: Mapping[str, Any], expected: Any, path: Path, where: Where, allowed: Collection[str]
) -> Iterator[Problem]:
    """An object of the wrong class: `expected` is a class or a protocol that the named class does not satisfy."""
    try:
        given = load(spec["_target_"], allowed)
    except TargetError:
        return  # told where the object itself is checked
    if get_origin(expected) in (Union, types.UnionType):
        expected = next(iter(option for option in get_args(expected) if option is not type(None)), expected)
    if not inspect.isclass(given) or not inspect.isclass(expected) or spec.get("_partial_"):
        return
    if getattr(expected, "_is_protocol", False):
        wanted = [n for n, member in vars(expected).items() if inspect.isfunction(member) and not n.startswith("_")]
        lacking = [n for n in wanted if not hasattr(given, n)]
        if lacking:
            remedy = f"is no {expected.__name__}: it has no '{lacking[0]}'; name a class that has"
            yield Problem(where((*path, "_target_")), spec["_target_"], remedy)
    elif expected in (int, float, str, bool) or not issubclass(given, expected):
        yield Problem(where((*path, "_target_")), spec["_target_"], f"must be a {expected.__name__}")


def annotations_of(target: Any) -> dict[str, Any]:
    """Annotation of each parameter of `target`, evaluated; one that cannot be evaluated is left out."""
    function = target.__init__ if inspect.isclass(target) else target
    namespace = vars(sys.modules[function.__module__]) if hasattr(function, "__module__") else {}
    found: dict[str, Any] = {}
    for name, hint in getattr(function, "__annotations__", {}).items():
        try:
            found[name] = eval(hint, dict(namespace)) if isinstance(hint, str) else hint
        except (NameError, AttributeError, TypeError):
            continue  # imported for type checkers only: nothing a config could hold
    return found


def load(name: Any, allowed: Collection[str] = ALLOWED) -> Any:
    """The class or function that `name` means. Raises `TargetError` with the remedy."""
    if not isinstance(name, str) or not name.startswith(tuple(allowed)):
        raise TargetError(f"is outside {', '.join(allowed)}; add a wrapper class there")
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:length])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
                continue
            if str(error.name).startswith(tuple(allowed)):
                raise TargetError(f"cannot be imported: it imports {error.name}, which does not exist") from error
            raise TargetError(f"needs the package '{error.name}', which is not installed; install it") from error
        except Exception as error:
            raise TargetError(f"cannot be imported: {type(error).__name__}: {show(error)}") from error
        for part in parts[length:]:
            if not hasattr(found, part):
                raise TargetError(f"no such name in {module_name}; {did_you_mean(part, _public(found))}")
            found = getattr(found, part)
        return found
    raise TargetError(f"no module named '{'.'.join(parts[:-1])}'; correct the name")


def _public(found: Any) -> list[str]:
    members = cast(dict[str, Any], vars(found))
    own = [name for name, member in members.items() if getattr(member, "__module__", None) == found.__name__]
    return own + [module.name for module in pkgutil.iter_modules(getattr(found, "__path__", None) or [])]
