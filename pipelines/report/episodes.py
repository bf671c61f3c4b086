"""The episodes that a report shows with their conversations, and the counts over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, cast

from pipelines.report.curves import task_rates
from pipelines.report.run_folder import Episode, RunFolder
from pipelines.wording import percent, percent_exact, points

MAX_SHOWN = 300
MAX_FAILURES = 60
MAX_TEXT = 4000
MAX_GROUP = 64


def chosen(episodes: Sequence[Episode], most: int = MAX_SHOWN) -> tuple[list[Episode], str]:
    """The episodes to show, in the order in which they ended, and a sentence on how they were chosen."""
    if len(episodes) <= most:
        return list(episodes), f"All {len(episodes):,} episodes."
    strata: dict[tuple[str, str], list[Episode]] = {}
    for episode in episodes:
        strata.setdefault((episode.kind, episode.label), []).append(episode)
    quota = dict.fromkeys(strata, 0)
    left = most
    while left:
        open_strata = [k for k, members in strata.items() if quota[k] < min(len(members), _limit(members[0], most))]
        if not open_strata:
            break
        for key in open_strata[:left]:
            quota[key] += 1
            left -= 1
    picked = [e for key, members in strata.items() for e in _evenly(members, quota[key])]
    sentence = (
        f"{len(picked):,} of {len(episodes):,} episodes: as many of each kind and outcome as there are or fit, evenly "
        "spaced in time, so rare outcomes are over-represented. All are in episodes/*.parquet."
    )
    return sorted(picked, key=lambda e: e.finished_s), sentence


def conversation_data(run: RunFolder, shown: Sequence[Episode], begin_s: float) -> list[dict[str, Any]]:
    """The shown episodes for the page's table: short keys, long texts cut in the middle."""
    groups: dict[int, list[float | None]] = {}
    for episode in run.episodes:
        if episode.group_id is not None and episode.kind == "train":
            groups.setdefault(episode.group_id, []).append(episode.reward)
    found = {id(episode): row for episode, row in run.conversations(shown)}
    return [_data(e, found[id(e)], groups.get(e.group_id or 0, []), begin_s) for e in shown]


def _data(episode: Episode, row: Mapping[str, Any], group: Sequence[float | None], begin_s: float) -> dict[str, Any]:
    turns = cast("list[dict[str, Any]]", row["turns"] or [])
    timings = dict(cast("list[tuple[str, float]]", row["timings"] or []))
    return {
        "id": episode.sample_id,
        "kind": episode.kind,
        "task": episode.task,
        "label": episode.label,
        "reward": episode.reward,
        "stop": episode.stop_reason,
        "attempt": episode.attempt,
        "versions": [episode.version, episode.oldest_version, episode.newest_version],
        "group": list(group[:MAX_GROUP]) if episode.kind == "train" else [],
        "at": round(episode.finished_s - begin_s, 2),
        "took": round(episode.finished_s - episode.started_s, 3),
        "tokens": episode.num_policy_tokens,
        "detail": _cut(episode.detail or ""),
        "prompt": _cut(row["prompt_text"] or ""),
        "timings": {name: round(value, 4) for name, value in timings.items()},
        "turns": [_turn(turn, row) for turn in turns],
    }


def _turn(turn: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    part = slice(turn["start"], turn["end"])
    versions = cast("list[int]", row["versions"] or [])[part]
    logprobs = cast("list[float]", row["logprobs"] or [])[part]
    return {
        "text": _cut(turn["text"] or ""),
        "command": _cut(turn["command"] or ""),
        "observation": _cut(turn["observation"] or ""),
        "tokens": turn["end"] - turn["start"],
        "cached": turn["cached_tokens"],
        "versions": sorted({v for v in versions if v >= 0}),
        "logprob": round(sum(logprobs) / len(logprobs), 3) if logprobs else None,
        "generate": round(turn["generate_s"], 3),
        "exec": round(turn["exec_s"], 3),
    }


def outcome_table(run: RunFolder) -> str:
    """Counts of outcomes and stop reasons by kind of episode."""
    kinds = [kind for kind in ("train", "eval") if any(e.kind == kind for e in run.episodes)]
    labels = Counter((e.label, e.kind) for e in run.episodes)
    stops = Counter((e.stop_reason, e.kind) for e in run.episodes)
    parts: list[str] = []
    for name, counts in (("outcome", labels), ("stop reason", stops)):
        totals = {kind: sum(n for (_, k), n in counts.items() if k == kind) for kind in kinds}
        rows = ""
        for label in sorted({label for label, _ in counts}, key=lambda at: -sum(counts[at, k] for k in kinds)):
            numbers = [text for k in kinds for text in _count_and_share(counts[label, k], totals[k])]
            cells = "".join(f"<td class=num>{text}</td>" for text in numbers)
            chip = f'<i class="chip {escape(label)}"></i>' if name == "outcome" else ""
            rows += f"<tr><th>{chip}{escape(label)}</th>{cells}</tr>"
        head = "".join(f"<th colspan=2 class=num>{kind}</th>" for kind in kinds)
        parts.append(f"<table><thead><tr><th>{name}</th>{head}</tr></thead><tbody>{rows}</tbody></table>")
    return "".join(parts)


def task_table(run: RunFolder) -> str:
    """Solve rate of every held-out task in the first and the last evaluation, biggest change first."""
    rates = task_rates(run)
    if not rates:
        return ""
    first, last = rates[min(rates)], rates[max(rates)]
    one = len(rates) == 1
    changes = {task: last[task] - first[task] for task in first if task in last}
    rows = ""
    for task in sorted(changes, key=lambda t: (-changes[t], t)):
        before, after, change = first[task], last[task], changes[task]
        low, high = min(before, after), max(before, after)
        color = "up" if change > 0 else "down" if change < 0 else "same"
        slope = (
            f'<svg class="dumbbell {color}" viewBox="-5 0 110 12"><path class="rail" d="M0,6H100"/>'
            f'<path class="link" d="M{100 * low:.0f},6H{100 * high:.0f}"/>'
            f'<circle class="was" cx="{100 * before:.0f}" cy="6" r="3"/>'
            f'<circle class="now" cx="{100 * after:.0f}" cy="6" r="3"/></svg>'
        )
        told = "" if one else f'<td class="num {color}">{points(change)}</td>'
        rows += (
            f"<tr><th>{escape(task)}</th><td class=num>{percent(before)}</td><td>{slope}</td>"
            f"<td class=num>{percent(after)}</td>{told}</tr>"
        )
    versions = f"version {min(rates)}", f"version {max(rates)}"
    end = "" if one else "<th class=num>points</th>"
    head = f"<tr><th>task</th><th class=num>{versions[0]}</th><th></th><th class=num>{versions[1]}</th>{end}</tr>"
    return f"<table class=tasks><thead>{head}</thead><tbody>{rows}</tbody></table>"


def failures_by_kind(run: RunFolder) -> str:
    """One phrase for the tiles: how many episodes failed, of all that ended."""
    failed = sum(not e.scored and e.outcome != "cancelled" for e in run.episodes)
    return f"{failed:,} of {len(run.episodes):,}"


def _count_and_share(count: int, total: int) -> tuple[str, str]:
    return f"{count:,}", percent_exact(count / total)


def _limit(episode: Episode, most: int) -> int:
    return most if episode.scored else MAX_FAILURES


def _evenly(members: Sequence[Episode], count: int) -> list[Episode]:
    if count <= 1:
        return list(members[:count])
    step = (len(members) - 1) / (count - 1)
    return [members[round(k * step)] for k in range(count)]


def _cut(text: str, most: int = MAX_TEXT) -> str:
    """The text's beginning and end, with a mark where the middle is left out."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}\n[... {len(text) - most:,} characters left out ...]\n{text[-most // 2 :]}"
