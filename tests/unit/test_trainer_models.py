"""Any causal language model of transformers: small ones of several architectures against their own logits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_policy import VOCAB_SIZE, make_trajectory, write_policy

from miles_rl.batch.micro_batch import split
from miles_rl.batch.rows import Rows
from miles_rl.trainer.policy_model import PolicyModel

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def small(**changes: Any) -> dict[str, Any]:
    return SMALL | changes


ARCHITECTURES = {
    "llama_untied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=False),
    "gemma2_softcap": lambda: transformers.Gemma2Config(**SMALL, query_pre_attn_scalar=8, sliding_window=6),
    "cohere_scaled": lambda: transformers.CohereConfig(**SMALL, logit_scale=0.3),
    "granite_scaled": lambda: transformers.GraniteConfig(**SMALL, logits_scaling=4.0),
    "gpt2_learned_positions": lambda: transformers.GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "phi_biased_head": lambda: transformers.PhiConfig(**small(num_key_value_heads=2)),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, decoder_sparse_step=1
    ),
}


def read(folder: str, temperature: float = 1.0, **options: Any) -> PolicyModel:
    fixed = {"device": torch.device("cpu"), "compute_dtype": torch.float32, "chunk_tokens": 5}
    return PolicyModel(folder, temperature=temperature, **(fixed | options))


def save(config: Any, folder: Path) -> str:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.0)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_logprobs_equal_those_of_the_model_itself(name: str, layout: Any, tmp_path: Path) -> None:
    folder = save(ARCHITECTURES[name](), tmp_path)
    temperature = 0.8
    model = read(folder, temperature)
    rng = np.random.default_rng(0)
    trajectories = [make_trajectory(rng, spans=((3, 2), (2, 3))), *(make_trajectory(rng) for _ in range(3))]
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    for micro in split(Rows.of(trajectories), range(4), layout, 25):
        got = micro.scatter(model.logprobs(micro)[0].detach())
        for row, number in enumerate(micro.rows.tolist()):
            ids = torch.from_numpy(trajectories[number].token_ids).long()
            with torch.no_grad():
                every = torch.log_softmax(plain(ids[None]).logits[0] / temperature, dim=-1)
            where = np.flatnonzero(trajectories[number].loss_mask)
            wanted = every[where - 1, ids[where]]
            assert torch.allclose(got[row, : len(where)], wanted, atol=2e-5)


def test_an_unknown_way_to_compute_logits_is_refused(tmp_path: Path) -> None:
    config = transformers.RecurrentGemmaConfig(**small(num_hidden_layers=3), lru_width=16, logits_soft_cap=0.5)
    folder = save(config, tmp_path)
    with pytest.raises(ValueError, match=r"^trainer: RecurrentGemmaForCausalLM computes its logits in a way that"):
        read(folder)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere is no Hugging Face folder: it has no config\.json"):
        read(str(tmp_path / "nowhere"))


def test_dropout_is_off_so_that_logprobs_are_those_of_the_engine(tmp_path: Path) -> None:
    model = read(write_policy(tmp_path, attention_dropout=0.9))
    micro = split(Rows.of([make_trajectory(np.random.default_rng(0))]), [0], "padded", 100)[0]
    first, second = model.logprobs(micro)[0], model.logprobs(micro)[0]
    assert first.requires_grad
    assert torch.equal(first, second)


def test_a_model_in_bfloat16_keeps_float32_weights(tmp_path: Path) -> None:
    folder = write_policy(tmp_path)
    micro = split(Rows.of([make_trajectory(np.random.default_rng(0))]), [0], "padded", 100)[0]
    exact = read(folder).logprobs(micro)[0]
    rounded_model = read(folder, compute_dtype=torch.bfloat16)
    rounded, entropy = rounded_model.logprobs(micro)
    assert {p.dtype for _, p in rounded_model.named_parameters()} == {torch.float32}
    assert rounded.dtype == entropy.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    assert torch.allclose(rounded, exact, atol=0.1)
