"""Options, folders and checkpoints of the trainer `torch`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_policy import SINGLE, make_batch, make_trainer, write_policy

from miles_rl.loss.policy import PolicyLoss
from miles_rl.trainer.checkpoint import STATE_FILE, stored_tensors
from miles_rl.trainer.schedule import lr_factor
from miles_rl.trainer.torch import TorchTrainer
from miles_rl.weights.checksum import checksum

NO_OFFLOAD = {"optimizer": "none"}


def train(trainer: TorchTrainer, seeds: range) -> list[dict[str, float]]:
    metrics = [dict(trainer.step(make_batch(np.random.default_rng(seed)))) for seed in seeds]
    for one in metrics:
        one.pop("perf/train_s")
    return metrics


def weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    assert trainer._session is not None
    return dict(trainer._session._model.named_parameters())


def test_a_plan_can_make_one_without_loading_torch() -> None:
    code = (
        "import sys\n"
        "from miles_rl.loss.policy import PolicyLoss\n"
        "from miles_rl.trainer.torch import TorchTrainer\n"
        f"TorchTrainer(PolicyLoss(), parallelism={SINGLE}, offload={NO_OFFLOAD}, lr=1.0)\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"parallelism": SINGLE | {"tensor": 2}},
            "parallelism.tensor: 2; trainer=torch is one process on one device: give 1",
        ),
        (
            {"parallelism": {"tensr": 1}},
            "parallelism: tensr; did you mean 'tensor'? have data, tensor, pipeline, context, expert",
        ),
        ({"offload": {"optimizer": "cpu"}}, "offload.optimizer: cpu; trainer=torch keeps it on its device: give none"),
        ({"lr": 0.0}, "trainer.lr: 0.0; give a number above 0"),
        ({"betas": (0.9, 1.0)}, "trainer.betas: 1.0; give a number at least 0 and at most 0.999999"),
        ({"lr_schedule": "cosin"}, "trainer.lr_schedule: cosin; did you mean 'cosine'? have constant, linear, cosine"),
        (
            {"lr_schedule": "cosine"},
            "trainer.schedule_steps: null; lr_schedule=cosine needs the number of steps",
        ),
        (
            {"lr_schedule": "linear", "schedule_steps": 3, "warmup_steps": 3},
            "trainer.warmup_steps: 3; the schedule has only 3 optimizer steps: give fewer",
        ),
        ({"temperature": 0.0}, "trainer.temperature: 0.0; give a number above 0"),
        ({"optimizer_steps_per_batch": 0}, "trainer.optimizer_steps_per_batch: 0; give a number at least 1"),
        ({"dtype": "float16"}, "trainer.dtype: float16; did you mean 'bfloat16'? have float32, bfloat16"),
    ],
)
def test_an_option_that_cannot_be_meant_gives_one_line(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        make_trainer(PolicyLoss(), **options)
    assert str(caught.value) == line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_cuda_device_is_told_with_the_remedy(tmp_path: Path) -> None:
    trainer = make_trainer(PolicyLoss(), device="cuda")
    with pytest.raises(ValueError, match=r"^trainer\.device: cuda; torch sees no CUDA device: give cpu or auto$"):
        trainer.load(write_policy(tmp_path), None)


def test_schedules_rise_and_fall_and_never_reach_zero_inside() -> None:
    constant = [lr_factor("constant", step, 4, None) for step in range(6)]
    assert constant == [0.25, 0.5, 0.75, 1, 1, 1]
    linear = [lr_factor("linear", step, 2, 6) for step in range(6)]
    assert linear == [0.5, 1, 1, 0.75, 0.5, 0.25]
    cosine = [lr_factor("cosine", step, 0, 4) for step in range(4)]
    assert cosine == pytest.approx([1, 0.8535534, 0.5, 0.1464466])


def test_a_trainer_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="trainer: used before load"):
        make_trainer(PolicyLoss()).export(str(tmp_path))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_is_a_complete_folder_with_the_checksum_of_its_file(tmp_path: Path, dtype: str, tied: bool) -> None:
    source = Path(write_policy(tmp_path / "source", tie_word_embeddings=tied))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        (source / name).write_text(f"content of {name}")
    (source / "notes.txt").write_text("not part of a model")
    trainer = make_trainer(PolicyLoss(), dtype=dtype)
    trainer.load(str(source), None)
    train(trainer, range(1))
    target = tmp_path / "exports" / "v000001"
    digest = trainer.export(str(target))
    assert [p.name for p in target.parent.iterdir()] == ["v000001"]
    assert (target / "tokenizer.json").read_text() == "content of tokenizer.json"
    assert sorted(p.name for p in target.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((target / "config.json").read_text())["dtype"] == dtype
    stored = dict(stored_tensors(target))
    assert digest == checksum(stored.items())
    assert ("lm_head.weight" in stored) is not tied
    assert {t.dtype for t in stored.values()} == {getattr(torch, dtype)}
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert reloaded.dtype == getattr(torch, dtype)
    for name, parameter in weights(trainer).items():
        assert torch.equal(reloaded.get_parameter(name), parameter.to(reloaded.dtype))


def test_an_export_replaces_an_older_one_whole(tmp_path: Path) -> None:
    trainer = make_trainer(PolicyLoss())
    trainer.load(write_policy(tmp_path / "source"), None)
    first = trainer.export(str(tmp_path / "out"))
    (tmp_path / "out" / "leftover").write_text("old")
    assert trainer.export(str(tmp_path / "out")) == first
    assert not (tmp_path / "out" / "leftover").exists()
    train(trainer, range(1))
    assert trainer.export(str(tmp_path / "out")) != first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def test_weights_that_are_not_finite_are_never_exported(tmp_path: Path) -> None:
    trainer = make_trainer(PolicyLoss())
    trainer.load(write_policy(tmp_path / "source"), None)
    name, parameter = next(iter(weights(trainer).items()))
    with torch.no_grad():
        parameter[3] = float("nan")
    with pytest.raises(ValueError, match=rf"tensor '{name}' holds a NaN"):
        trainer.export(str(tmp_path / "out"))
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        {"optimizer_steps_per_batch": 3, "lr_schedule": "cosine", "schedule_steps": 8, "warmup_steps": 2},
    ],
)
def test_a_run_that_is_saved_and_resumed_goes_on_bit_by_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    source = write_policy(tmp_path / "source")
    straight = make_trainer(PolicyLoss(kl_coef=0.01), **options)
    straight.load(source, None)
    train(straight, range(3))
    straight.export(str(tmp_path / "checkpoint" / "model"))
    straight.save(str(tmp_path / "checkpoint"))
    expected = train(straight, range(3, 6))

    torch.manual_seed(123)
    resumed = make_trainer(PolicyLoss(kl_coef=0.01), **options)
    resumed.load(str(tmp_path / "checkpoint" / "model"), str(tmp_path / "checkpoint"))
    assert train(resumed, range(3, 6)) == expected
    assert all(torch.equal(p, weights(straight)[name]) for name, p in weights(resumed).items())

    fresh = make_trainer(PolicyLoss(kl_coef=0.01), **options)
    fresh.load(str(tmp_path / "checkpoint" / "model"), None)
    assert train(fresh, range(3, 6)) != expected


def test_every_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    import random

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    source = write_policy(tmp_path / "source")
    trainer = make_trainer(PolicyLoss(), seed=11)
    trainer.load(source, None)
    first = draw()
    trainer.save(str(tmp_path))
    second = draw()
    trainer.load(source, str(tmp_path))
    assert draw() == second
    trainer.load(source, None)
    assert draw() == first


def test_options_of_the_new_run_win_over_those_of_the_checkpoint(tmp_path: Path) -> None:
    source = write_policy(tmp_path / "source")
    trainer = make_trainer(PolicyLoss())
    trainer.load(source, None)
    trainer.save(str(tmp_path))
    slower = make_trainer(PolicyLoss(), lr=1e-5)
    slower.load(source, str(tmp_path))
    assert train(slower, range(1))[0]["train/lr"] == 1e-5


def test_a_missing_or_wrong_checkpoint_is_an_error_and_never_a_fresh_start(tmp_path: Path) -> None:
    source = write_policy(tmp_path / "source")
    trainer = make_trainer(PolicyLoss())
    trainer.load(source, None)
    with pytest.raises(FileNotFoundError, match=rf"typo holds no state of a trainer \({STATE_FILE} is missing\)"):
        trainer.load(source, str(tmp_path / "typo"))
    trainer.save(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match="are not those that the checkpoint was saved with"):
        trainer.load(write_policy(tmp_path / "other", seed=1), str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"belongs to another model: model\.layers\.2"):
        trainer.load(write_policy(tmp_path / "deeper", num_hidden_layers=3), str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"^trainer\.dtype: bfloat16; the checkpoint has float32: give that$"):
        make_trainer(PolicyLoss(), dtype="bfloat16").load(source, str(tmp_path / "saved"))
    state = tmp_path / "saved" / STATE_FILE
    state.write_bytes(state.read_bytes()[: state.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"{STATE_FILE} cannot be read: .*; take an older checkpoint$"):
        trainer.load(source, str(tmp_path / "saved"))
