"""A Hugging Face folder of the user's is checked before anything starts on it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from miles_rl.model.checkpoint import HfCheckpoint
from miles_rl.model.recipe import Architecture
from miles_rl.model.tokenizer import train_tokenizer
from miles_rl.trainer.warm_start import build_model

SHAPE = Architecture(
    hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, context_length=128
)


class NoSuite:
    """Stands where a suite does; a checkpoint asks it for nothing."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model: Qwen3ForCausalLM = build_model(SHAPE, 264, pad_token_id=0, eos_token_id=4)
    model.save_pretrained(tmp_path / "policy")
    train_tokenizer(["ls"], vocab_size=264, context_length=128).save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def prepare(path: Path | str) -> str:
    return HfCheckpoint(str(path)).prepare(NoSuite())  # type: ignore[arg-type]


def test_a_complete_folder_is_used_where_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepare(folder) == str(folder)
    monkeypatch.chdir(folder.parent)
    assert prepare("policy") == str(folder)


def test_a_sharded_folder_is_complete_only_with_every_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ValueError, match=r"^model\.path: .*; it lacks model-00002-of-00002\.safetensors"):
        prepare(folder)
    (folder / "model-00002-of-00002.safetensors").touch()
    assert prepare(folder) == str(folder)


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(ValueError, match=r"^model\.path: /no/such/model; no such folder, give one"):
        prepare("/no/such/model")


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"^model\.path: .*; it lacks model\.safetensors"):
        prepare(folder)


def test_a_folder_without_a_chat_template_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"^model\.path: .*; it has no chat template"):
        prepare(folder)


def test_every_refusal_is_one_line(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^model\.path: ") as refusal:
        prepare(folder)
    assert "\n" not in str(refusal.value)
