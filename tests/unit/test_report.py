import json
import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from makers import make_trajectory

from miles_rl.metrics import MetricsWriter
from miles_rl.rollout.groups import Sample
from miles_rl.rollout.ledger import Ledger
from miles_rl.rollout.recorder import EpisodeRecord, EpisodeRecorder
from miles_rl.types import Outcome, StopReason, Turn
from pipelines.report import write_report
from pipelines.report.__main__ import main
from pipelines.report.charts import MAX_POINTS, Series, line_chart, ticks, whole_ticks
from pipelines.report.curves import charts, solve_rates
from pipelines.report.episodes import chosen
from pipelines.report.run_folder import Episode, RunFolder
from pipelines.report.timeline import Profile, overlap_sentence, timeline_data

START_S = 1.8e9
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&<!--\x1b[31m\u2028"


class Page(HTMLParser):
    """The elements, attributes and texts of a report, as a browser would see them."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        (self.scripts if self._inside == "script" else self.texts).append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])


def episode(number: int, **changes: Any) -> EpisodeRecord:
    start = START_S + number * 0.1
    values: dict[str, Any] = {
        "kind": "train",
        "task": f"task-{number % 5}",
        "sample_id": f"s{number}",
        "group_id": number // 4,
        "version": number // 40,
        "outcome": Outcome.SCORED,
        "stop_reason": StopReason.COMPLETED,
        "reward": float(number % 2),
        "started_s": start,
        "ready_s": start + 0.05,
        "finished_s": start + 1.0,
        "prompt_text": "Count the lines.",
        "turns": (Turn("```bash\nwc -l a\n```", "wc -l a", "12 a", 2, 4, 0.3, 0.02, 2),),
        "token_ids": np.array([1, 2, 3, 4], np.int32),
        "loss_mask": np.array([0, 0, 1, 1], np.bool_),
        "logprobs": np.array([0, 0, -0.2, -0.4], np.float32),
        "versions": np.array([-1, -1, 3, 4], np.int32),
        "timings": {"total_s": 1.0},
    }
    return EpisodeRecord(**{**values, **changes})


def write_episodes(run_dir: Path, records: list[EpisodeRecord]) -> None:
    recorder = EpisodeRecorder(run_dir / "episodes", flush_every=50)
    for record in records:
        recorder.record(record)
    recorder.close()


def evaluation(version: int, solved: dict[str, list[float]]) -> list[EpisodeRecord]:
    return [
        episode(1000 * (version + 1) + 10 * j + i, kind="eval", group_id=None, version=version, task=task, reward=r)
        for j, (task, rewards) in enumerate(solved.items())
        for i, r in enumerate(rewards)
    ]


def write_metrics(run_dir: Path, steps: int = 30) -> None:
    with MetricsWriter(run_dir) as writer:
        for step in range(1, steps + 1):
            at = START_S + step * 0.5
            figures = {
                "rollout/reward_mean": step / steps,
                "train/train_rollout_kl": 0.001 * step,
                "train/train_rollout_kl_p99": 0.5 * step,
                "train/grad_norm": math.nan if step == 3 else 1.0,
                "train/own_metric": 5.0,
                "perf/step_s": 0.5,
                "perf/wait_s": 0.2,
                "perf/train_s": 0.2,
                "perf/publish_s": 0.1,
                "time/train_start_s": at,
                "time/train_end_s": at + 0.2,
                "time/publish_start_s": at + 0.2,
                "time/publish_end_s": at + 0.3,
            }
            writer.write(step, figures, time_s=at + 0.3)
        writer.write(
            0,
            {"eval/solve_rate": 0.25, "eval/solve_rate_ci95_low": 0.1, "eval/solve_rate_ci95_high": 0.4},
            time_s=START_S,
        )


def full_run(run_dir: Path) -> Path:
    result = {
        "status": "success",
        "name": "quickstart",
        "seed": 3,
        "steps": 30,
        "wall_s": 90.0,
        "choices": {"dataset": "train69"},
        "commit": "0123456789abcdef",
        "config_hash": "c0ffee",
        "task_set_hash": {"train": "7ra1n", "eval": "e7a1"},
        "metrics": {
            "eval/solve_rate_before": 0.25,
            "eval/solve_rate_before_ci95": [0.1, 0.4],
            "eval/solve_rate_after": 0.75,
            "eval/solve_rate_after_ci95": [0.6, 0.9],
            "eval/solve_rate_delta": 0.5,
            "eval/solve_rate_delta_ci95": [0.3, 0.7],
        },
    }
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "result.json").write_text(json.dumps(result))
    (run_dir / "resolved.yaml").write_text("trainer:\n  lr: 0.0005\n")
    write_metrics(run_dir)
    failed = episode(
        7,
        sample_id="broken",
        outcome=Outcome.SANDBOX_FAILED,
        stop_reason=StopReason.ABORTED,
        reward=None,
        turns=(),
        detail="sandbox: bwrap ended with 1",
    )
    before = evaluation(0, {"held-out-a": [0, 0], "held-out-b": [0, 1]})
    after = evaluation(30, {"held-out-a": [1, 1], "held-out-b": [0, 1]})
    write_episodes(run_dir, [*(episode(n) for n in range(100)), failed, *before, *after])
    return run_dir


def report_of(run_dir: Path) -> Page:
    return Page(write_report(run_dir).read_text(encoding="utf-8"))


def test_a_report_says_what_happened_and_with_what(tmp_path: Path) -> None:
    text = report_of(full_run(tmp_path / "run")).text
    for words in (
        "quickstart",
        "It learned: solve rate 25 % \u2192 75 % (+50 points, 95 % interval +30 to +70).",
        "30 steps",
        "1 m 30 s",
        "Solve rate",
        "KL, training to rollout policy",
        "Step time",
        "train/own_metric",
        "; 1 not finite",
        "held-out-a",
        "+100",
        "sandbox_failed",
        "sandbox: bwrap ended with 1",
        "lr: 0.0005",
        "train69",
        "c0ffee",
        "7ra1n",
        "e7a1",
    ):
        assert words in text


def test_a_report_needs_no_network(tmp_path: Path) -> None:
    page = report_of(full_run(tmp_path / "run"))
    loading = {"src", "href", "srcset", "data", "action", "poster", "background"}
    assert all(value and value.startswith("#") for _, name, value in page.attributes if name in loading)
    assert "link" not in page.tags
    assert "url(" not in (tmp_path / "run" / "report.html").read_text()
    policy = next(value for tag, name, value in page.attributes if tag == "meta" and value and "default-src" in value)
    assert policy.startswith("default-src 'none'")


def test_conversations_are_in_the_report_word_for_word(tmp_path: Path) -> None:
    data = report_of(full_run(tmp_path / "run")).data
    shown = {e["id"]: e for e in data["episodes"]}
    assert len(shown) == len(data["episodes"]) == 100 + 1 + 4 + 4
    one = shown["s5"]
    assert (one["prompt"], one["reward"], one["task"], one["versions"]) == (
        "Count the lines.",
        1.0,
        "task-0",
        [0, 3, 4],
    )
    (turn,) = one["turns"]
    assert (turn["text"], turn["observation"]) == ("```bash\nwc -l a\n```", "12 a")
    assert (turn["tokens"], turn["versions"], turn["logprob"]) == (2, [3, 4], -0.3)
    assert sorted(one["group"], key=str) == [0.0, 0.0, 1.0, 1.0, None]
    assert shown["broken"]["reward"] is None
    assert shown["broken"]["detail"] == "sandbox: bwrap ended with 1"


def test_hostile_text_stays_text_everywhere(tmp_path: Path) -> None:
    run_dir = full_run(tmp_path / "run")
    clean = report_of(run_dir)
    result = json.loads((run_dir / "result.json").read_text())
    hostile = {**result, "name": HOSTILE, "status": HOSTILE, "error": HOSTILE, "commit": HOSTILE, "seed": HOSTILE}
    hostile |= {"choices": {HOSTILE: HOSTILE}, "warnings": [HOSTILE], "task_set_hash": {HOSTILE: HOSTILE}}
    (run_dir / "result.json").write_text(json.dumps(hostile))
    for name in ("resolved.yaml", "plan.txt", "log.txt"):
        (run_dir / name).write_text(HOSTILE)
    with MetricsWriter(run_dir) as writer:
        writer.write(5, {HOSTILE: 1.0, "train/train_rollout_kl_" + HOSTILE: 1.0}, time_s=START_S)
    turn = Turn(HOSTILE, HOSTILE, HOSTILE, 2, 4)
    said = {"task": HOSTILE, "prompt_text": HOSTILE, "turns": (turn,), "timings": {HOSTILE: 1.0}}
    broken = {"outcome": Outcome.ENGINE_FAILED, "reward": None, "detail": HOSTILE}
    write_episodes(run_dir, [episode(1, sample_id=HOSTILE, **said), episode(2, **said, **broken)])
    write_episodes(run_dir, evaluation(0, {HOSTILE: [1.0]}) + evaluation(30, {HOSTILE: [1.0]}))
    page = report_of(run_dir)
    assert len(page.scripts) == 2
    assert page.scripts[1] == clean.scripts[1]
    assert set(page.tags) - set(clean.tags) <= {"div", "pre", "ul", "li", "details", "summary"}
    assert not [name for _, name, _ in page.attributes if name.startswith("on") or name == "src"]
    assert HOSTILE in {e["turns"][0]["observation"] for e in page.data["episodes"] if e["turns"]}
    assert "<!--" not in (run_dir / "report.html").read_text()


@pytest.mark.parametrize("present", ["nothing", "result", "metrics", "episodes", "config"])
def test_a_partial_run_has_a_report(tmp_path: Path, present: str) -> None:
    if present == "result":
        failed = {"status": "failed", "error": "stage 'fleet' did not start", "metrics": {}, "name": "quickstart"}
        (tmp_path / "result.json").write_text(json.dumps(failed))
        (tmp_path / "log.txt").write_text("the last words")
    elif present == "metrics":
        write_metrics(tmp_path, steps=1)
    elif present == "episodes":
        write_episodes(tmp_path, [episode(0)])
    elif present == "config":
        (tmp_path / "resolved.yaml").write_text("lr: 1\n")
    page = report_of(tmp_path)
    assert page.data["episodes"] == ([] if present != "episodes" else page.data["episodes"][:1])
    if present == "result":
        assert "stage 'fleet' did not start" in page.text
        assert "the last words" in page.text
    if present == "metrics":
        assert "Reward" in page.text


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    run_dir = full_run(tmp_path / "run")
    (run_dir / "episodes" / "part-9.parquet").write_bytes(b"PAR1 torn")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "rollout/rew\n[]\n{"step": 32, "x": "text", "y": true}\n')
    (run_dir / "result.json").write_text("{")
    text = report_of(run_dir).text
    assert "part-9.parquet could not be read" in text
    assert "metrics.jsonl: 2 unreadable lines" in text
    assert "result.json is not readable" in text
    assert "KL, training to rollout policy" in text


def test_lines_of_one_step_are_merged_and_the_later_wins(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": 1.0, "b": 1.0}, time_s=1.0)
        writer.write(2, {"a": 5.0}, time_s=2.0)
        writer.write(1, {"b": 2.0, "c": math.inf}, time_s=3.0)
    run = RunFolder.read(tmp_path)
    assert run.series("a") == [(1.0, 1.0), (2.0, 5.0)]
    assert run.series("b") == [(1.0, 2.0)]
    assert run.series("c") == [(1.0, None)]


def test_an_evaluation_stands_at_its_version_however_late_it_was_known(tmp_path: Path) -> None:
    rows = [(0, 0.2), (20, 0.4), (40, 0.6)]
    for name, lag in (("in order", 0), ("late", 3)):
        lines = [(step, {"train/loss": 1.0 / step}, float(step)) for step in range(1, 41)]
        lines += [(version, {"eval/solve_rate": rate}, version + lag + 0.5) for version, rate in rows]
        with MetricsWriter(tmp_path / name) as writer:
            for step, metrics, known_s in sorted(lines, key=lambda line: line[2]):
                writer.write(step, metrics, time_s=known_s)
    in_order, late = RunFolder.read(tmp_path / "in order"), RunFolder.read(tmp_path / "late")
    assert list(late.metrics) == list(range(41))
    assert [(version, rate) for version, (rate, _) in solve_rates(late).items()] == rows
    assert late.series("eval/solve_rate") == in_order.series("eval/solve_rate")
    assert late.series("train/loss") == in_order.series("train/loss")
    assert charts(late) == charts(in_order)


def test_solve_rates_come_from_the_episodes_if_the_run_did_not_state_them(tmp_path: Path) -> None:
    write_episodes(tmp_path, evaluation(0, {"a": [0, 1], "b": [1, 1], "c": [0, 0, 0, 0]}))
    ((rate, ends),) = solve_rates(RunFolder.read(tmp_path)).values()
    assert rate == pytest.approx(0.5)  # of tasks, not of episodes
    assert ends == pytest.approx((0.5 - 4.30265 * 0.5 / 3**0.5, 0.5 + 4.30265 * 0.5 / 3**0.5), rel=1e-4)


def plain_episode(number: int, start: float, end: float, **changes: Any) -> Episode:
    values: dict[str, Any] = dict.fromkeys(Episode.__dataclass_fields__)
    values |= {"kind": "train", "outcome": "scored", "reward": 1.0, "sample_id": f"s{number}", "task": "t"}
    values |= {"attempt": 0, "started_s": start, "finished_s": end, "part": Path(), "index": number}
    return Episode(**{**values, **changes})


def run_with(episodes: list[Episode], spans: Sequence[tuple[float, float]] = ()) -> RunFolder:
    metrics = {i: {"time/train_start_s": s, "time/train_end_s": e} for i, (s, e) in enumerate(spans)}
    return RunFolder(Path(), {}, metrics, episodes, "", "", "", [])


def test_few_episodes_are_all_shown() -> None:
    episodes = [plain_episode(i, i, i + 1) for i in range(10)]
    assert chosen(episodes, 10) == (episodes, "All 10 episodes.")


def test_a_sample_holds_every_kind_and_outcome_spread_over_the_run() -> None:
    episodes = [plain_episode(i, i, i + 1, reward=float(i % 3 == 0)) for i in range(3000)]
    episodes += [plain_episode(i, i, i + 1, kind="eval") for i in range(3000, 3040)]
    episodes += [plain_episode(i, i, i + 1, outcome="engine_failed", reward=None) for i in range(4000, 4002)]
    shown, sentence = chosen(episodes, 300)
    assert len(shown) == 300
    assert sentence.startswith("300 of 3,042 episodes")
    assert sum(e.outcome == "engine_failed" for e in shown) == 2
    assert sum(e.kind == "eval" for e in shown) == 40
    solved = [e.index for e in shown if e.kind == "train" and e.label == "solved"]
    assert (min(solved), max(solved)) == (0, 2997)
    assert max(b - a for a, b in pairwise(solved)) < 60


def test_a_storm_of_failures_does_not_crowd_out_the_others() -> None:
    episodes = [plain_episode(i, i, i + 1, outcome="engine_failed", reward=None) for i in range(5000)]
    episodes += [plain_episode(i, i, i + 1) for i in range(5000, 5100)]
    shown, _ = chosen(episodes, 300)
    assert sum(e.scored for e in shown) == 100


def test_the_profile_counts_episodes_in_flight() -> None:
    profile = Profile.of([plain_episode(0, 0, 4), plain_episode(1, 1, 2), plain_episode(2, 2, 3)])
    assert [profile.at(t) for t in (-1, 0, 0.5, 1.5, 2.5, 3.5, 4)] == [0, 1, 1, 2, 2, 1, 0]
    assert profile.busy((1.0, 6.0)) == pytest.approx((3.0, 5.0))
    assert profile.busy((5.0, 6.0)) == (0.0, 0.0)


def test_the_overlap_of_training_and_rollouts_is_measured() -> None:
    rollouts = [plain_episode(0, 100, 110), plain_episode(1, 100, 104), plain_episode(2, 90, 200, kind="eval")]
    sentence = overlap_sentence(run_with(rollouts, [(102, 106), (108, 116)]))
    assert "12 s in 2 steps" in sentence
    assert "50 % of that time, 0.667 episodes" in sentence
    assert overlap_sentence(run_with(rollouts)) == ""


def test_bars_of_one_lane_never_overlap_and_eval_has_its_own_lanes() -> None:
    rng = np.random.default_rng(0)
    starts = np.sort(rng.uniform(0, 50, 400))
    episodes = [
        plain_episode(i, float(s), float(s + rng.uniform(0.1, 3)), kind="eval" if i % 4 == 0 else "train")
        for i, s in enumerate(starts)
    ]
    data = timeline_data(run_with(episodes), {("s3", 0): 7})
    bars = [data["bars"][i : i + 5] for i in range(0, len(data["bars"]), 5)]
    assert len(bars) == 400
    assert [place for *_, place in bars].count(7) == 1
    evaluated = {lane for _, _, lane, code, _ in bars if code >= 4}
    assert evaluated.isdisjoint(lane for _, _, lane, code, _ in bars if code < 4)
    for lane in range(data["lanes"]):
        mine = sorted((start, start + length) for start, length, at, _, _ in bars if at == lane)
        assert mine
        assert all(b[0] >= a[1] - 1 for a, b in pairwise(mine))


def test_long_curves_are_thinned_and_keep_their_extremes() -> None:
    points = [(float(i), 1000.0 if i == 5678 else 1.0) for i in range(10_000)]
    html = line_chart("t", "", [Series("s", points)])
    hover = json.loads(Page(html).attributes[1][2] or "")
    assert len(hover["series"][0]["at"]) <= MAX_POINTS
    assert any("1,000]" in told for told in hover["series"][0]["at"].values())


def test_a_line_is_broken_where_a_value_is_not_finite() -> None:
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, None), (3.0, 3.0), (4.0, 1.0)]
    html = line_chart("t", "", [Series("s", points)])
    (line,) = re.findall(r'class="line c1" d="([^"]*)"', html)
    assert line.count("M") == 2
    assert line_chart("t", "", [Series("s", [(0.0, None)])]) == ""


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 1e-300, -1e300, 1e300])
def test_a_chart_stands_one_point_of_any_size(value: float) -> None:
    html = line_chart("t", "", [Series("s", [(1.0, value)])])
    assert "nan" not in html
    assert "<circle" in html


def test_a_logarithmic_axis_of_many_decades_has_room_for_its_labels() -> None:
    for low, most in ((1e-2, 3), (1e-15, 8), (1e-300, 8)):
        html = line_chart("t", "", [Series("s", [(0.0, low), (1.0, 1.0)])])
        assert 2 <= html.count('class="grid"') <= most


def test_warnings_of_a_run_stand_above_its_figures(tmp_path: Path) -> None:
    run_dir = full_run(tmp_path / "run")
    result = json.loads((run_dir / "result.json").read_text())
    (run_dir / "result.json").write_text(json.dumps({**result, "warnings": ["the fault never struck"]}))
    text = report_of(run_dir).text
    assert text.count("the fault never struck") == 1
    assert text.index("the fault never struck") < text.index("It learned")


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 1, 4) == [0, 0.25, 0.5, 0.75, 1]
    assert ticks(0, 97, 5) == [0, 20, 40, 60, 80]
    assert ticks(3, 3, 4) == [3]
    assert whole_ticks(0, 2, 6) == [0, 1, 2]
    assert whole_ticks(1, 2, 6) == [1, 2]
    assert whole_ticks(0, 97, 5) == ticks(0, 97, 5)


def test_the_command_writes_reports_anew_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert main([str(tmp_path / "none")]) == 1
    assert "no such run folder" in capsys.readouterr().err
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def ledger_run(run_dir: Path) -> Path:
    """A run whose ledger has a starving task, two kinds of failures, and samples that never ended."""
    full_run(run_dir)
    ledger = Ledger(run_dir / "ledger.sqlite")
    for group in range(3):
        task = "slow" if group else "task-1"
        for index in range(2):
            ledger.admit(Sample(group, index, 0, task), 0, 2, {})
            ledger.run(f"g{group}.{index}.0", f"box-{group}-{index}")
            ledger.score(make_trajectory(f"g{group}.{index}.0", group, task, 0))
        if group:
            ledger.drop(group, "stale", {})
    ledger.train({0: ["g0.0.0", "g0.1.0"]}, 0)
    for index in range(2):
        ledger.admit(Sample(3, index, 0, "task-2"), 0, 2, {})
        ledger.fail(f"g3.{index}.0", Outcome.SANDBOX_FAILED, f"task-2: lease {index} <b>broke</b> after {index}.5 s")
    ledger.admit(Sample(3, 0, 1, "task-2"), 0, 2, {})
    ledger.close()
    return run_dir


def test_outcomes_are_told_by_task_stage_and_kind_from_the_ledger(tmp_path: Path) -> None:
    run_dir = ledger_run(tmp_path / "run")
    result = json.loads((run_dir / "result.json").read_text())
    result["resumed_from"] = {"path": "runs/a/checkpoints/step-000004", "version": 4}
    (run_dir / "result.json").write_text(json.dumps(result))
    page = report_of(run_dir)
    text = re.sub(r"\s+", " ", page.text)
    for words in (
        "Resumed from version 4, runs/a/checkpoints/step-000004 ; counts go on from there.",
        "2 attempts failed: 2 by sandbox. They are refilled and never scored.",
        "sandbox TASK: lease # <b>broke</b> after # s task-2 2 0",
        "tried 2 times 1",
        "dropped: too old to train on 2 50 %",
        "1 samples were not in a final state; python -m pipelines.ledger",
        "1 of 1 tasks starve : more of their groups were too old to train on than were trained (slow)",
        "slow 2 0 starves",
    ):
        assert words in text


def test_counts_by_task_without_a_ledger_come_from_the_metrics_and_are_no_charts(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 4):
            named = {f"rollout/failed_by_task/task-{n}": float(step) for n in range(80)}
            stale = {f"async/stale_by_task/task-{n}": float(step) for n in range(3)}
            totals = {"rollout/failed": 80.0 * step, "rollout/engine_failed": 80.0 * step, "async/stale_groups": 0.0}
            writer.write(step, {**named, **stale, **totals}, time_s=START_S + step)
    write_episodes(tmp_path, [episode(1)])
    page = report_of(tmp_path)
    assert "failed_by_task" not in page.text
    assert "Failures of infrastructure" in page.text
    assert "engine_failed" in page.text
    assert "groups since the start that no batch could take any more" not in page.text  # none: no chart of zeros
    assert "3 of 3 tasks starve" in re.sub(r"\s+", " ", page.text)


def test_a_damaged_ledger_is_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    run_dir = full_run(tmp_path / "run")
    (run_dir / "ledger.sqlite").write_bytes(b"torn " * 3000)
    text = report_of(run_dir).text
    assert "ledger.sqlite: file is not a database" in text
    assert "sandbox: bwrap ended with 1" in text
