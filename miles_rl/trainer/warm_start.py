"""The supervised stage before reinforcement learning: imitate demonstrations, as whole conversations on token ids.

The ids are made by the renderer that the rollout uses, so that the policy meets the same tokens later. Only its own
tokens are learned: instructions and observations are context.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from miles_rl.model.base import Progress
from miles_rl.model.recipe import Architecture, WarmStartOptions
from miles_rl.rollout.chat import ChatRenderer
from sandbox_env.episode import COMPLETION_MARK, observation_of
from sandbox_env.sandbox import ExecResult
from sandbox_env.suites.base import Demonstration, DemoTurn

OBSERVATION_CHARS = 2000
WARM_UP = 0.05
FINAL_RATE = 0.02
NUM_PARTS = 2
"""A batch is run in parts of like length, so that less of it is padding."""


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation: `token_ids` [T] and `policy_mask` [T], true where the policy wrote the token."""

    token_ids: list[int]
    policy_mask: list[bool]


def render_demonstration(renderer: ChatRenderer, demonstration: Demonstration) -> Example:
    """The ids of a demonstration, as a rollout would have made them."""
    ids = renderer.prompt([{"role": "user", "content": demonstration.instruction.strip()}])
    mask = [False] * len(ids)
    last = len(demonstration.turns) - 1
    for index, turn in enumerate(demonstration.turns):
        output = renderer.reply(reply_text(turn.command, complete=index == last))
        new_ids: list[int] = []
        if index < last:
            keep, new_ids = renderer.continuation(output, [{"role": "tool", "content": observation_text(turn)}])
            output = output[:keep]
        ids += output + new_ids
        mask += [True] * len(output) + [False] * len(new_ids)
    return Example(ids, mask)


def texts_of(demonstrations: Iterable[Demonstration]) -> Iterator[str]:
    """Every text of the demonstrations, in order: what the tokenizer learns from."""
    for demonstration in demonstrations:
        yield demonstration.instruction.strip()
        for turn in demonstration.turns:
            yield turn.command
            yield observation_text(turn)


def reply_text(command: str, *, complete: bool) -> str:
    """A reply with one fenced command; the last one of a task also says that it is done."""
    return f"```bash\n{command}\n```" + (f"\n{COMPLETION_MARK}" if complete else "")


def observation_text(turn: DemoTurn) -> str:
    """What the agent loop would have told of the turn's command."""
    return observation_of(ExecResult(turn.exit_code, turn.observation), OBSERVATION_CHARS, timeout_s=0.0)


def build_model(
    architecture: Architecture, vocab_size: int, *, pad_token_id: int, eos_token_id: int
) -> Qwen3ForCausalLM:
    """A Qwen3 model with random float32 weights from torch's current seed."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.intermediate_size,
        num_hidden_layers=architecture.num_layers,
        num_attention_heads=architecture.num_heads,
        num_key_value_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        max_position_embeddings=architecture.context_length,
        tie_word_embeddings=True,
        pad_token_id=pad_token_id,
        eos_token_id=eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def train_warm_start(
    model: Qwen3ForCausalLM, examples: Sequence[Example], options: WarmStartOptions, progress: Progress | None = None
) -> float:
    """Train `model` in place; returns the mean loss (nats per policy token) of the last tenth of the steps.

    The same arguments give the same weights on one kind of machine. Raises `ValueError` if an example is longer
    than the model's context.
    """
    longest = max(len(e.token_ids) for e in examples)
    if longest > model.config.max_position_embeddings:
        raise ValueError(
            f"model.architecture.context_length: {model.config.max_position_embeddings}; the longest demonstration has"
            f" {longest} tokens, give at least that"
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    batches = _batches(examples, options)
    losses: list[float] = []
    model.train()
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * _one_cycle(step, options.steps)
        optimizer.zero_grad()
        loss = _backward(model, next(batches))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss)
        if progress is not None:
            progress(step + 1, options.steps, losses[-1])
    model.eval()
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)


def _backward(model: Qwen3ForCausalLM, parts: Sequence[Sequence[Example]]) -> float:
    """Gradients of the mean loss per policy token over all parts; returns that mean."""
    count = sum(num_policy_tokens(part) for part in parts)
    total = 0.0
    for part in parts:
        loss = negative_log_likelihood(model, part) / count
        loss.backward()
        total += loss.item()
    return total


def save_weights(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write `model.safetensors`. The output layer is the embedding, so it is not stored twice."""
    tensors = {name: t.contiguous() for name, t in model.state_dict().items() if name != "lm_head.weight"}
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def _one_cycle(step: int, steps: int) -> float:
    """Share of the peak rate: a linear rise over `WARM_UP` of the steps, then half a cosine down to `FINAL_RATE`."""
    rise = max(1, round(WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    fall = (step - rise) / max(1, steps - rise)
    return FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * fall)) / 2


def _batches(examples: Sequence[Example], options: WarmStartOptions) -> Iterator[list[list[Example]]]:
    """Endless batches of random examples, each cut into parts of like length; every epoch in a new order."""
    rng = random.Random(options.seed)
    order = list(range(len(examples)))
    size = options.batch_size
    part = -(-size // NUM_PARTS)
    while True:
        rng.shuffle(order)
        for start in range(0, len(order), size):
            batch = sorted((examples[i] for i in order[start : start + size]), key=lambda e: len(e.token_ids))
            yield [batch[i : i + part] for i in range(0, len(batch), part)]


def negative_log_likelihood(model: Qwen3ForCausalLM, examples: Sequence[Example]) -> Tensor:
    """Sum over the policy tokens of `examples`, in nats; logits are made for those alone.

    Padding stands on the right, where causal attention keeps it away from every token that counts.
    """
    length = max(len(e.token_ids) for e in examples)
    ids = torch.zeros(len(examples), length, dtype=torch.long)
    mask = torch.zeros(len(examples), length, dtype=torch.bool)
    for row, example in enumerate(examples):
        ids[row, : len(example.token_ids)] = torch.tensor(example.token_ids)
        mask[row, : len(example.policy_mask)] = torch.tensor(example.policy_mask)
    hidden = model.model(input_ids=ids).last_hidden_state  # [B, T, H]
    logits = model.lm_head(hidden[:, :-1][mask[:, 1:]])  # [policy tokens, V]
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:][mask[:, 1:]], reduction="sum")


def num_policy_tokens(examples: Iterable[Example]) -> int:
    """How many tokens of `examples` the policy wrote."""
    return sum(sum(example.policy_mask) for example in examples)
