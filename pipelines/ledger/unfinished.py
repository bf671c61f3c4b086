"""Samples that are not in a final state, each with what it waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipelines.ledger.reading import UNFINISHED, GroupRow, SampleRow
from pipelines.wording import duration


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A sample that is neither trained nor given up. `waits_for` is the reason in words, `for_s` since when."""

    sample_id: str
    task: str
    state: str
    for_s: float
    waits_for: str


def unfinished(group: GroupRow, samples: Sequence[SampleRow], now_s: float) -> Iterator[Unfinished]:
    """Those of one group's `samples` (all of its attempts) that are not final."""
    lacking = ""
    for sample in samples:
        if sample.state not in UNFINISHED:
            continue
        if sample.state == "scored":
            lacking = lacking or _lacking(group, samples, now_s)
            reason = lacking or "waits for its batch: its group is complete"
        else:
            reason = _waits_for(sample)
        yield Unfinished(sample.sample_id, sample.task, sample.state, _since(sample, now_s), reason)


def _waits_for(sample: SampleRow) -> str:
    if sample.state == "running":
        return f"runs in sandbox {sample.sandbox_id or 'of unknown name'}"
    if sample.reason:
        return sample.reason
    again = f" (admitted {sample.num_leases} times)" if sample.num_leases > 1 else ""
    return f"waits for its sandbox{again}"


def _since(sample: SampleRow, now_s: float) -> float:
    """Seconds in its state. `changed_s` is when it came there: nothing else changes a row."""
    return max(0.0, now_s - sample.changed_s)


def _lacking(group: GroupRow, samples: Sequence[SampleRow], now_s: float) -> str:
    """What the other members of a scored sample's group do, that it waits for them; empty if it does not."""
    last = {sample.sample_index: sample for sample in samples}
    parts: list[str] = []
    for index in range(group.size):
        sample = last.get(index)
        if sample is None:
            parts.append(f"{index} not admitted")
        elif sample.state in ("leased", "running"):
            doing = "runs" if sample.state == "running" else "waits for its sandbox"
            doing = "waits to run again" if sample.state == "leased" and sample.reason else doing
            parts.append(f"{index} {doing} for {duration(_since(sample, now_s))}")
        elif sample.state == "failed":
            parts.append(f"{index} to be refilled after {sample.outcome}")
    return f"waits for its group: {', '.join(parts)}" if parts else ""
