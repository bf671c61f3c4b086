"""The warm-started policy: made once per recipe, and never stale."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from transformers import Qwen3ForCausalLM

from miles_rl.model.recipe import Architecture, WarmStartOptions, recipe_key
from miles_rl.model.warm_started import RECIPE, SHIPPED, WarmStarted, is_intact, write_shipped
from miles_rl.rollout.chat import ChatRenderer
from sandbox_env.suites.base import Demonstration, DemoTurn
from sandbox_env.task import Task

CONF = Path(__file__).parents[2] / "conf"
SHAPE = Architecture(
    hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, context_length=128
)
OPTIONS = WarmStartOptions(num_demonstrations=8, mistake_rate=0.5, steps=3, batch_size=4, learning_rate=1e-3, seed=0)


class Copies:
    """A suite that has demonstrations of one family and no tasks."""

    def __init__(self, verb: str = "Copy") -> None:
        self._verb = verb

    def tasks(self, split: str) -> list[Task]:
        raise ValueError(f"suite: no split {split}")

    def demonstrations(self, count: int, *, seed: int, mistake_rate: float) -> Sequence[Demonstration]:
        wrong = int(count * mistake_rate)
        return [
            Demonstration(
                "copy",
                f"{self._verb} kastel{i}.txt to lorin.md.",
                (DemoTurn(f"{'mv' if i < wrong else 'cp'} kastel{i}.txt lorin.md", ""),),
                mistaken=i < wrong,
            )
            for i in range(seed, seed + count)
        ]


def source(cache: Path) -> WarmStarted:
    return WarmStarted(SHAPE, 280, OPTIONS, cache_dir=str(cache))


def test_the_policy_is_trained_once_and_then_taken_from_the_cache(tmp_path: Path) -> None:
    steps: list[int] = []
    first = source(tmp_path).prepare(Copies(), lambda step, _steps, _loss: steps.append(step))
    assert steps == [1, 2, 3]
    second = source(tmp_path).prepare(Copies(), lambda step, _steps, _loss: pytest.fail("trained again"))
    assert second == first
    assert Path(first).name == source(tmp_path).key(Copies())


def test_the_folder_is_a_complete_hugging_face_model(tmp_path: Path) -> None:
    folder = source(tmp_path).prepare(Copies())
    model = Qwen3ForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    renderer = ChatRenderer(folder)
    assert renderer.context_length == 128
    ids = renderer.prompt([{"role": "user", "content": "Copy kastel1.txt to lorin.md."}])
    assert model(input_ids=torch.tensor([ids])).logits.shape == (1, len(ids), 280)
    assert model.generation_config.eos_token_id == renderer.stop_token_ids[0]


def test_two_trainings_of_one_recipe_give_the_same_files(tmp_path: Path) -> None:
    files = [
        json.loads((Path(source(tmp_path / name).prepare(Copies())) / RECIPE).read_text())["files"] for name in "ab"
    ]
    assert files[0] == files[1]
    assert "model.safetensors" in files[0]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", RECIPE])
def test_a_damaged_file_is_made_again(tmp_path: Path, name: str) -> None:
    folder = Path(source(tmp_path).prepare(Copies()))
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-20])
    assert source(tmp_path).prepare(Copies()) == str(folder)
    assert is_intact(folder, folder.name)
    assert name == RECIPE or (folder / name).read_bytes() == content


def test_a_training_that_fails_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    def interrupt(step: int, steps: int, loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        source(tmp_path).prepare(Copies(), interrupt)
    assert list((tmp_path / "warm_start").iterdir()) == []


def test_training_leaves_the_callers_random_state_and_threads_alone(tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected, threads = torch.rand(3), torch.get_num_threads()
    torch.manual_seed(7)
    source(tmp_path).prepare(Copies())
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


def test_the_key_changes_with_everything_that_determines_the_policy() -> None:
    def key(
        shape: Architecture = SHAPE, vocab: int = 280, options: WarmStartOptions = OPTIONS, verb: str = "Copy"
    ) -> str:
        return recipe_key(shape, vocab, options, Copies(verb).demonstrations(4, seed=0, mistake_rate=0.5))

    keys = [key(), key(vocab=281), key(verb="Duplicate")]
    for field in dataclasses.fields(SHAPE):
        keys.append(key(shape=dataclasses.replace(SHAPE, **{field.name: getattr(SHAPE, field.name) + 1})))
    for field in dataclasses.fields(OPTIONS):
        keys.append(key(options=dataclasses.replace(OPTIONS, **{field.name: getattr(OPTIONS, field.name) * 2 or 1})))
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]


def test_the_cache_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILES_CACHE", str(tmp_path / "here"))
    folder = WarmStarted(SHAPE, 280, OPTIONS).prepare(Copies())
    assert Path(folder).parent == tmp_path / "here" / "warm_start"


def test_the_shipped_policy_is_the_one_of_the_default_config() -> None:
    tiny = instantiate(OmegaConf.load(CONF / "model" / "tiny.yaml"), _convert_="all")
    suite = instantiate(OmegaConf.load(CONF / "suite" / "minibench.yaml"), _convert_="all")
    remedy = "run `python -m miles_rl.model.warm_started` and commit the shipped folder"
    assert is_intact(SHIPPED / "tiny", tiny.key(suite)), remedy
    assert tiny.prepare(suite, lambda *_: pytest.fail("trained")) == str(SHIPPED / "tiny")


def test_the_command_that_remakes_the_shipped_policy_replaces_it(tmp_path: Path) -> None:
    config = OmegaConf.load(CONF / "model" / "tiny.yaml")
    config.vocab_size, config.warm_start.num_demonstrations, config.warm_start.steps = 512, 200, 2
    OmegaConf.save(config, tmp_path / "model.yaml")
    target = tmp_path / "shipped" / "tiny"
    target.mkdir(parents=True)
    (target / "old").touch()
    write_shipped(tmp_path / "model.yaml", CONF / "suite" / "minibench.yaml", target)
    suite = instantiate(OmegaConf.load(CONF / "suite" / "minibench.yaml"), _convert_="all")
    assert is_intact(target, instantiate(config, _convert_="all").key(suite))
    assert [path.name for path in target.parent.iterdir()] == ["tiny"]
    assert not (target / "old").exists()


def test_the_shipped_policy_is_at_most_five_megabytes() -> None:
    assert sum(path.stat().st_size for path in (SHIPPED / "tiny").iterdir()) <= 5_000_000
