"""Does a value from a config fit an annotation? Only the forms that a config can express are judged."""

from __future__ import annotations

import collections.abc
import enum
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import Any, Literal, Union, cast, get_args, get_origin

from pipelines.errors import did_you_mean
from pipelines.origin import Path

Mismatch = tuple[Path, Any, str]
"""Where below the checked value, the wrong value there, and what is expected."""

CallableType: Any = collections.abc.Callable
_LISTS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_DICTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", FilePath: "a path"}


def mismatches(value: Any, annotation: Any) -> Iterator[Mismatch]:
    """What in `value` does not fit `annotation`; nothing if it fits or if the annotation says nothing."""
    kind = get_origin(annotation)
    if annotation in (Any, object, inspect.Parameter.empty) or isinstance(annotation, typing.TypeVar):
        return
    if kind in (typing.Annotated, typing.Final, typing.ClassVar):
        yield from mismatches(value, get_args(annotation)[0])
    elif kind in (Union, types.UnionType):
        yield from _union(value, annotation)
    elif kind is Literal:
        if not any(value == option and type(value) is type(option) for option in get_args(annotation)):
            yield (), value, f"must be one of {', '.join(map(str, get_args(annotation)))}{_near(value, annotation)}"
    elif isinstance(value, dict) and "_target_" in value:
        return  # an object of its own, judged with its constructor
    elif (kind or annotation) in _LISTS:
        yield from _list(value, annotation, kind)
    elif (kind or annotation) in _DICTS:
        yield from _dict(value, annotation)
    elif not _fits(value, annotation):
        yield (), value, f"must be {describe(annotation)}{_unquote(value, annotation)}"


def _fits(value: Any, annotation: Any) -> bool:
    if annotation is None or annotation is type(None):
        return value is None
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation in (str, FilePath):
        return isinstance(value, str)
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return value in [member.value for member in annotation]
    if inspect.isclass(annotation) and not getattr(annotation, "_is_protocol", False):
        return isinstance(value, annotation)
    # Protocols and callables stand for objects, which a config can only give as a `_target_`.
    return not isinstance(value, str | int | float | bool | dict | list | None)


def _union(value: Any, annotation: Any) -> Iterator[Mismatch]:
    found = [list(mismatches(value, option)) for option in get_args(annotation)]
    if all(found):
        deep = [rows for rows in found if any(path for path, _, _ in rows)]
        yield from deep[0] if len(deep) == 1 else [((), value, f"must be {describe(annotation)}")]


def _list(value: Any, annotation: Any, kind: Any) -> Iterator[Mismatch]:
    if not isinstance(value, list):
        yield (), value, f"must be {describe(annotation)}"
        return
    items, args = cast(list[Any], value), get_args(annotation)
    fixed = kind is tuple and args and args[-1] is not Ellipsis
    if fixed and len(args) != len(items):
        yield (), value, f"must be a list of {len(args)} values"
        return
    for position, item in enumerate(items):
        expected = Any if not args else args[position] if fixed else args[0]
        yield from (((position, *path), wrong, text) for path, wrong, text in mismatches(item, expected))


def _dict(value: Any, annotation: Any) -> Iterator[Mismatch]:
    if not isinstance(value, dict):
        yield (), value, f"must be {describe(annotation)}"
        return
    args = get_args(annotation)
    for key, item in cast(dict[str, Any], value).items():
        for path, wrong, text in mismatches(item, args[1] if args else Any):
            yield (key, *path), wrong, text


def describe(annotation: Any) -> str:
    """What `annotation` asks for, in words."""
    kind, args = get_origin(annotation), get_args(annotation)
    if annotation in _WORDS:
        return _WORDS[annotation]
    if annotation is None or annotation is type(None):
        return "null"
    if kind is Literal:
        return "one of " + ", ".join(map(str, args))
    if kind in (Union, types.UnionType):
        return " or ".join(describe(option) for option in args)
    if (kind or annotation) in _LISTS:
        return f"a list, each {describe(args[0])}" if args else "a list"
    if (kind or annotation) in _DICTS:
        return "a mapping"
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return "one of " + ", ".join(str(member.value) for member in annotation)
    if kind is CallableType:
        return "a function, given by its _target_"
    return f"a {getattr(annotation, '__name__', annotation)}, given by its _target_"


def _unquote(value: Any, annotation: Any) -> str:
    parse: Callable[[str], Any] | None = {int: int, float: float}.get(annotation)
    if parse is None or not isinstance(value, str):
        return ""
    try:
        parse(value)
    except ValueError:
        return ""
    return "; write it without quotes"


def _near(value: Any, annotation: Any) -> str:
    hint = did_you_mean(str(value), [str(option) for option in get_args(annotation)])
    return f"; {hint}" if hint.startswith("did") else ""
