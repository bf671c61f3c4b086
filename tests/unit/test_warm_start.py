"""The supervised stage: what is learned, and that it is learned the same way each time."""

import json

import pytest
import torch
from transformers import Qwen3ForCausalLM

from miles_rl.model.recipe import Architecture, WarmStartOptions
from miles_rl.model.tokenizer import train_tokenizer
from miles_rl.rollout.chat import ChatRenderer
from miles_rl.trainer.warm_start import (
    Example,
    build_model,
    negative_log_likelihood,
    num_policy_tokens,
    render_demonstration,
    texts_of,
    train_warm_start,
)
from sandbox_env.episode import parse_reply
from sandbox_env.suites.base import Demonstration, DemoTurn

SHAPE = Architecture(
    hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, context_length=256
)
OPTIONS = WarmStartOptions(num_demonstrations=4, mistake_rate=0.0, steps=60, batch_size=4, learning_rate=1e-2, seed=0)
DEMONSTRATIONS = [
    Demonstration("copy", f"Copy {a}.txt to {b}.md.\n", (DemoTurn(f"cp {a}.txt {b}.md", ""),))
    for a, b in (("kastel", "lorin"), ("nedor", "puvin"))
] + [
    Demonstration(
        "look", f"Copy the last line of {a}.txt.", (DemoTurn(f"cat {a}.txt", "x\ny\n", 0), DemoTurn("echo y", "y\n"))
    )
    for a in ("kastel", "nedor")
]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    folder = tmp_path_factory.mktemp("model")
    train_tokenizer(texts_of(DEMONSTRATIONS), vocab_size=280, context_length=256).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 256}))
    return ChatRenderer(str(folder))


def new_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return build_model(SHAPE, 280, pad_token_id=0, eos_token_id=4)


def mean_loss(model: Qwen3ForCausalLM, examples: list[Example]) -> float:
    with torch.no_grad():
        return negative_log_likelihood(model, examples).item() / num_policy_tokens(examples)


def runs(example: Example, wanted: bool) -> list[list[int]]:
    """The stretches of ids whose mask is `wanted`."""
    stretches: list[list[int]] = [[]]
    for token, mask in zip(example.token_ids, example.policy_mask, strict=True):
        if mask is wanted:
            stretches[-1].append(token)
        elif stretches[-1]:
            stretches.append([])
    return [s for s in stretches if s]


def test_the_policys_tokens_are_its_replies_with_their_stop_tokens(renderer: ChatRenderer) -> None:
    example = render_demonstration(renderer, DEMONSTRATIONS[2])
    replies = runs(example, True)
    assert [parse_reply(renderer.decode(r)) for r in replies] == [("cat kastel.txt", False), ("echo y", True)]
    assert [r[-1] for r in replies] == [renderer.stop_token_ids[0]] * 2
    assert example.token_ids[-1] == renderer.stop_token_ids[0]


def test_instructions_and_observations_are_context_only(renderer: ChatRenderer) -> None:
    context = [renderer.decode(s) for s in runs(render_demonstration(renderer, DEMONSTRATIONS[2]), False)]
    assert context == ["Copy the last line of kastel.txt.", "x\ny"]


def test_a_demonstration_is_read_as_the_template_writes_the_conversation(renderer: ChatRenderer) -> None:
    example = render_demonstration(renderer, DEMONSTRATIONS[2])
    text = renderer._native.backend_tokenizer.decode(example.token_ids, skip_special_tokens=False)
    assert text == (
        "<|user|>Copy the last line of kastel.txt.<|assistant|>```bash\ncat kastel.txt\n```<|end|>"
        "<|tool|>x\ny<|assistant|>```bash\necho y\n```\nTASK_COMPLETE<|end|>"
    )


def test_the_loss_is_the_mean_over_policy_tokens_whatever_the_padding(renderer: ChatRenderer) -> None:
    model = new_model()
    examples = [render_demonstration(renderer, d) for d in DEMONSTRATIONS]
    assert len({len(e.token_ids) for e in examples}) > 1
    total, count = 0.0, 0
    for example in examples:
        ids = torch.tensor([example.token_ids])
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1].double(), -1)
        for position in range(1, len(example.token_ids)):
            if example.policy_mask[position]:
                total -= logprobs[position - 1, example.token_ids[position]].item()
                count += 1
    assert mean_loss(model, examples) == pytest.approx(total / count, abs=1e-5)


def test_training_learns_and_reports_each_step(renderer: ChatRenderer) -> None:
    model = new_model()
    examples = [render_demonstration(renderer, d) for d in DEMONSTRATIONS]
    before = mean_loss(model, examples)
    seen: list[tuple[int, int]] = []
    tail = train_warm_start(model, examples, OPTIONS, lambda step, steps, loss: seen.append((step, steps)))
    assert seen == [(step, 60) for step in range(1, 61)]
    assert mean_loss(model, examples) < 0.5 < before
    assert tail < 0.5


def test_the_same_seed_gives_the_same_weights(renderer: ChatRenderer) -> None:
    examples = [render_demonstration(renderer, d) for d in DEMONSTRATIONS]
    weights = []
    for _ in range(2):
        model = new_model()
        train_warm_start(model, examples, OPTIONS)
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_demonstration_longer_than_the_context_is_refused() -> None:
    example = Example([1] * 257, [True] * 257)
    with pytest.raises(ValueError, match=r"^model\.architecture\.context_length: 256; the longest .* 257 tokens"):
        train_warm_start(new_model(), [example], OPTIONS)
