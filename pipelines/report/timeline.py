"""The timeline of a run: how many episodes were in flight while the trainer worked, and each one as a bar."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from pipelines.report.charts import LEFT, Frame, path_of, wrapped
from pipelines.report.run_folder import Episode, RunFolder
from pipelines.wording import duration, figure, percent

WIDTH, HEIGHT = 980, 220
PROFILE_POINTS = 700
MAX_BARS = 12000
LABELS = ("solved", "partial", "unsolved", "failed")

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Profile:
    """Number of episodes in flight over time: `counts[k]` from `times[k]` (epoch seconds) to the next."""

    times: Sequence[float]
    counts: Sequence[int]

    @classmethod
    def of(cls, episodes: Sequence[Episode]) -> Profile:
        """Count the episodes in flight at every change."""
        changes = sorted([(e.started_s, 1) for e in episodes] + [(e.finished_s, -1) for e in episodes])
        times, counts, running = [-math.inf], [0], 0
        for time_s, change in changes:
            running += change
            if time_s == times[-1]:
                counts[-1] = running
            else:
                times.append(time_s)
                counts.append(running)
        return cls(times, counts)

    def at(self, time_s: float) -> int:
        """Episodes in flight at `time_s`."""
        return self.counts[bisect_right(self.times, time_s) - 1]

    def busy(self, span: Span) -> tuple[float, float]:
        """Over `span`: seconds with at least one episode in flight, and the integral of their number."""
        start, end = span
        position = bisect_right(self.times, start) - 1
        busy_s = integral = 0.0
        while start < end:
            until = min(end, self.times[position + 1] if position + 1 < len(self.times) else math.inf)
            count = self.counts[position]
            busy_s += (until - start) * (count > 0)
            integral += (until - start) * count
            start, position = until, position + 1
        return busy_s, integral


def overlap_sentence(run: RunFolder) -> str:
    """How much of the training time had rollouts in flight; empty if there is nothing to compare."""
    training = run.spans("train")
    rollouts = [e for e in run.episodes if e.kind == "train"]
    total_s = sum(end - start for start, end in training)
    if not rollouts or total_s <= 0:
        return ""
    profile = Profile.of(rollouts)
    parts = [profile.busy(span) for span in training]
    busy_s, integral = sum(b for b, _ in parts), sum(i for _, i in parts)
    return (
        f"The trainer computed for {duration(total_s)} in {len(training)} steps; rollouts were in flight during "
        f"{percent(busy_s / total_s)} of that time, {figure(integral / total_s)} episodes on average."
    )


def profile_chart(run: RunFolder) -> str:
    """Episodes in flight as areas over time, above bands of training and publishing. Empty without times."""
    span = _whole(run)
    if span is None:
        return ""
    start, end = span
    kinds = [(kind, [e for e in run.episodes if e.kind == kind]) for kind in ("train", "eval")]
    profiles = [(kind, Profile.of(episodes)) for kind, episodes in kinds if episodes]
    grid = [start + (end - start) * k / PROFILE_POINTS for k in range(PROFILE_POINTS + 1)]
    most = max([p.at(t) for _, p in profiles for t in grid], default=1)
    frame = Frame(0, end - start, 0, max(1, most) * 1.1, width=WIDTH, height=HEIGHT)
    body, colors = "", {"train": "c1", "eval": "c2"}
    for kind, profile in profiles:
        edge = [(frame.x(t - start), frame.y(profile.at(t))) for t in grid]
        edge = [(frame.x(0), frame.y(0)), *edge, (frame.x(end - start), frame.y(0))]
        body += f'<path class="area {colors[kind]}" d="{path_of(edge)}Z"/>'
    bands = [("train", "c3"), ("publish", "c4"), ("eval", "c2")]
    legend = [(colors[kind], "training episodes" if kind == "train" else "evaluation") for kind, _ in profiles]
    for row, (name, color) in enumerate(bands[:2]):
        spans = run.spans(name)
        y = HEIGHT - 2 + row * 12
        body += "".join(
            f'<rect class="block {color}" x="{frame.x(s - start):.2f}" y="{y}" height="9" rx="1" '
            f'width="{max(0.6, frame.x(e - start) - frame.x(s - start)):.2f}"/>'
            for s, e in spans
        )
        body += f'<text x="{LEFT - 6}" y="{y + 8}" text-anchor="end">{escape(name)}</text>' if spans else ""
        legend += [(color, "trainer computes" if name == "train" else "weights go out")] if spans else []
    axes = frame.axes("", figure, x_ticks=_time_ticks(end - start), x_format=duration)
    note = "over the time of the run; below it, when the trainer worked"
    chart = wrapped("Episodes in flight", note, frame, body + axes, legend)
    return chart.replace(f'viewBox="0 0 {WIDTH} {HEIGHT}"', f'viewBox="0 0 {WIDTH} {HEIGHT + 24}"')


def timeline_data(run: RunFolder, shown: Mapping[tuple[str, int], int]) -> dict[str, Any]:
    """Every episode as a bar for the page's zoomable timeline, times in ms since the start.

    `shown` maps sample id and attempt to places in the episode table. A very long run shows a part from its middle,
    and `note` says so.
    """
    span = _whole(run)
    if span is None:
        return {}
    begin = span[0]
    episodes = sorted(run.episodes, key=lambda e: e.started_s)
    note = ""
    if len(episodes) > MAX_BARS:
        first = (len(episodes) - MAX_BARS) // 2
        note = f"{MAX_BARS:,} of {len(episodes):,} episodes, from the middle of the run"
        episodes = episodes[first : first + MAX_BARS]
    bars: list[int] = []
    lanes = 0
    for kind in ("train", "eval"):
        members = [e for e in episodes if e.kind == kind]
        taken = _lanes(members)
        for episode, lane in zip(members, taken, strict=True):
            color = LABELS.index(episode.label) if episode.label in LABELS else 3
            start, length = _ms(episode.started_s - begin), _ms(episode.finished_s - episode.started_s)
            code = color + (4 if kind == "eval" else 0)
            bars += [start, max(1, length), lanes + lane, code, shown.get((episode.sample_id, episode.attempt), -1)]
        lanes += max(taken, default=-1) + 1
    rows = {name: [_ms(t - begin) for s in run.spans(name) for t in s] for name in ("train", "publish")}
    return {"bars": bars, "lanes": lanes, "end": _ms(span[1] - begin), **rows, "note": note}


def _time_ticks(span_s: float) -> list[float]:
    """At most a dozen times that a clock would show."""
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
    step = next((s for s in steps if span_s / s <= 12), 86400 * math.ceil(span_s / 86400 / 12))
    return [float(k * step) for k in range(int(span_s / step) + 1)]


def _lanes(episodes: Sequence[Episode]) -> list[int]:
    """A lane for each episode, in order of start, so that no two of a lane overlap and few lanes are needed."""
    free: list[int] = []
    running: list[tuple[float, int]] = []
    lanes: list[int] = []
    for episode in episodes:
        while running and running[0][0] <= episode.started_s:
            heapq.heappush(free, heapq.heappop(running)[1])
        lanes.append(heapq.heappop(free) if free else len(running))
        heapq.heappush(running, (episode.finished_s, lanes[-1]))
    return lanes


def _whole(run: RunFolder) -> Span | None:
    spans = [(e.started_s, e.finished_s) for e in run.episodes]
    spans += [s for name in ("train", "publish", "eval") for s in run.spans(name)]
    if not spans:
        return None
    start, end = min(s for s, _ in spans), max(e for _, e in spans)
    return (start, end) if end > start else None


def _ms(seconds: float) -> int:
    return round(1000 * seconds)
