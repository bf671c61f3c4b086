"""How would this run go? Its own scheduling, on drawn latencies, in seconds.

    python -m pipelines.simulate [+experiment=NAME] [group=option ...] [key=value ...]
                                 [simulation=NAME] [simulation.KEY=value ...] [--json FILE]

The config is composed and checked like that of a run. What takes time comes from `conf/simulation/NAME.yaml`
(default: laptop). Exit code 0: simulated to the end. 1: the run got stuck or halted. 2: the config is wrong.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize
from omegaconf import OmegaConf

from pipelines import schema as schema
from pipelines.errors import ConfigError, Problem, explain
from pipelines.origin import dotted, resolve
from pipelines.plan import make_plan
from pipelines.say import say
from pipelines.signature import ALLOWED, check_tree

DEFAULT = "laptop"
CONFIG_ERROR = 2


def main() -> None:
    """The command line."""
    words = sys.argv[1:]
    logging.disable(logging.WARNING)  # what a run would warn of is in the result
    if {"-h", "--help"} & set(words):
        say((__doc__ or "").strip())
        sys.exit(0)
    try:
        json_file, words = _take_option(words, "--json")
        if json_file is not None and not Path(json_file).absolute().parent.is_dir():
            raise ConfigError([Problem("--json", json_file, "its folder does not exist; make it, or give another")])
        config, simulation = composed(words)
        result = simulate(config, simulation)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(CONFIG_ERROR)
    except Exception as error:
        if (problem := explain(error, words)) is None:
            raise
        print(problem.line, file=sys.stderr)
        sys.exit(CONFIG_ERROR)
    for line in table(config, result.as_dict()):
        say(line)
    if json_file is not None:
        Path(json_file).write_text(json.dumps(result.as_dict(), indent=2) + "\n")
    sys.exit(1 if result.error else 0)


def composed(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checked config of the run, and that of the simulation. Raises `ConfigError` or what Hydra raises."""
    ours = [word for word in words if word.startswith(("simulation.", "+simulation.", "~simulation."))]
    names = [word.removeprefix("simulation=") for word in words if word.startswith("simulation=")]
    rest = [word for word in words if word not in ours and not word.startswith("simulation=")]
    name = names[-1] if names else DEFAULT
    known = sorted(path.stem for path in (Path(__file__).parents[1] / "conf/simulation").glob("*.yaml"))
    if name not in known:
        raise ConfigError([Problem("simulation", name, f"no such option; have {', '.join(known)}")])
    with initialize(version_base="1.3", config_path="../conf"):
        run = compose(config_name="run", overrides=rest)
        times = compose(config_name=f"simulation/{name}", overrides=ours)
    resolved, raw = resolve(run)
    make_plan(resolved, raw)
    simulation = cast(dict[str, Any], OmegaConf.to_container(times.simulation, resolve=True))
    if problems := list(check_tree(simulation, ("simulation",), dotted, ALLOWED)):
        raise ConfigError(problems)
    return resolved, simulation


def simulate(config: Mapping[str, Any], simulation: Mapping[str, Any]) -> Any:
    """The result of `miles_rl.simulator` for a resolved config. Raises `ConfigError` for values that cannot be."""
    instantiate = importlib.import_module("hydra.utils").instantiate
    try:
        return instantiate(dict(simulation), _convert_="all").of(config)
    except ValueError as error:
        raise ConfigError([Problem("simulation", str(error), "see conf/simulation")]) from error
    except Exception as error:
        if isinstance(error.__cause__, ValueError):
            raise ConfigError([Problem("simulation", str(error.__cause__), "see conf/simulation")]) from error
        raise


def table(config: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """What a person who plans wants to see, a line each."""
    rollout = config["rollout"]
    size = rollout["num_groups"] * rollout["group_size"]
    limit = "rollouts" if result["rollout_s"] >= result["train_s"] else "training"
    stale = sum(result["stale_groups"].values())
    lines = [
        f"{config['name']}: {rollout['mode']}, batches of {size}, {rollout['concurrency']} in flight,"
        f" max_staleness {rollout['max_staleness']}, {result['steps']} steps in {_time(result['wall_s'])}",
        "",
        f"step                  {_time(result['step_s'])}, {result['of_bound']:.0%} of what {limit} alone allow"
        f" (rollouts {_time(result['rollout_s'])}, training {_time(result['train_s'])})",
        f"throughput            {result['samples_per_s']:.3g} samples/s, {result['tokens_per_s']:.4g} tokens/s",
        f"trainer waits         {result['trainer_idle_ratio']:.0%} of the time",
        f"places in use         {result['places_used_ratio']:.0%}",
        f"episode               mean {_time(result['episode_s_mean'])}, longest {_time(result['episode_s_max'])}",
        f"staleness             mean {result['staleness_mean']:.2f}, most {result['staleness_max']}",
        f"prefix cache hits     {result['prefix_cache_hit_rate']:.1%} of prompt tokens",
        f"failed samples        {result['failed_samples']}, refilled",
        f"too old to train on   {stale} groups, {result['wasted_tokens_ratio']:.1%} of all tokens",
        f"after truncation      {result['tokens_after_truncation']} tokens",
    ]
    if result["starving_tasks"]:
        lines.append(f"starving tasks        {', '.join(result['starving_tasks'])}; raise rollout.max_staleness")
    if result["longest_wait_s"] > result["batch_timeout_s"]:
        lines.append(
            f"would have failed     rollout.batch_timeout_s: {result['batch_timeout_s']:g};"
            f" the longest wait for a batch was {result['longest_wait_s']:.0f} s; give more"
        )
    if result["error"]:
        lines += ["", f"ended early: {result['error']}"]
    return lines


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _take_option(words: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """The value of `name FILE` or `name=FILE` among `words`, and the words without it."""
    rest, value = list(words), None
    for index, word in enumerate(words):
        if word.startswith(f"{name}="):
            value, rest = word.partition("=")[2], [*words[:index], *words[index + 1 :]]
        elif word == name:
            if index + 1 == len(words):
                raise ConfigError([Problem(name, "missing", "name a file")])
            value, rest = words[index + 1], [*words[:index], *words[index + 2 :]]
    return value, rest


if __name__ == "__main__":
    main()
