"""Going on from an earlier run: with its own command line, once at a time, and not with another config by accident.

A run saves the overrides of its command line in `overrides.json`. `resume=RUN` puts them before those that are given
now, so that nothing has to be repeated, and compares what comes out with the `resolved.yaml` of that run.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from pipelines.errors import ConfigError, Problem, show
from pipelines.lock import Busy, Holder, hold, holder
from pipelines.origin import Path as KeyPath
from pipelines.origin import children, origin

OVERRIDES_FILE = "overrides.json"
CONFIG_FILE = "resolved.yaml"

_NOT_REPEATED = ("run_dir", "resume", "resume_changed", "plan_only", "faults")
"""What belongs to one launch and not to the experiment. A fault must not come again."""

_NOT_COMPARED = (*_NOT_REPEATED, "checks")
_MAX_LINES = 20
_MAX_CHARS = 36
_ABSENT = "(absent)"
_RUN_DIR = "RUN_DIR"
_TAKEN = "holds another run; give a new folder"


def resume_of(words: Sequence[str]) -> str | None:
    """The value of the last `resume=...` among the words of a command line; None if there is none, or it is null."""
    for word in reversed(words):
        if _key(word) == "resume" and not word.startswith("-"):
            try:
                value = OverridesParser.create().parse_override(word).value()
            except OverrideParseException:
                return None  # Hydra says what is wrong with it
            return value if isinstance(value, str) and value else None
    return None


def with_saved_overrides(words: Sequence[str]) -> list[str]:
    """`words` of a command line; if they resume a run, with that run's overrides before the first of their own.

    Of those, an override whose key is given again is left out. Raises `ConfigError` if the saved ones are unreadable,
    or for a sweep.
    """
    resume = resume_of(words)
    if resume is not None and {"-m", "--multirun"} & set(words):
        raise _no_sweep(resume)
    if resume is None or (saved := read_overrides(Path(resume))) is None:
        return list(words)
    own = [position for position, word in enumerate(words) if _is_override(word)]
    given = {_key(words[position]) for position in own}
    repeated = [word for word in saved if _key(word) not in given and not _is_of_one_launch(_key(word))]
    return [*words[: own[0]], *repeated, *words[own[0] :]]


def read_overrides(resume: Path) -> list[str] | None:
    """The overrides of the run that `resume` names, or is a checkpoint of; None if it saved none."""
    path = _run_folder(resume) / OVERRIDES_FILE
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(saved, list) or not all(isinstance(word, str) for word in cast(list[Any], saved)):
            raise ValueError("no list of texts")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        remedy = f"cannot be read ({show(error)}); remove it, and repeat the overrides of that run by hand"
        raise ConfigError([Problem("resume", path, remedy)]) from None
    return cast(list[str], saved)


def refuse_running(resume: str | None) -> None:
    """Raises `ConfigError` if the run that `resume` names is still going on, in its own folder or resumed in another's.

    A copy of a checkpoint, outside its run, can be gone on from as often as one likes.
    """
    if resume and (found := holder(_run_folder(Path(resume)))) is not None:
        raise _still_going(resume, found)


def refuse_taken(run_dir: Path) -> None:
    """Raises `ConfigError` if `run_dir` is the folder of another run."""
    if (run_dir / CONFIG_FILE).exists():
        raise ConfigError([Problem("run_dir", run_dir, _TAKEN)])


@contextlib.contextmanager
def alone(run_dir: Path, resume: str | None) -> Generator[None]:
    """Make `run_dir` and hold it, and hold the run that is resumed, for the time of a `with`.

    Raises `ConfigError` if another process came first.
    """
    with contextlib.ExitStack() as held:
        if resume:
            try:
                held.enter_context(hold(_run_folder(Path(resume)), str(run_dir), make=False))
            except Busy as busy:
                raise _still_going(resume, busy.holder) from None
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            held.enter_context(hold(run_dir))
        except Busy:
            raise ConfigError([Problem("run_dir", run_dir, _TAKEN)]) from None
        except OSError as error:
            reason = (error.strerror or "it cannot be made").lower()
            remedy = f"{reason}: give a folder that can be written"
            raise ConfigError([Problem("run_dir", error.filename or run_dir, remedy)]) from None
        refuse_taken(run_dir)
        yield


def check_resumed(config: Mapping[str, Any], raw: Mapping[str, Any], multirun: bool) -> list[str]:
    """Notes on how the resolved `config` differs from that of the run it resumes; `raw` is before references.

    Raises `ConfigError` with one problem for each difference, unless `config["resume_changed"]`.
    """
    resume = config["resume"]
    if resume is None:
        return []
    if multirun:
        raise _no_sweep(resume)
    path = _run_folder(Path(resume)) / CONFIG_FILE
    try:
        before = cast(dict[str, Any], yaml.safe_load(path.read_text(encoding="utf-8")))
        differing = list(differences(before, config, raw))
    except FileNotFoundError:
        return [f"note: resume: {show(resume)}; there is no {path}, so it is not known whether the config has changed"]
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError([Problem("resume", path, f"cannot be read ({show(error)}); restore it")]) from None
    if config["resume_changed"]:
        return [f"changed since {show(resume)}: {key}: {change}" for key, change in differing]
    remedy = f"differs from the config of {resume}; take it back, or give resume_changed=true"
    problems = [Problem(key, change, remedy) for key, change in differing[:_MAX_LINES]]
    if more := len(differing) - _MAX_LINES:
        problems += [Problem("resume", resume, f"{more} more keys differ; give resume_changed=true")] * (more > 0)
    if problems:
        raise ConfigError(problems)
    return []


def differences(
    before: Mapping[str, Any], config: Mapping[str, Any], raw: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """`key`, `old -> new` of each value that differs, under the key that the user would change, once."""
    old, new = (_placeless(side, str(side["run_dir"])) for side in (before, config))
    told: set[tuple[str, str]] = set()
    for path, was, now in _differing(old, new, ()):
        key = origin(dict(raw), path)
        line = (key, f"{_short(was)} -> {_short(now)}")
        if key.partition(".")[0] not in _NOT_COMPARED and line not in told:
            told.add(line)
            yield line


def _differing(old: Any, new: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any, Any]]:
    """Paths of differing values, in the order of the old config; a list of another length differs as a whole."""
    was, now = dict(children(old)), dict(children(new))
    mappings = isinstance(old, dict) and isinstance(new, dict)
    lists = isinstance(old, list) and isinstance(new, list)
    if not mappings and not (lists and len(was) == len(now)):
        if type(cast(Any, old)) is not type(cast(Any, new)) or old != new:
            yield path, old, new
        return
    for key in dict.fromkeys((*was, *now)):
        yield from _differing(was.get(key, _ABSENT), now.get(key, _ABSENT), (*path, key))


def _placeless(node: Any, run_dir: str) -> Any:
    """`node` without where the run writes."""
    if isinstance(node, str):
        return node.replace(run_dir, _RUN_DIR)
    if isinstance(node, dict):
        return {key: _placeless(child, run_dir) for key, child in children(cast(Any, node))}
    if isinstance(node, list | tuple):
        return [_placeless(child, run_dir) for child in cast(Sequence[Any], node)]
    return node


def _still_going(resume: str, found: Holder) -> ConfigError:
    where = f"pid {'unknown' if found.pid is None else found.pid}"
    there = f" in {found.elsewhere}" if found.elsewhere else ""
    remedy = f"this run is still going on ({where}){there}; wait for its end or stop it"
    return ConfigError([Problem("resume", resume, remedy)])


def _no_sweep(resume: str) -> ConfigError:
    return ConfigError([Problem("resume", resume, "goes on with one run, and this is a sweep; leave out -m")])


def _short(value: Any) -> str:
    text = show(value)
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."


def _run_folder(resume: Path) -> Path:
    """The folder of the run, also for one of its checkpoints."""
    above = resume.absolute().parents
    in_run = resume.absolute().parent.name == "checkpoints"
    return above[1] if in_run else resume


def _is_override(word: str) -> bool:
    return not word.startswith("-") and ("=" in word or word.startswith("~"))


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _is_of_one_launch(key: str) -> bool:
    return key.split(".")[0] in _NOT_REPEATED or key.startswith(("hydra.", "hydra/"))
