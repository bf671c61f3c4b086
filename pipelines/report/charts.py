"""Charts as inline SVG: no library to load, sharp at any size, colours from the page's style in light and dark.

A figure carries its points in `data-hover`, from which the page's script shows the values under the pointer; without
a script the chart is still complete.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from pipelines.wording import figure

WIDTH, HEIGHT = 480, 210
LEFT, RIGHT, TOP, BOTTOM = 48, 10, 8, 24
MAX_POINTS = 400
SMOOTH_OVER = 10
MAX_DECADES = 8

Point = tuple[float, float | None]
"""An x and its y; None where the value was not finite, which breaks the line."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart. `band` gives low and high per point; `bars` draws them as error bars with dots.

    `smooth` draws the points faint under a mean over the last 10 of them.
    """

    name: str
    points: Sequence[Point]
    band: Sequence[tuple[float, float] | None] = ()
    bars: bool = False
    smooth: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """Maps values to pixels of one chart."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    log: bool = False
    width: int = WIDTH
    height: int = HEIGHT

    def x(self, value: float) -> float:
        """Pixel of an x value."""
        share = (value - self.x_low) / ((self.x_high - self.x_low) or 1)
        return LEFT + share * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Pixel of a y value, kept inside the frame."""
        low, high = self.y_low, self.y_high
        if self.log:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        share = min(1.0, max(0.0, (value - low) / ((high - low) or 1)))
        return self.height - BOTTOM - share * (self.height - TOP - BOTTOM)

    def axes(
        self,
        x_name: str,
        y_format: Callable[[float], str],
        x_ticks: Sequence[float] | None = None,
        x_format: Callable[[float], str] = figure,
    ) -> str:
        """Grid lines, tick labels and the name of the x axis."""
        parts: list[str] = []
        for tick in _decades(self.y_low, self.y_high) if self.log else ticks(self.y_low, self.y_high, 4):
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{self.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{escape(y_format(tick))}</text>')
        for tick in whole_ticks(self.x_low, self.x_high, 6) if x_ticks is None else x_ticks:
            x, base = self.x(tick), self.height - BOTTOM + 15
            parts.append(f'<text x="{x:.1f}" y="{base}" text-anchor="middle">{escape(x_format(tick))}</text>')
        base = self.height - BOTTOM
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{self.width - RIGHT}" y1="{base}" y2="{base}"/>')
        parts.append(f'<text class="axis-name" x="{LEFT + 2}" y="{base + 15}">{escape(x_name)}</text>')
        return "".join(parts)


def ticks(low: float, high: float, wanted: int) -> list[float]:
    """Round values from `low` to `high`, about `wanted` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / wanted
    scale = 10 ** math.floor(math.log10(raw))
    step = next(scale * nice for nice in (1, 2, 2.5, 5, 10) if scale * nice >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def whole_ticks(low: float, high: float, wanted: int) -> list[float]:
    """The same for counts: there is no half a step."""
    return [tick for tick in ticks(low, high, wanted) if tick == round(tick)]


def _decades(low: float, high: float) -> list[float]:
    """Powers of ten, as many as have room for their labels."""
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    stride = -(-(last - first + 1) // MAX_DECADES)
    return [10.0**power for power in range(first, last + 1, stride)]


def line_chart(
    title: str,
    note: str,
    series: Sequence[Series],
    *,
    x_name: str = "step",
    y_format: Callable[[float], str] = figure,
    bounds: tuple[float, float] | None = None,
) -> str:
    """A figure with one or more lines; `bounds` fixes the y axis. Empty without a single finite value.

    The y axis is logarithmic when every value is above 0 and they span more than two decades.
    """
    series = [thinned(s) for s in series if any(y is not None for _, y in s.points)]
    if not series:
        return ""
    frame = _frame(series, bounds)
    body = "".join(_drawn(s, frame, f"c{i}") for i, s in enumerate(series, 1))
    hover = [
        {"name": s.name, "color": f"c{i}", "at": {_key(x): _told(s, k, y_format) for k, (x, _) in enumerate(s.points)}}
        for i, s in enumerate(series, 1)
    ]
    legend = [(f"c{i}", s.name) for i, s in enumerate(series, 1)] if len(series) > 1 else []
    return wrapped(title, note, frame, frame.axes(x_name, y_format) + body, legend, hover, x_name)


def stacked_chart(
    title: str, note: str, names: Sequence[str], xs: Sequence[float], layers: Sequence[Sequence[float]]
) -> str:
    """A figure of layers on top of each other; `layers[i][k]` is layer i at `xs[k]`. Empty without points."""
    if not xs or not layers:
        return ""
    columns = list(zip(*layers, strict=True))
    size = -(-len(xs) // MAX_POINTS)
    starts = range(0, len(xs), size)
    xs = [_mean(xs[i : i + size]) for i in starts]
    columns = [[_mean(part) for part in zip(*columns[i : i + size], strict=True)] for i in starts]
    frame = Frame(min(xs), max(xs), 0, max(sum(column) for column in columns) * 1.05 or 1.0)
    body, below = "", [0.0] * len(xs)
    for index in range(len(layers)):
        above = [base + column[index] for base, column in zip(below, columns, strict=True)]
        edge = [(frame.x(x), frame.y(y)) for x, y in zip(xs, above, strict=True)]
        edge += reversed([(frame.x(x), frame.y(y)) for x, y in zip(xs, below, strict=True)])
        body += f'<path class="area c{index + 1}" d="{path_of(edge)}Z"/>'
        below = above
    hover = [
        {"name": n, "color": f"c{i + 1}", "at": {_key(x): figure(c[i]) for x, c in zip(xs, columns, strict=True)}}
        for i, n in enumerate(names)
    ]
    legend = [(f"c{i}", name) for i, name in enumerate(names, 1)]
    return wrapped(title, note, frame, body + frame.axes("step", figure), legend, hover, "step")


def wrapped(
    title: str,
    note: str,
    frame: Frame,
    body: str,
    legend: Iterable[tuple[str, str]],
    hover: Sequence[object] = (),
    x_name: str = "",
) -> str:
    """The figure element around the drawing `body`, with heading, legend and what the pointer shows."""
    swatches = "".join(f'<span><i class="swatch {color}"></i>{escape(name)}</span>' for color, name in legend)
    data = {"left": LEFT, "right": frame.width - RIGHT, "low": frame.x_low, "high": frame.x_high, "x": x_name}
    told = escape(json.dumps({**data, "series": hover})) if hover else ""
    return (
        f'<figure class="chart"{f" data-hover={chr(34)}{told}{chr(34)}" if told else ""}>'
        f"<figcaption><b>{escape(title)}</b><small>{escape(note)}</small></figcaption>"
        f'<svg viewBox="0 0 {frame.width} {frame.height}" role="img" aria-label="{escape(title)}">{body}</svg>'
        f"{f'<div class={chr(34)}legend{chr(34)}>{swatches}</div>' if swatches else ''}</figure>"
    )


def path_of(points: Iterable[tuple[float, float]]) -> str:
    """An SVG path through pixel positions."""
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def thinned(series: Series) -> Series:
    """At most `MAX_POINTS` points: means of neighbours, with their lowest and highest as band."""
    if len(series.points) <= MAX_POINTS:
        return series
    size = -(-len(series.points) // MAX_POINTS)
    points: list[Point] = []
    band: list[tuple[float, float] | None] = []
    for start in range(0, len(series.points), size):
        part = [(x, y) for x, y in series.points[start : start + size] if y is not None]
        if part:
            values = [y for _, y in part]
            points.append((part[-1][0], _mean(values)))
            band.append((min(values), max(values)))
    return Series(series.name, points, band)


def _frame(series: Sequence[Series], bounds: tuple[float, float] | None) -> Frame:
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points if y is not None]
    ys += [end for s in series for ends in s.band if ends is not None for end in ends]
    low, high = bounds or (min(ys), max(ys))
    log = bounds is None and low > 0 and high / low > 100
    if bounds is None and log:
        low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high))
    elif bounds is None:
        low = 0.0 if 0 < low < 0.6 * high else low
        margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        low, high = (low if low == 0 else low - margin), high + margin
    x_low, x_high = min(xs), max(xs)
    return Frame(x_low, x_high if x_high > x_low else x_low + 1, low, high, log)


def _drawn(series: Series, frame: Frame, color: str) -> str:
    parts: list[str] = []
    spans = [(x, ends) for (x, _), ends in zip(series.points, series.band, strict=False) if ends is not None]
    if series.bars:
        for x, (low, high) in spans:
            parts.append(f'<path class="bar {color}" d="M{frame.x(x):.1f},{frame.y(low):.1f}V{frame.y(high):.1f}"/>')
    elif spans:
        edge = [(frame.x(x), frame.y(high)) for x, (_, high) in spans]
        edge += [(frame.x(x), frame.y(low)) for x, (low, _) in reversed(spans)]
        parts.append(f'<path class="band {color}" d="{path_of(edge)}Z"/>')
    smooth = series.smooth and len(series.points) >= 2 * SMOOTH_OVER
    parts.append(_line(series.points, frame, f"line {color}{' faint' if smooth else ''}"))
    if smooth:
        parts.append(_line(_running_mean(series.points), frame, f"line {color}"))
    if series.bars or len(series.points) < 4:
        dots = [(frame.x(x), frame.y(y)) for x, y in series.points if y is not None]
        parts += [f'<circle class="dot {color}" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>' for x, y in dots]
    return "".join(parts)


def _line(points: Sequence[Point], frame: Frame, style: str) -> str:
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is None:
            runs.append([])
        else:
            runs[-1].append((frame.x(x), frame.y(y)))
    drawn = "".join(path_of(run) for run in runs if run)
    return f'<path class="{style}" d="{drawn}"/>'


def _running_mean(points: Sequence[Point]) -> list[Point]:
    means: list[Point] = []
    for index, (x, _) in enumerate(points):
        recent = [y for _, y in points[max(0, index + 1 - SMOOTH_OVER) : index + 1] if y is not None]
        means.append((x, _mean(recent) if recent else None))
    return means


def _told(series: Series, index: int, y_format: Callable[[float], str]) -> str:
    y = series.points[index][1]
    if y is None:
        return "not finite"
    ends = series.band[index] if index < len(series.band) else None
    return y_format(y) + (f" [{y_format(ends[0])}, {y_format(ends[1])}]" if ends else "")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _key(x: float) -> str:
    return f"{x:.6g}"
