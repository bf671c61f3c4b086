"""A wrong command line gives exactly one line, on stderr, with the path, the value and the remedy; and exit code 2."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pipelines import run

ROOT = Path(__file__).parents[2]


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str) -> str:
    """What the command line `words` prints on stderr; it must be refused, and leave nothing behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(sys, "argv", ["miles-run", *words])
    with pytest.raises(SystemExit) as ended:
        run.main()
    told = capsys.readouterr()
    assert ended.value.code == 2, told.err
    assert told.out == ""
    assert list(tmp_path.rglob("*.*")) == []
    return told.err.rstrip("\n")


@pytest.mark.parametrize(
    ("word", "line"),
    [
        (
            "dataset=train9",
            "dataset: train9; no such option of dataset (have train69, train8); did you mean 'train69'?",
        ),
        ("+experiment=smok", "experiment: smok; no such option of experiment (have {have}); did you mean 'smoke'?"),
        ("experiment=smoke", "experiment: smoke; write +experiment=smoke"),
        ("datset=train8", "datset: train8; no such key; did you mean 'dataset'?"),
        ("+sead=1", "sead: 1; no such key; did you mean 'seed'?"),
        ("plan_onli=true", "plan_onli: true; no such key; did you mean 'plan_only'?"),
        ("rolout.concurrency=5", "rolout: 5; no such key; did you mean 'rollout'?"),
        ("rollout.concurency=64", "rollout.concurency: 64; no such key; did you mean 'concurrency'?"),
        (
            "+rollout.concurency=64",
            "rollout.concurency: 64; Rollout takes no 'concurency'; did you mean 'concurrency'?",
        ),
        ("~rollout.concurrency", "rollout.concurrency: missing; Rollout needs it; set it"),
        ("stages.rollout.neds=[data]", "stages.rollout.neds: [data]; no such key; did you mean 'needs'?"),
        (
            "stages.rollout.run.concurrency=7",
            "stages.rollout.run.concurrency: 7; stages.rollout.run is taken from a group; "
            "write GROUP.concurrency instead",
        ),
        ("cluster.num_cpu=3", "cluster.num_cpu: 3; no such key; did you mean 'num_cpus'?"),
        ("cluster.num_cpus=many", "cluster.num_cpus: many; must be a whole number"),
        ("steps=abc", "steps: abc; must be a whole number"),
        ("seed=1.5", "seed: 1.5; must be a whole number"),
        ("plan_only=maybe", "plan_only: maybe; must be true or false"),
        ("name=null", "name: null; must not be null"),
        ("steps=0", "steps: 0; must be at least 1"),
        ("run_dir=/proc/x", "run_dir: /proc/x; no such file or directory: give a folder that can be written"),
        ("run_dir=/etc/hostname/x", "run_dir: /etc/hostname/x; not a directory: give a folder that can be written"),
        ("seed=-1", "seed: -1; must be at least 0"),
        ("resume_changed=true", "resume_changed: true; this run resumes none; give resume=RUN, or false"),
        ("name=a/b", "name: a/b; names a folder: use letters, digits, '.', '_' and '-'"),
        ("rollout.concurrency=abc", "rollout.concurrency: abc; must be a whole number"),
        ("rollout.mode=asink", "rollout.mode: asink; must be one of async, sync; did you mean 'async'?"),
        ("trainer.lr=high", "trainer.lr: high; must be a number"),
        ("loss.clip_low='0.2'", "loss.clip_low: 0.2; must be a number; write it without quotes"),
        (
            "trainer._target_=os.system",
            "trainer._target_: os.system; is outside miles_rl., sandbox_env., pipelines.; add a wrapper class there",
        ),
        (
            "trainer._target_=miles_rl.trainer.torch.TorchTriner",
            "trainer._target_: miles_rl.trainer.torch.TorchTriner; no such name in miles_rl.trainer.torch; "
            "did you mean 'TorchTrainer'?",
        ),
        ("model=hf", "model.path: ???; has no value; set it"),
        ("rollout.concurrency=${nope}", "rollout.concurrency: ${nope}; Interpolation key 'nope' not found"),
        (
            "rollout.concurrency=${oc.env:NOT_SET_HERE}",
            "rollout.concurrency: ${oc.env:NOT_SET_HERE}; Environment variable 'NOT_SET_HERE' not found",
        ),
        ("+steps=3", "steps: 3; the key exists; write steps=3 without the +"),
        ("+dataset=train8", "dataset: train8; the key exists; write dataset=train8 without the +"),
        ("steps=1,2", "steps: 1,2; to sweep over these add -m; for a list write steps=[1,2]"),
        ("steps=[1", "command line: steps=[1; not of the form key=value (no viable alternative at input '[1')"),
        ("dataset=null", "dataset: null; name one option of the group"),
        (
            "+loss.api_key=abc",
            "loss.api_key: (hidden); looks like a secret; name the environment variable or the file that holds it "
            "instead",
        ),
        (
            "rollout.max_staleness=0",
            "rollout.max_staleness: 0; asynchronous rollouts are at least one version old, so no batch would ever be "
            "admitted; give 1 or more, or rollout=sync",
        ),
    ],
)
def test_a_wrong_command_line_gives_one_line(
    word: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    have = ", ".join(sorted(path.stem for path in (ROOT / "conf/experiment").glob("*.yaml")))
    assert refused(monkeypatch, capsys, tmp_path, word) == line.replace("{have}", have)


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["rollout.num_groups=70"], "rollout.num_groups: 70; "),
        (["rollout.concurrency=60"], "sandbox.size: 64; "),
        (["dataset=train8", "rollout.num_groups=9"], "rollout.num_groups: 9; "),
        (["resume=/nowhere/at/all"], "resume: /nowhere/at/all; "),
    ],
)
def test_a_config_that_would_starve_is_refused_with_the_reason(
    words: list[str], start: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    told = refused(monkeypatch, capsys, tmp_path, *words)
    assert told.startswith(start)
    assert "\n" not in told


def test_a_mistake_in_an_experiment_file_names_the_key_and_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    folder = tmp_path / "mine/experiment"
    folder.mkdir(parents=True)
    (folder / "odd").with_suffix(".yaml").write_text("# @package _global_\nstepz: 3\n")
    monkeypatch.setattr(sys, "argv", ["miles-run", "--config-dir", str(tmp_path / "mine"), "+experiment=odd"])
    with pytest.raises(SystemExit):
        run.main()
    assert capsys.readouterr().err == "stepz: in conf/experiment/odd.yaml; no such key; did you mean 'steps'?\n"


def test_the_module_works_from_any_folder_and_plan_only_leaves_nothing(tmp_path: Path):
    command = [sys.executable, "-m", "pipelines.run", "plan_only=true", "seed=3"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("minibench  seed 3  ")
    assert f"outputs {tmp_path}/runs/minibench/" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_help_explains_groups_options_and_examples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["miles-run", "-h"])
    with pytest.raises(SystemExit) as ended:
        run.main()
    told = capsys.readouterr().out
    assert ended.value.code in (0, None)
    assert "dataset: train69, train8" in told
    assert told.count("python -m pipelines.run ") >= 4


def test_a_sweep_runs_all_its_jobs_and_fails_if_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["miles-run", "-m", "seed=-1,1,2", "plan_only=true", "run_dir=runs/s"])
    with pytest.raises(SystemExit) as ended:
        run.main()
    told = capsys.readouterr()
    assert ended.value.code == 2
    assert told.err == "seed: -1; must be at least 0\n"
    assert [line.split()[2] for line in told.out.splitlines() if line.startswith("minibench  seed ")] == ["1", "2"]
    assert list(tmp_path.iterdir()) == []


def test_planning_leaves_alone_what_is_there_and_makes_nothing_anywhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    (tmp_path / "here/runs").mkdir(parents=True)
    (tmp_path / "aside").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "aside"))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != "aside"}
    for words in (["run_dir=runs"], [f"run_dir={tmp_path}/there/new"], ["-m", "seed=1,2"], ["seed=-1"]):
        monkeypatch.setattr(sys, "argv", ["miles-run", *words, "plan_only=true"])
        with pytest.raises(SystemExit):
            run.main()
        after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != "aside"}
        assert after == before, words
    outputs = re.findall(r"^outputs .*/runs/minibench/(\S+)/(\d)/$", capsys.readouterr().out, re.MULTILINE)
    assert [number for _, number in outputs] == ["0", "1"]
    assert len({stamp for stamp, _ in outputs}) == 1, "the runs of a sweep are in one folder"


def test_an_empty_resume_and_a_folder_of_checkpoints_are_refused_with_what_to_give(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old/checkpoints/step-000003").mkdir(parents=True)
    for value, line in (
        ("", "resume: ''; names no folder; give the folder of a run, or null\n"),
        (
            "old/checkpoints",
            "resume: old/checkpoints; old/checkpoints has no complete checkpoint; it holds those of a run:"
            " resume=old\n",
        ),
    ):
        monkeypatch.setattr(sys, "argv", ["miles-run", f"resume={value}", "plan_only=true"])
        with pytest.raises(SystemExit):
            run.main()
        assert capsys.readouterr().err == line
    monkeypatch.chdir(tmp_path / "old/checkpoints")
    monkeypatch.setattr(sys, "argv", ["miles-run", "resume=.", "plan_only=true"])
    with pytest.raises(SystemExit):
        run.main()
    assert capsys.readouterr().err.endswith(f"it holds those of a run: resume={tmp_path}/old\n")
