"""`python -m pipelines.ledger RUN`: what became of every sample, and what those that are not done wait for."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipelines.ledger.consistency import violations
from pipelines.ledger.reading import RUN_ENDED, STATES, LedgerFile, LedgerUnreadable, opened
from pipelines.ledger.summary import Summary, by_kind
from pipelines.ledger.unfinished import Unfinished
from pipelines.say import say
from pipelines.wording import clean, duration, figure, percent

WRONG, UNREADABLE = 1, 2
SHOWN_TASKS = 6
DESCRIPTION = "Every sample of a run, from its ledger. Works while the run goes on, and after it was killed."


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 if `--check` found something wrong, 2 if there is no ledger that can be read."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.ledger", description=DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="folder of a run or of a checkpoint, or a ledger file")
    parser.add_argument("--check", action="store_true", help="is every sample accounted for exactly once?")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    options = parser.parse_args(arguments)
    try:
        with opened(options.run) as ledger:
            return (_check if options.check else _summarise)(ledger, options.json)
    except LedgerUnreadable as error:
        print(error, file=sys.stderr)
        return UNREADABLE


def _check(ledger: LedgerFile, as_json: bool) -> int:
    found = list(violations(ledger))
    if as_json:
        say(json.dumps({"path": str(ledger.path), "violations": found}, indent=2))
    elif found:
        say("\n".join([f"{ledger.path}: {len(found)} violations", *map(clean, found)]))
    else:
        (members,) = ledger.one("SELECT count(*) FROM (SELECT DISTINCT group_id, sample_index FROM samples)")
        (groups,) = ledger.one("SELECT count(*) FROM groups")
        say(f"{ledger.path}: {members:,} samples of {groups:,} groups, every one accounted for exactly once")
    return WRONG if found else 0


def _summarise(ledger: LedgerFile, as_json: bool) -> int:
    summary = Summary.of(ledger)
    if as_json:
        rows = [{name: getattr(row, name) for name in Unfinished.__slots__} for row in summary.unfinished]
        head = {"path": str(ledger.path), "process": ledger.process, "changed_s": ledger.changed_s()}
        say(json.dumps({**head, **summary.figures(), "unfinished": rows}, indent=2))
    else:
        say("\n".join([*_head(ledger), *_counts(summary), *_causes(summary), *_timings(summary)]))
        say("\n".join(_unfinished(summary.unfinished)))
    return 0


def _head(ledger: LedgerFile) -> Iterator[str]:
    quiet = duration(max(0.0, time.time() - ledger.changed_s()))
    state = "the run does not go on" if ledger.process is None else f"the run goes on in process {ledger.process}"
    yield f"{ledger.path}"
    yield f"{state}; last change {quiet} ago"
    yield ""


def _counts(summary: Summary) -> Iterator[str]:
    times = [f"{count:,} of them {number} times" for number, count in sorted(summary.attempts.items()) if number > 1]
    times += [f"{summary.leased_again:,} leased again after a resume"] if summary.leased_again else []
    yield f"samples   {', '.join([f'{summary.attempts.total():,} attempted once or more', *times])}"
    yield f"attempts  {_listed(summary.states, STATES)}"
    yield f"groups    {_listed(summary.groups, ('open', 'trained', 'stale', 'short'))}"
    if summary.batches:
        sizes = sorted(set(summary.batches.values()))
        size = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        first, last = min(summary.batches), max(summary.batches)
        yield f"batches   {len(summary.batches):,} of {size} groups, consumed by versions {first} to {last}"
    if summary.checkpoints:
        yield f"kept      checkpoints of versions {', '.join(map(str, summary.checkpoints))}"


def _causes(summary: Summary) -> Iterator[str]:
    if summary.failures:
        yield from ("", f"failed attempts: {summary.failures.total():,}, by stage and kind")
        for stage, kind, count, tasks in by_kind(summary.failures):
            yield f"  {count:>7,}  {stage:8}  {kind}"
            yield f"  {'':7}  {'':8}  {_tasks(tasks)}"
    if summary.discarded:
        yield from ("", f"discarded attempts: {summary.discarded.total():,}, by reason")
        reasons = Counter(reason for _, reason in summary.discarded)
        for reason in reasons:
            tasks = Counter({task: n for (task, r), n in summary.discarded.items() if r == reason})
            more = " (a resume goes on with these)" if reason == RUN_ENDED else ""
            yield f"  {tasks.total():>7,}  {clean(reason)}{more}"
            yield f"  {'':7}  {_tasks(tasks)}"
    for task in summary.starving():
        stale, trained = (summary.groups_by_task[task, end] for end in ("stale", "trained"))
        yield f"warning: task {clean(task)} starves: {stale} of its groups were too old to train on, {trained} trained"


def _timings(summary: Summary) -> Iterator[str]:
    rows = {
        "wait for a sandbox": summary.wait,
        "running": summary.running,
        "scored until trained": summary.until_trained,
    }
    if any(row.values for row in rows.values()):
        yield from ("", f"{'seconds':22}{'median':>9}{'p95':>9}{'most':>9}{'samples':>10}")
        for name, row in rows.items():
            told = row.figures()
            yield (
                f"{name:22}{figure(told['p50']):>9}{figure(told['p95']):>9}{figure(told['max']):>9}{told['num']:>10,}"
            )
    if total := summary.staleness.total():
        shares = ", ".join(f"{versions}: {percent(n / total)}" for versions, n in sorted(summary.staleness.items()))
        yield from ("", f"staleness when trained, in versions: {shares}")


def _unfinished(rows: Sequence[Unfinished]) -> Iterator[str]:
    yield ""
    if not rows:
        yield "every sample is in a final state"
        return
    yield f"not in a final state: {len(rows):,}"
    widths = [max(len(getattr(row, name)) for row in rows) for name in ("sample_id", "task")]
    for row in rows:
        since = duration(row.for_s)
        task = clean(row.task)
        yield f"  {row.sample_id:{widths[0]}}  {task:{widths[1]}}  {row.state:7}  {since:>9}  {clean(row.waits_for)}"


def _listed(counts: Mapping[str, int], order: Sequence[str]) -> str:
    known = [name for name in order if counts.get(name)] + sorted(counts.keys() - set(order))
    return ", ".join(f"{counts[name]:,} {name}" for name in known) or "none"


def _tasks(counts: Counter[str]) -> str:
    shown: list[Any] = [f"{clean(task)} {count:,}" for task, count in counts.most_common(SHOWN_TASKS)]
    more = len(counts) - len(shown)
    return ", ".join(shown) + (f", and {more:,} more tasks" if more > 0 else "")


if __name__ == "__main__":
    sys.exit(main())
