"""Is every sample accounted for exactly once? Each rule that a ledger must hold at any moment, also after a kill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from pipelines.ledger.reading import RUN_ENDED, STATES, UNFINISHED, GroupRow, LedgerFile, SampleRow, opened

LEARNS_FROM = 2
"""A group that ends short is trained with at least so many members."""


def check(run: str | Path) -> list[str]:
    """What is wrong with the ledger of a run folder, or a ledger file, a line each; empty if all is well.

    Every member of a trained group was trained once, or infrastructure failed it for good; no other sample was
    trained. Versions are consecutive and each consumed as many groups. Only a failed attempt is followed by another.
    What a resume needs is there. Raises `LedgerUnreadable` if there is no ledger to check.
    """
    with opened(run) as ledger:
        return list(violations(ledger))


def violations(ledger: LedgerFile) -> Iterator[str]:
    """See `check`."""
    (damage,) = ledger.one("PRAGMA quick_check")
    if damage != "ok":
        yield f"the file is damaged: {damage}"
    groups = ledger.groups()
    kept = {sample_id for (sample_id,) in ledger.database.execute("SELECT sample_id FROM trajectories")}
    checkpoints = [version for (version,) in ledger.database.execute("SELECT version FROM checkpoints")]
    yield from _batches(groups.values())
    seen: set[int] = set()
    for group_id, rows in groupby(ledger.samples(), key=lambda row: row.group_id):
        seen.add(group_id)
        samples = list(rows)
        if (group := groups.get(group_id)) is None:
            yield f"group {group_id}: has {len(samples)} samples and was never opened"
            continue
        yield from _group(group, samples)
        for sample in samples:
            kept_it = sample.sample_id in kept
            kept.discard(sample.sample_id)
            yield from _sample(sample, group, kept_it, checkpoints)
    yield from (f"group {group_id}: was opened and has no sample" for group_id in groups.keys() - seen)
    yield from (f"{sample_id}: has a trajectory and no sample" for sample_id in sorted(kept))


def _batches(groups: Collection[GroupRow]) -> Iterator[str]:
    sizes = Counter(g.trained_version for g in groups if g.trained_version is not None)
    if not sizes:
        return
    usual, _ = Counter(sizes.values()).most_common(1)[0]
    for version in range(max(sizes) + 1):
        if version not in sizes:
            yield f"version {version}: consumed no batch, and version {max(sizes)} did"
        elif sizes[version] != usual:
            yield f"version {version}: consumed {sizes[version]} groups, the others {usual}"


def _group(group: GroupRow, samples: Sequence[SampleRow]) -> Iterator[str]:
    name = f"group {group.group_id}"
    if group.ended not in ("", "trained", "stale", "short"):
        yield f"{name}: ended as {group.ended!r}, which is no end"
    if (group.ended == "trained") != (group.trained_version is not None):
        yield f"{name}: ended as {group.ended!r} with trained version {group.trained_version}"
    members: Mapping[int, list[SampleRow]] = {
        index: list(attempts) for index, attempts in groupby(samples, key=lambda row: row.sample_index)
    }
    for index, attempts in members.items():
        if not 0 <= index < group.size:
            yield f"{name}: has a member {index} and only {group.size} members"
        if [a.attempt for a in attempts] != list(range(len(attempts))):
            yield f"{name}: attempts of member {index} are {[a.attempt for a in attempts]}"
        yield from (
            f"{a.sample_id}: is {a.state} and was attempted again" for a in attempts[:-1] if a.state != "failed"
        )
    if group.ended == "trained":
        yield from _trained_group(group, members)


def _trained_group(group: GroupRow, members: Mapping[int, Sequence[SampleRow]]) -> Iterator[str]:
    num_trained = 0
    for index in range(group.size):
        states = [a.state for a in members.get(index, ())]
        num_trained += "trained" in states
        if not states:
            yield f"group {group.group_id}: was trained and member {index} was never admitted"
        elif states.count("trained") != 1 and states[-1] != "failed":
            yield f"group {group.group_id}: was trained and the attempts of member {index} are {', '.join(states)}"
    if num_trained < min(LEARNS_FROM, group.size):
        yield f"group {group.group_id}: was trained with {num_trained} of {group.size} members"


def _sample(sample: SampleRow, group: GroupRow, kept: bool, checkpoints: Sequence[int]) -> Iterator[str]:
    name, state = sample.sample_id, sample.state
    if name != f"g{sample.group_id}.{sample.sample_index}.{sample.attempt}":
        yield f"{name}: is of group {sample.group_id}, member {sample.sample_index}, attempt {sample.attempt}"
    if sample.task != group.task:
        yield f"{name}: is of {sample.task} and its group of {group.task}"
    if state not in STATES:
        yield f"{name}: has the state {state!r}, which is none"
    yield from _end(sample, group)
    yield from _facts(sample)
    if not kept and (needed := _needed(sample, checkpoints)):
        yield f"{name}: its trajectory is missing, {needed} needs it"
    if kept and sample.reward is None:
        yield f"{name}: is {state} and has a trajectory"


def _end(sample: SampleRow, group: GroupRow) -> Iterator[str]:
    """Do the sample and its group agree on what became of them?"""
    name, state = sample.sample_id, sample.state
    if (state == "trained") != (sample.trained_version is not None):
        yield f"{name}: is {state} with trained version {sample.trained_version}"
    if state == "trained" and (group.ended, group.trained_version) != ("trained", sample.trained_version):
        end = group.ended or "open"
        yield f"{name}: was trained at {sample.trained_version}, its group is {end} ({group.trained_version})"
    if state in UNFINISHED and group.ended:
        yield f"{name}: is {state} and its group ended as {group.ended}"
    if state == "discarded" and (sample.reason == RUN_ENDED) != (group.ended == ""):
        yield f"{name}: was discarded ({sample.reason or 'no reason'}), its group is {group.ended or 'open'}"


def _facts(sample: SampleRow) -> Iterator[str]:
    """Does the row say what its state promises?"""
    name, state = sample.sample_id, sample.state
    if state == "running" and (sample.running_s is None or not sample.sandbox_id):
        yield f"{name}: is running and names no sandbox"
    if state == "failed" and (sample.outcome is None or sample.outcome == "scored" or sample.reward is not None):
        yield f"{name}: failed with outcome {sample.outcome} and reward {sample.reward}"
    if state not in ("scored", "trained"):
        return
    if sample.outcome != "scored" or sample.reward is None or sample.oldest_version is None:
        yield f"{name}: is {state} with outcome {sample.outcome} and reward {sample.reward}"
        return
    newest = sample.newest_version if sample.newest_version is not None else -1
    if not sample.admitted_version <= sample.oldest_version <= newest:
        yield f"{name}: admitted at version {sample.admitted_version}, written by {sample.oldest_version} to {newest}"
    if sample.trained_version is not None and newest > sample.trained_version:
        yield f"{name}: trained at {sample.trained_version}, written by {newest}"


def _needed(sample: SampleRow, checkpoints: Sequence[int]) -> str:
    """Who needs the trajectory of the sample: its batch, or a resume. Empty if nobody does."""
    if sample.state == "scored":
        return "its batch"
    if sample.reward is None or sample.newest_version is None:
        return ""
    if sample.state == "discarded" and sample.reason == RUN_ENDED:
        return "a resume"
    if sample.trained_version is None:
        return ""
    for version in checkpoints:
        if sample.newest_version <= version <= sample.trained_version:
            return f"a resume from version {version}"
    return ""
