import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipelines.arms import arms_of, find_runs
from pipelines.compare import main
from pipelines.interval import difference, mean_ci95, t_quantile


def write_run(
    folder: Path,
    seed: int,
    after: float | None,
    *,
    choices: dict[str, str] | None = None,
    config: dict[str, Any] | None = None,
    **result: Any,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    metrics = {"eval/solve_rate_before": 0.4, "eval/solve_rate_before_ci95": [0.3, 0.5], "perf/step_s": 1.5}
    if after is not None:
        metrics |= {"eval/solve_rate_after": after, "eval/solve_rate_after_ci95": [after - 0.1, after + 0.1]}
        metrics |= {"eval/solve_rate_delta": after - 0.4, "eval/solve_rate_delta_ci95": [after - 0.5, after - 0.3]}
    full = {
        "status": "success",
        "name": "quickstart",
        "seed": seed,
        "choices": choices or {"dataset": "train69"},
        "commit": "abc",
        "task_set_hash": {"train": "t", "eval": "e"},
        "wall_s": 100.0,
        "metrics": metrics,
        **result,
    }
    (folder / "result.json").write_text(json.dumps(full))
    if config is not None:
        own = {"name": folder.name, "seed": seed, "run_dir": str(folder), "log": f"{folder}/log", **config}
        (folder / "resolved.yaml").write_text(yaml.safe_dump(own))
    return folder


def write_arms(root: Path, **arms: list[float]) -> Path:
    for option, rates in arms.items():
        for seed, rate in enumerate(rates):
            write_run(root / option / str(seed), seed, rate, choices={"dataset": option})
    return root


def test_arms_are_named_by_the_choice_that_differs_and_pool_their_seeds(tmp_path: Path) -> None:
    runs, problems = find_runs([str(write_arms(tmp_path, train8=[0.5, 0.6], train69=[0.7, 0.8, 0.9]))])
    arms = arms_of(runs)
    assert problems == []
    assert [(arm.name, len(arm.counted)) for arm in arms] == [("dataset=train69", 3), ("dataset=train8", 2)]


def test_an_option_names_an_arm_once_and_seed_folder_and_name_do_not(tmp_path: Path) -> None:
    for lr in (0.1, 0.2):
        for seed in (0, 1):
            config = {
                "trainer": {"lr": lr, "seed": seed},
                "stages": {"trainer": {"run": {"trainer": {"lr": lr}, "seed": seed}}},
            }
            write_run(tmp_path / f"{lr}-{seed}", seed, 0.5, config=config)
    arms = arms_of(find_runs([str(tmp_path)])[0])
    assert [(arm.name, len(arm.runs)) for arm in arms] == [("trainer.lr=0.1", 2), ("trainer.lr=0.2", 2)]


def test_options_that_a_choice_settles_are_not_named_but_others_are(tmp_path: Path) -> None:
    for option, tasks, lr in (("train8", 8, 0.1), ("train69", 69, 0.2)):
        config = {
            "dataset": {"num_tasks": tasks},
            "stages": {"data": {"run": {"num_tasks": tasks}}},
            "trainer": {"lr": lr},
        }
        write_run(tmp_path / option, 0, 0.5, choices={"dataset": option}, config=config)
    names = [arm.name for arm in arms_of(find_runs([str(tmp_path)])[0])]
    assert names == ["dataset=train69, trainer.lr=0.2", "dataset=train8, trainer.lr=0.1"]


def test_a_choice_that_may_set_anything_settles_every_option_that_goes_with_it(tmp_path: Path) -> None:
    for option, lr in (("a", 0.1), ("b", 0.2)):
        write_run(tmp_path / option, 0, 0.5, choices={"experiment": option}, config={"trainer": {"lr": lr}})
    assert [arm.name for arm in arms_of(find_runs([str(tmp_path)])[0])] == ["experiment=a", "experiment=b"]


def test_runs_that_differ_in_nothing_are_one_arm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(3):
        write_run(tmp_path / str(seed), seed, 0.5, config={"trainer": {"lr": 0.1}})
    assert main([str(tmp_path)]) == 0
    assert "One arm" in capsys.readouterr().out


def test_a_clear_difference_names_the_better_arm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_arms(tmp_path, train69=[0.80, 0.82, 0.84], train8=[0.50, 0.52, 0.54])
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "dataset=train8 vs dataset=train69: -30 points [-35, -25]: dataset=train69 is better." in out
    assert "Best: dataset=train69." in out


def test_a_difference_inside_the_noise_names_no_winner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_arms(tmp_path, train69=[0.5, 0.9, 0.7], train8=[0.4, 0.8, 0.6])
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "within noise" in out
    assert "better" not in out
    assert "No arm stands out" in out


def test_more_arms_need_a_bigger_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = write_arms(tmp_path / "two", a=[0.50, 0.54, 0.58], b=[0.60, 0.64, 0.68])
    assert main([str(two)]) == 0
    assert "dataset=b is better" in capsys.readouterr().out
    write_arms(two, c=[0.55, 0.59, 0.63], d=[0.55, 0.59, 0.63])
    assert main([str(two)]) == 0
    out = capsys.readouterr().out
    assert "is better" not in out
    assert "widened for 6 pairs" in out


@pytest.mark.parametrize("rates", [([0.9], [0.1]), ([0.9, 0.9], [0.1, 0.1]), ([0.9, 0.9, 0.9], [0.1])])
def test_no_winner_without_a_way_to_judge_the_noise(
    tmp_path: Path, rates: tuple[list[float], list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    write_arms(tmp_path, a=rates[0], b=rates[1])
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "no interval" in out
    assert "better" not in out


def test_different_held_out_tasks_are_refused_unless_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", 0, 0.5)
    write_run(tmp_path / "b", 1, 0.5, task_set_hash={"train": "t", "eval": "other"})
    assert main([str(tmp_path)]) == 3
    error = capsys.readouterr().err
    assert "task_set_hash.eval: e in" in error
    assert "--allow-different-tasks" in error
    assert main([str(tmp_path), "--allow-different-tasks"]) == 0


def test_arms_may_train_on_different_tasks_but_the_seeds_of_one_may_not(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 0, 0.5, choices={"dataset": "train8"}, task_set_hash={"train": "8", "eval": "e"})
    write_run(tmp_path / "b", 0, 0.5, task_set_hash={"train": "69", "eval": "e"})
    assert main([str(tmp_path)]) == 0
    write_run(tmp_path / "c", 1, 0.5, task_set_hash={"train": "other", "eval": "e"})
    assert main([str(tmp_path)]) == 3


def test_failed_runs_are_counted_and_shown_but_give_no_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", 0, 0.5)
    write_run(tmp_path / "b", 1, 0.9, status="failed", metrics={})
    write_run(tmp_path / "c", 2, 0.9, status="interrupted")
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "2 of 3 runs did not end well" in shown.err
    (arm,) = arms_of(find_runs([str(tmp_path)])[0])
    assert arm.values("eval/solve_rate_after") == [0.5]


def test_the_same_seed_twice_counts_once_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "20260101", 0, 0.5)
    write_run(tmp_path / "20260102", 0, 0.7)
    assert main([str(tmp_path)]) == 0
    assert "2 runs with seed 0" in capsys.readouterr().err
    (arm,) = arms_of(find_runs([str(tmp_path)])[0])
    assert arm.values("eval/solve_rate_after") == [0.7]


def test_different_commits_are_pointed_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", 0, 0.5, commit="aaa")
    write_run(tmp_path / "b", 1, 0.5, commit="bbb")
    assert main([str(tmp_path)]) == 0
    assert "different commits: aaa, bbb" in capsys.readouterr().err


def test_folders_patterns_and_files_find_each_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_arms(tmp_path / "runs", a=[0.5, 0.6])
    monkeypatch.chdir(tmp_path)
    for places in (["runs"], ["runs/a/*"], ["runs/**/result.json"], ["runs/a/0", "runs/a/1", "runs", "runs/a"]):
        runs, _ = find_runs(places)
        assert [str(run.path) for run in runs] == ["runs/a/0", "runs/a/1"]


def test_nothing_to_compare_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none"), str(tmp_path)]) == 2
    assert "no result.json found" in capsys.readouterr().err


def test_an_unreadable_result_is_named_and_the_others_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", 0, 0.5)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "result.json").write_text('{"status": ')
    assert main([str(tmp_path)]) == 0
    assert str(tmp_path / "b" / "result.json") in capsys.readouterr().err


def test_runs_with_figures_missing_still_make_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", 0, None, choices={"dataset": "a"}, metrics=None)
    write_run(tmp_path / "b", 0, None, choices={"dataset": "b"}, wall_s=None)
    assert main([str(tmp_path)]) == 0
    assert "no solve rate to compare" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.30265),
        (0.975, 9, 2.26216),
        (0.995, 4, 4.60409),
        (0.975, 1e6, 1.95997),
        (0.975, 999, 1.96234),
    ],
)
def test_t_quantiles_agree_with_published_tables(probability: float, freedom: float, expected: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(expected, rel=1e-4)


def test_welch_interval_agrees_with_worked_cases() -> None:
    delta, ends = difference([1, 2, 3, 4, 5], [3, 4, 5, 6, 7])  # variances 2.5: error 1, 8 degrees of freedom
    assert delta == 2
    assert ends == pytest.approx((2 - 2.30600, 2 + 2.30600), rel=1e-4)
    delta, ends = difference([0, 2], [0, 0, 3, 3], confidence=0.9)  # errors 1 and 0.75: 49 / 19 degrees
    half = t_quantile(0.95, 49 / 19) * 1.75**0.5
    assert ends == pytest.approx((0.5 - half, 0.5 + half))


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8), st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_a_difference_changes_sign_with_its_sides(first: list[float], second: list[float]) -> None:
    forth, forth_ends = difference(first, second)
    back, back_ends = difference(second, first)
    assert forth == pytest.approx(-back, abs=1e-12)
    assert (forth_ends is None) == (back_ends is None)
    if forth_ends is not None and back_ends is not None:
        assert forth_ends == pytest.approx((-back_ends[1], -back_ends[0]), abs=1e-9)
        assert forth_ends[0] <= forth <= forth_ends[1]


def test_a_mean_of_one_value_has_no_interval() -> None:
    assert mean_ci95([0.5]) == (0.5, None)
