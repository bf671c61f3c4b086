"""How long a training step takes, as a ratio to plain transformers on the same batch in the same run.

    python benchmarks/trainer.py
    python benchmarks/trainer.py --device cuda --dtype bfloat16 --hidden-size 1024 --num-layers 12 --tokens 500 1500

Plain is what one would write by hand: right-padded micro-batches of the same size, sorted by length, `model(input_ids,
labels=...)` with the logits of every token, backward, one AdamW step. The trainer's step is all of
`TorchTrainer.step`: batching, log-probabilities and entropy of the policy's tokens, loss, backward, optimizer, metrics.
The two take turns, and the ratio is that of their medians; below 1 the trainer is the faster one. Times are of the
process's CPU on a CPU, so that other work on the machine does not count, and of the clock on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
import transformers

from miles_rl.batch.partition import by_padded_size
from miles_rl.loss.policy import PolicyLoss
from miles_rl.trainer.torch import TorchTrainer
from miles_rl.types import Batch, Group, Outcome, StopReason, Trajectory

IGNORED = -100


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        config = transformers.Qwen3Config(
            vocab_size=args.vocab_size,
            hidden_size=args.hidden_size,
            intermediate_size=3 * args.hidden_size,
            num_hidden_layers=args.num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=args.hidden_size // 4,
            max_position_embeddings=2 * args.tokens[1],
            tie_word_embeddings=True,
        )
        model = transformers.Qwen3ForCausalLM(config)
        model.save_pretrained(folder)
        print(
            f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M weights, one thread, {args.device}, {args.dtype}"
        )
        for flat_groups in (0, 4):
            compare(args, model, folder, flat_groups)


def compare(args: argparse.Namespace, model: torch.nn.Module, folder: str, flat_groups: int) -> None:
    """Print one line for a batch of which `flat_groups` of 8 groups have equal rewards."""
    batch = make_batch(np.random.default_rng(0), args.vocab_size, args.tokens[0], args.tokens[1], flat_groups)
    trainer = TorchTrainer(
        PolicyLoss(),
        parallelism={"data": 1},
        offload={"optimizer": "none"},
        lr=1e-4,
        device=args.device,
        dtype=args.dtype,
        num_threads=1,
        max_tokens_per_micro_batch=args.micro_batch,
    )
    trainer.load(folder, None)
    plain = plain_step(model.to(args.device), batch, args.micro_batch, args.dtype)

    def ours() -> None:
        trainer.step(batch)

    plain()
    ours()
    times = [(measure(plain, args.device), measure(ours, args.device)) for _ in range(args.repeats)]
    theirs, mine = (statistics.median(column) for column in zip(*times, strict=True))
    num_tokens = sum(len(t.token_ids) for t in batch.trajectories)
    print(
        f"64 trajectories, {num_tokens} tokens, {flat_groups} of 8 groups without variance:"
        f" plain {theirs:.3f} s, trainer {mine:.3f} s, ratio {mine / theirs:.2f}"
    )


def plain_step(model: torch.nn.Module, batch: Batch, micro_batch: int, dtype: str) -> Callable[[], None]:
    """A step of plain supervised training on the same tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    device = next(model.parameters()).device
    sequences = [t.token_ids.astype(np.int64) for t in batch.trajectories]
    masks = [t.loss_mask for t in batch.trajectories]
    parts = by_padded_size([len(s) for s in sequences], micro_batch)

    def step() -> None:
        for part in parts:
            shape = (len(part), max(len(sequences[i]) for i in part))
            input_ids, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, IGNORED)
            for line, i in enumerate(part):
                tokens = torch.from_numpy(sequences[i])
                input_ids[line, : len(tokens)] = tokens
                labels[line, : len(tokens)] = tokens.where(torch.from_numpy(masks[i]), torch.tensor(IGNORED))
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
                output = model(input_ids=input_ids.to(device), labels=labels.to(device), use_cache=False)
            output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(step: Callable[[], None], device: str) -> float:
    """Seconds of one call."""
    if device == "cpu":
        start = time.process_time()
        step()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def make_batch(rng: np.random.Generator, vocab_size: int, shortest: int, longest: int, flat_groups: int) -> Batch:
    """8 groups of 8 episodes of two turns; a third of the tokens are the policy's."""

    def episode(group: int, number: int) -> Trajectory:
        length = int(rng.integers(shortest, longest + 1))
        mask = np.zeros(length, bool)
        mask[length // 2 : length // 2 + length // 6] = mask[length - length // 6 :] = True
        logprobs = np.where(mask, -np.log(vocab_size) + 0.1 * rng.normal(size=length), 0)
        return Trajectory(
            sample_id=f"{group}-{number}",
            group_id=group,
            task=f"task-{group}",
            token_ids=rng.integers(0, vocab_size, length).astype(np.int32),
            loss_mask=mask,
            logprobs=logprobs.astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            reward=float(number % 2 == 0 or group < flat_groups),
            outcome=Outcome.SCORED,
            stop_reason=StopReason.COMPLETED,
        )

    groups = tuple(Group(g, f"task-{g}", tuple(episode(g, i) for i in range(8))) for g in range(8))
    return Batch(groups, 1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--vocab-size", type=int, default=600)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs=2, default=[100, 300], metavar=("SHORTEST", "LONGEST"))
    parser.add_argument("--micro-batch", type=int, default=1024, help="tokens")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
