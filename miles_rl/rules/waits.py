"""Do the deadlines of a config fit into each other?

A deadline inside another one should end first: it knows what was waited for, and it decides what the wait counts as.
One that cannot end first is inert. A deadline that what it bounds may legally outlast ends healthy runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil

from miles_rl.rules.finding import Config, Finding, finding, option, options

AGENT, EVAL, TRAINER, FLEET = "rollout.agent", "stages.eval.run", "stages.trainer.run", "stages.fleet.run"
LONGEST_SILENCE_S = 30.0
"""Within this time a dead or stuck stage has to fail the run."""
LEAST_OBJECT_STORE_MB = 76
"""Ray refuses less than 75 MiB."""


@dataclass(frozen=True, slots=True)
class Nested:
    """The deadline at `inner` runs inside the one at `outer`, which ends `what`."""

    inner: str
    outer: str
    what: str


NESTED = (
    Nested(f"{AGENT}.command_timeout_s", f"{AGENT}.wall_clock_s", "the episode"),
    Nested(f"{AGENT}.request_timeout_s", "router.request_timeout_s", "a request"),
    Nested("sandbox.provider.create_timeout_s", f"{AGENT}.lease_timeout_s", "the wait for a sandbox"),
    Nested(f"{AGENT}.lease_timeout_s", "stages.sandboxes.call_timeout_s", "a call of the sandboxes"),
    Nested(f"{AGENT}.command_timeout_s", "stages.sandboxes.call_timeout_s", "a call of the sandboxes"),
    Nested("rollout.batch_timeout_s", "stages.rollout.call_timeout_s", "the wait for a batch"),
    Nested("rollout.stop_timeout_s", "stages.rollout.stop_timeout_s", "the stop of the stage"),
    Nested("rollout.stop_timeout_s", f"{TRAINER}.step_timeout_s", "the end of the rollouts"),
    Nested(f"{EVAL}.timeout_s", "stages.eval.call_timeout_s", "the evaluation"),
    Nested(f"{FLEET}.publish_timeout_s", "stages.fleet.call_timeout_s", "a publish"),
    Nested(f"{FLEET}.publish_timeout_s", f"{TRAINER}.step_timeout_s", "a publish"),
    Nested(f"{FLEET}.resume_timeout_s", "stages.fleet.call_timeout_s", "a publish"),
    Nested(f"{FLEET}.stop_timeout_s", "stages.fleet.stop_timeout_s", "the stop of the stage"),
    Nested(f"{FLEET}.status_timeout_s", "cluster.heartbeat_timeout_s", "a look at the fleet"),
    Nested("engine.start_timeout_s", "stages.fleet.start_timeout_s", "the start of the fleet"),
    Nested("router.start_timeout_s", "stages.fleet.start_timeout_s", "the start of the fleet"),
    Nested("sandbox.preflight_timeout_s", "stages.sandboxes.start_timeout_s", "the start of the sandboxes"),
)


def nested(config: Config) -> Iterator[Finding]:
    """Deadlines that another one always beats: it began earlier, so also one of the same length."""
    for pair in NESTED:
        if (values := options(config, pair.inner, pair.outer)) is not None and values[0] >= values[1]:
            message = f"{pair.outer} ends {pair.what} after {values[1]:g} s already"
            yield finding("inert", pair.inner, values[0], message, f"give less than {values[1]:g}, or raise that one")


def idle(config: Config) -> Iterator[Finding]:
    """What an episode keeps must outlast its longest pause."""
    names = (f"{AGENT}.request_timeout_s", f"{AGENT}.command_timeout_s")
    if (values := options(config, *names)) is None:
        return
    request_s, command_s = values
    kept_s, sticky_s = option(config, "sandbox.lease_ttl_s"), option(config, "router.max_idle_s")
    if kept_s is not None and kept_s <= request_s:
        message = f"a reply may take {names[0]} = {request_s:g} s, in which the sandbox is not used and would be ended"
        yield finding("note", "sandbox.lease_ttl_s", kept_s, message, f"give more than {request_s:g}")
    if sticky_s is not None and sticky_s <= command_s:
        message = (
            f"a command may take {command_s:g} s, after which the episode would come to a replica without its keys"
        )
        yield finding("note", "router.max_idle_s", sticky_s, message, f"give more than {command_s:g}")


def stragglers(config: Config) -> Iterator[Finding]:
    """May a batch, or an evaluation, legally take longer than what is waited for it?"""
    parts = ("lease_timeout_s", "wall_clock_s", "request_timeout_s")  # the last reply may end after the clock
    if (values := options(config, *(f"{AGENT}.{name}" for name in parts))) is None:
        return
    episode_s = sum(values)
    terms = " + ".join(f"{name} {value:g}" for name, value in zip(parts, values, strict=True))
    clocks = f"{AGENT}: {terms}, and its verifier"
    names = [f"rollout.{name}" for name in ("batch_timeout_s", "num_groups", "group_size", "concurrency")]
    if (sizes := options(config, *names)) is not None:
        limit_s, groups, size, concurrency = sizes
        waves = ceil(groups * size / concurrency)
        if limit_s < waves * episode_s:
            times = f", and {concurrency} places need {waves} of them for a batch" if waves > 1 else ""
            message = f"an episode may take {episode_s:g} s ({clocks}){times}: slow ones would end the run"
            yield finding("note", names[0], limit_s, message, f"give {waves * episode_s:g} or more")
    limit_s = option(config, f"{EVAL}.timeout_s")
    if limit_s is not None and limit_s < episode_s:
        message = f"an episode may take {episode_s:g} s ({clocks}): one slow one would end the evaluation"
        yield finding("note", f"{EVAL}.timeout_s", limit_s, message, f"give more than {episode_s:g}")


def cluster(config: Config) -> Iterator[Finding]:
    """Values of the cluster that cannot work, and silence that lasts too long."""
    for name, least in (("num_cpus", 1), ("num_gpus", 0), ("object_store_mb", LEAST_OBJECT_STORE_MB)):
        if (value := option(config, f"cluster.{name}")) is not None and value < least:
            yield finding("error", f"cluster.{name}", value, f"at least {least} is needed", f"give {least} or more")
    for name in ("start_timeout_s", "heartbeat_s", "heartbeat_timeout_s", "stall_s"):
        if (value := option(config, f"cluster.{name}")) is not None and value <= 0:
            yield finding("error", f"cluster.{name}", value, "no time at all", "give more than 0")
    names = ("cluster.heartbeat_s", "cluster.heartbeat_timeout_s")
    if (values := options(config, *names)) is not None and sum(values) > LONGEST_SILENCE_S:
        message = f"a stage that is stuck is noticed after {sum(values):g} s (with {names[0]} {values[0]:g})"
        yield finding("note", names[1], values[1], message, f"{LONGEST_SILENCE_S:g} s together is the aim")


RULES: tuple[Callable[[Config], Iterator[Finding]], ...] = (nested, idle, stragglers, cluster)
