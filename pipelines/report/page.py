"""Puts the parts of a report together into one file that opens anywhere, without a network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any, cast

from pipelines.report import curves, episodes, outcomes, timeline
from pipelines.report.charts import SMOOTH_OVER
from pipelines.report.run_folder import RunFolder
from pipelines.wording import Verdict, duration, figure, interval, number, percent, percent_interval, points

ASSETS = Path(__file__).parent


def page(run: RunFolder) -> str:
    """The report as one HTML document.

    All text of the run is escaped or travels as JSON and becomes text nodes. On top of that the document's security
    policy allows no request at all and no script but the page's own, by its hash.
    """
    style, script = (ASSETS / "report.css").read_text("utf-8"), (ASSETS / "report.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    name = str(run.result.get("name") or run.path.name)
    shown, how = episodes.chosen(run.episodes)
    begin_s = min((e.started_s for e in run.episodes), default=0.0)
    data = {
        "episodes": episodes.conversation_data(run, shown, begin_s),
        "timeline": timeline.timeline_data(run, {(e.sample_id, e.attempt): place for place, e in enumerate(shown)}),
    }
    sections = [
        ("curves", "Curves", _curves(run)),
        ("timeline", "Timeline", _timeline(run)),
        ("tasks", "Held-out tasks", episodes.task_table(run)),
        ("outcomes", "Outcomes", outcomes.outcomes(run)),
        ("episodes", "Episodes", _episodes(how) if shown else ""),
        ("config", "Config", _config(run)),
    ]
    sections = [(anchor, title, body) for anchor, title, body in sections if body]
    links = "".join(f'<a href="#{anchor}">{title}</a>' for anchor, title, _ in sections)
    bodies = "".join(f'<section id="{a}"><h2>{title}</h2>{body}</section>' for a, title, body in sections)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><style>{style}</style></head><body>'
        f'<nav><b>{escape(name)}</b>{links}<button id="theme" title="light or dark">&#9680;</button></nav>'
        f"<main>{_summary(run, name)}{bodies}</main>"
        f'<script type="application/json" id="data">{embedded(data)}</script><script>{script}</script></body></html>\n'
    )


def embedded(data: Any) -> str:
    """JSON that no HTML parser can see an end or a start of an element in."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _metrics(run: RunFolder) -> Mapping[str, Any]:
    metrics: Any = run.result.get("metrics")
    return cast("Mapping[str, Any]", metrics) if isinstance(metrics, Mapping) else {}


def _summary(run: RunFolder, name: str) -> str:
    result, metrics = run.result, _metrics(run)
    status = str(result.get("status") or "not finished")
    facts = [f"seed {result['seed']}"] if "seed" in result else []
    facts += [f"{number(result, 'steps'):.0f} steps"] if number(result, "steps") is not None else []
    facts += [duration(number(result, "wall_s") or 0)] if number(result, "wall_s") is not None else []
    facts += [f"commit {str(result['commit'])[:10]}"] if result.get("commit") else []
    badge = f'<span class="badge {escape(status)}">{escape(status)}</span>'
    told = " &middot; ".join(map(escape, facts)) or escape(str(run.path))
    head = f"<h1>{escape(name)} {badge}</h1><p class=dim>{told}</p>"
    verdict = Verdict.of(metrics)
    judged = f'<p class="verdict {verdict.kind}">{_words(verdict.sentence())}</p>' if metrics else ""
    told = f"{outcomes.resumed(run)}{_error(run)}{_warnings(run)}{judged}"
    return f"<header>{head}{told}{_before_after(metrics)}{_tiles(run)}</header>"


def _words(text: str) -> str:
    return escape(text).replace("-&gt;", "&rarr;")


def _error(run: RunFolder) -> str:
    error = run.result.get("error")
    if not error:
        return ""
    log = (
        f"<details><summary>end of log.txt</summary><pre>{escape(run.log_tail)}</pre></details>" if run.log_tail else ""
    )
    return f'<div class="error"><pre>{escape(str(error))}</pre>{log}</div>'


def _warnings(run: RunFolder) -> str:
    """What the run warned of: who reads its figures has to know, so it stands above them."""
    warnings: Any = run.result.get("warnings")
    lines = (
        [f"<li>{escape(str(line))}</li>" for line in cast("list[Any]", warnings)] if isinstance(warnings, list) else []
    )
    return f"<ul class=warnings>{''.join(lines)}</ul>" if lines else ""


def _before_after(metrics: Mapping[str, Any]) -> str:
    """The two solve rates as bars with their intervals: the figure that people look for."""
    rows = ""
    for place, when in enumerate(("before", "after")):
        rate = number(metrics, f"eval/solve_rate_{when}")
        if rate is None:
            continue
        ends = interval(metrics, f"eval/solve_rate_{when}_ci95")
        y = 4 + 34 * place
        bar = f'<rect class="{when}" x="0" y="{y}" width="{600 * rate:.1f}" height="24" rx="3"/>'
        if ends is not None:
            low, high = 600 * max(0.0, ends[0]), 600 * min(1.0, ends[1])
            bar += (
                f'<path class="whisker" d="M{low:.1f},{y + 12}H{high:.1f}M{low:.1f},{y + 6}v12M{high:.1f},{y + 6}v12"/>'
            )
        words = f'<text class="big" x="700" y="{y + 18}">{percent(rate)}</text>'
        words += f'<text x="765" y="{y + 17}">{percent_interval(ends)}</text>'
        rows += f'<text x="-10" y="{y + 17}" text-anchor="end">{when}</text><rect class="rail" x="0" y="{y}" '
        rows += f'width="600" height="24" rx="3"/>{bar}{words}'
    label = "solve rate on held-out tasks before and after training, with 95 % intervals"
    return f'<svg class="hero" viewBox="-70 0 930 68" role="img" aria-label="{label}">{rows}</svg>' if rows else ""


def _tiles(run: RunFolder) -> str:
    metrics = _metrics(run)
    tiles: list[tuple[str, str, str]] = []
    rewards = [y for _, y in run.series("rollout/reward_mean") if y is not None]
    if rewards:
        size = min(10, -(-len(rewards) // 2))
        first, last = sum(rewards[:size]) / size, sum(rewards[-size:]) / size
        tiles.append(
            (
                "reward",
                f"{first:.2f} -> {last:.2f}",
                f"mean of the first and last {size} steps" if size > 1 else "first and last step",
            )
        )
    delta, ends = number(metrics, "eval/solve_rate_delta"), interval(metrics, "eval/solve_rate_delta_ci95")
    if delta is not None and ends is not None:
        tiles.append(("change", f"{points(delta)} points", f"95 % interval {points(ends[0])} to {points(ends[1])}"))
    for title, name, note in (
        ("tokens per second", "perf/tokens_per_s", "trained, median step"),
        ("step", "perf/step_s", "seconds, median"),
        ("staleness", "async/staleness_max", "versions, most in any step"),
    ):
        values = sorted(y for _, y in run.series(name) if y is not None)
        if values:
            value = values[-1] if title == "staleness" else values[len(values) // 2]
            tiles.append((title, figure(value), note))
    if run.episodes:
        tiles.append(("failed episodes", episodes.failures_by_kind(run), "never scored, never trained on"))
    return "<div class=tiles>" + "".join(
        f"<div><small>{escape(t)}</small><b>{_words(v)}</b><small>{escape(n)}</small></div>" for t, v, n in tiles
    ) + "</div>" if tiles else ""  # fmt: skip


def _curves(run: RunFolder) -> str:
    charts, rest = curves.charts(run), curves.other_charts(run)
    more = f"<details><summary>All other metrics</summary><div class=charts>{rest}</div></details>" if rest else ""
    how = f"Over optimizer steps. Where a line is pale, the strong one is the mean of its last {SMOOTH_OVER} values."
    return f"<p class=dim>{how}</p><div class=charts>{charts}</div>{more}" if charts or more else ""


def _timeline(run: RunFolder) -> str:
    chart = timeline.profile_chart(run)
    if not chart:
        return ""
    sentence = timeline.overlap_sentence(run)
    if not run.episodes:
        return chart
    names = ("solved", "partial", "unsolved", "failed", "evaluation")
    legend = "".join(f'<span><i class="swatch {name}"></i>{name}</span>' for name in names)
    return (
        (f"<p>{escape(sentence)}</p>" if sentence else "")
        + chart
        + '<figure class="chart"><figcaption><b>Every episode</b><small id="bars-note">a bar each; scroll to zoom, '
        "drag to move, double-click for all, click a bar to read it if it is among the episodes below</small>"
        f'</figcaption><canvas id="bars"></canvas><div class="legend">{legend}</div></figure>'
    )


def _episodes(how: str) -> str:
    orders = {"at": "in order of time", "took": "longest first", "tokens": "most tokens first", "turns": "most turns"}
    options = "".join(f'<option value="{key}">{title}</option>' for key, title in orders.items())
    selects = "".join(f'<select id="by-{key}"></select>' for key in ("kind", "label", "task"))
    return (
        f'<p class=dim>{escape(how)}</p><div class="filters">{selects}'
        f'<input id="by-text" type="search" placeholder="search in conversations"><select id="by-order">{options}'
        '</select><span id="count" class="dim"></span></div>'
        '<div class="reader"><ol id="list" tabindex="0"></ol><article id="conversation"></article></div>'
    )


def _config(run: RunFolder) -> str:
    choices: Any = run.result.get("choices")
    hashes: dict[str, Any] = {"config": run.result.get("config_hash"), "commit": run.result.get("commit")}
    sets: Any = run.result.get("task_set_hash")
    if isinstance(sets, Mapping):
        hashes |= {f"{split} tasks": value for split, value in cast("Mapping[str, Any]", sets).items()}
    chosen: Mapping[str, Any] = cast("Mapping[str, Any]", choices) if isinstance(choices, Mapping) else {}
    parts: list[str] = []
    for key, value, pairs in (("group", "choice", chosen), ("hash of", "", hashes)):
        rows = "".join(
            f"<tr><th>{escape(str(k))}</th><td><code>{escape(str(v))}</code></td></tr>"
            for k, v in pairs.items()
            if v is not None
        )
        if rows:
            parts.append(f"<table><thead><tr><th>{key}</th><th>{value}</th></tr></thead><tbody>{rows}</tbody></table>")
    told = f'<div class="side-by-side">{"".join(parts)}</div>' if parts else ""
    for title, text in (("plan.txt", run.plan), ("resolved.yaml", run.config)):
        told += f"<details><summary>{title}</summary><pre>{escape(text)}</pre></details>" if text else ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
    return told + (f"<ul class=dim>{notes}</ul>" if notes else "")
