"""Can a config starve or deadlock? From batch, groups, data, concurrency, sandboxes, staleness and evaluation alone.

The window of admission is what `rollout.scheduler` opens at most: `num_groups * (max_staleness + 1)` groups, since the
group behind `r` others is consumed `r // num_groups` versions later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from miles_rl.rules.finding import Config, Finding, finding, option, options

EVAL = "stages.eval.run"
Rule = Callable[[Config], Iterator[Finding]]


def staleness(config: Config) -> Iterator[Finding]:
    """Batches are as old as the mode makes them."""
    if (values := options(config, "rollout.mode", "rollout.max_staleness")) is None:
        return
    mode, most = values
    if mode == "async" and most < 1:
        message = "asynchronous rollouts are at least one version old, so no batch would ever be admitted"
        yield finding("error", "rollout.max_staleness", most, message, "give 1 or more, or rollout=sync")
    if mode == "sync" and most != 0:
        message = "synchronous rollouts are of the version that consumes them"
        yield finding("error", "rollout.max_staleness", most, message, "give 0, or rollout=async")


def dataset(config: Config) -> Iterator[Finding]:
    """A batch is of different tasks; a small dataset has one task in several open groups."""
    names = ("dataset.train_size", "rollout.num_groups", "rollout.max_staleness")
    if (values := options(config, *names)) is None:
        return
    size, groups, most = values
    train = option(config, "dataset.train")
    if size < groups:
        message = f"a batch wants {groups} different tasks and {train} has {size}"
        yield finding("error", "rollout.num_groups", groups, message, f"give at most {size}, or a larger dataset")
    elif size < groups * (most + 1):
        message = f"{groups * (most + 1)} groups may be open at once and {train} has {size} tasks"
        remedy = "a task is then in several groups, of one batch too; a larger dataset or less staleness avoids it"
        yield finding("note", "dataset.train_size", size, message, remedy)


def sandboxes(config: Config) -> Iterator[Finding]:
    """Every episode in flight holds a sandbox; one that waits for another's would wait without end in sight."""
    if (values := options(config, "rollout.concurrency", "sandbox.size")) is None:
        return
    (rollouts, size), evals = values, option(config, f"{EVAL}.concurrency") or 0
    if rollouts + evals > size:
        message = f"rollout.concurrency {rollouts} and {EVAL}.concurrency {evals} need {rollouts + evals} sandboxes"
        remedy = f"give {rollouts + evals} or more, or lower the concurrency"
        yield finding("error", "sandbox.size", size, message, remedy)


def places(config: Config) -> Iterator[Finding]:
    """Whole groups need places for all their members; staleness bounds how many samples can be in flight."""
    names = [f"rollout.{name}" for name in ("concurrency", "num_groups", "group_size", "max_staleness")]
    if (values := options(config, *names)) is None:
        return
    concurrency, groups, size, most = values
    path, window = "rollout.concurrency", groups * size * (most + 1)
    if option(config, "rollout.admission") == "group":
        if concurrency < size:
            message = f"rollout.admission=group starts a group when all its {size} members have a place: never"
            remedy = f"give {size} or more, or rollout.admission=sample"
            yield finding("error", path, concurrency, message, remedy)
        elif concurrency % size:
            message = f"groups of {size} fill {concurrency - concurrency % size} of the places"
            remedy = "give a multiple of rollout.group_size, or rollout.admission=sample"
            yield finding("inert", path, concurrency, message, remedy)
    if concurrency > window:
        message = f"rollout.max_staleness admits at most {window} samples ahead of the trainer"
        remedy = f"more than {window} places stay empty; raise rollout.max_staleness or the batch"
        yield finding("inert", path, concurrency, message, remedy)


def engines(config: Config) -> Iterator[Finding]:
    """Requests beyond what the engines compute at a time wait there, on their own clocks."""
    rollouts, each = option(config, "rollout.concurrency"), option(config, "engine.max_running")
    if rollouts is None or each is None:
        return
    evals, replicas = option(config, f"{EVAL}.concurrency") or 0, option(config, "stages.fleet.run.num_replicas") or 1
    if rollouts + evals > replicas * each:
        message = f"{replicas} replicas compute {replicas * each} requests and {rollouts + evals} may be in flight"
        remedy = "the others wait while the clocks of their episodes run; raise it, or lower the concurrency"
        yield finding("note", "engine.max_running", each, message, remedy)


def slow_tasks(config: Config) -> Iterator[Finding]:
    """Whether the protection of slow tasks can act, and what it costs."""
    after, mode = option(config, "rollout.protect_after"), option(config, "rollout.mode")
    if after is None:
        if mode == "async" and option(config, "rollout.max_staleness") is not None:
            message = "no batch waits for a task whose groups are dropped as too old"
            remedy = "slow tasks may never be trained on; 1 protects a task after its first dropped group"
            yield finding("note", "rollout.protect_after", None, message, remedy)
    elif mode == "sync":
        message = "a synchronous batch is never too old, so no task is ever protected"
        yield finding("inert", "rollout.protect_after", after, message, "give null")
    elif after == 0:
        message = "every batch waits for every group that would be too old later, so none overtakes a slow one"
        yield finding("note", "rollout.protect_after", after, message, "1 waits only for tasks that lost a group")


def failures(config: Config) -> Iterator[Finding]:
    """Limits of failures that one fault of a shared part reaches at once."""
    names = ("rollout.max_failures_in_a_row", "rollout.max_failures_per_task", "rollout.concurrency")
    if (values := options(config, *names)) is None:
        return
    overall, per_task, concurrency = values
    if overall <= concurrency:
        message = f"one fault that fails all {concurrency} samples in flight ends the run, though none failed twice"
        yield finding("note", "rollout.max_failures_in_a_row", overall, message, f"give more than {concurrency}")
    short = option(config, "rollout.short_groups")
    if per_task == 1:
        end = {"halt": "ends the run", "discard": "discards its group"}.get(str(short), "shrinks its group")
        message = f"no sample is ever refilled: a task's first infrastructure failure {end}"
        yield finding("note", "rollout.max_failures_per_task", 1, message, "give 2 or more")
    if short == "train" and option(config, "rollout.group_size") in (1, 2):
        message = "a group that loses a member has no two left, so it is discarded"
        yield finding("inert", "rollout.short_groups", short, message, "discard says the same; or larger groups")


def evaluation(config: Config) -> Iterator[Finding]:
    """Knobs of the evaluation against the number of its episodes and against each other."""
    names = (f"{EVAL}.concurrency", f"{EVAL}.num_samples", "dataset.eval_size")
    if (values := options(config, *names)) is not None and values[0] > values[1] * values[2]:
        message = f"an evaluation has {values[2]} tasks x {values[1]} episodes"
        yield finding("inert", names[0], values[0], message, f"more than {values[1] * values[2]} places stay empty")
    attempts, retries = option(config, f"{EVAL}.max_attempts"), option(config, f"{EVAL}.max_retries")
    if retries == 0 and attempts is not None and attempts > 1:
        message = f"{EVAL}.max_retries is 0, so no episode is played again"
        yield finding("inert", f"{EVAL}.max_attempts", attempts, message, "give 1, or some retries")
    if retries and attempts == 1:
        message = f"{EVAL}.max_attempts is 1, so no episode is played again"
        yield finding("inert", f"{EVAL}.max_retries", retries, message, "give 0, or more attempts")


def recovery(config: Config) -> Iterator[Finding]:
    """Can a run that is killed go on?"""
    path = "stages.trainer.run.checkpoint_every"
    if (every := option(config, path)) == 0:
        yield finding("note", path, every, "a run that is killed starts afresh", "give the steps between checkpoints")
    if option(config, "resume") is None and option(config, "resume_changed"):
        yield finding("error", "resume_changed", True, "this run resumes none", "give resume=RUN, or false")


RULES: tuple[Rule, ...] = (
    staleness,
    dataset,
    sandboxes,
    places,
    engines,
    slow_tasks,
    failures,
    evaluation,
    recovery,
)
