"""What can be drawn, how often, and which log-probability is reported."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from miles_rl.engine.embedded.request import Request, SamplingParams
from miles_rl.engine.embedded.sampling import sample

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -8.0])


def requests(count: int, **sampling: Any) -> list[Request]:
    return [Request(str(i), [1], SamplingParams(seed=i, **sampling)) for i in range(count)]


def draw(count: int, **sampling: Any) -> tuple[list[int], list[float]]:
    return sample(LOGITS.expand(count, -1), requests(count, **sampling))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_their_probability_says(temperature: float) -> None:
    tokens, _ = draw(8_000, temperature=temperature)
    wanted = torch.softmax(LOGITS / temperature, -1)
    got = torch.bincount(torch.tensor(tokens), minlength=5) / len(tokens)
    error = 4 * torch.sqrt(wanted * (1 - wanted) / len(tokens))
    assert bool(((got - wanted).abs() <= error + 1e-4).all())


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 5}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.6}, {0}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_p": 0.95}, {0, 1, 2}),
        ({"min_p": 0.3}, {0, 1}),
        ({"top_k": 3, "top_p": 0.7}, {0, 1}),
        ({"top_k": 2, "top_p": 0.95}, {0, 1}),
    ],
)
def test_filters_keep_exactly_their_tokens(sampling: dict[str, Any], allowed: set[int]) -> None:
    tokens, _ = draw(4000, temperature=1.0, **sampling)
    assert set(tokens) - {4} == allowed - {4}


def test_the_logprob_is_after_temperature_and_before_filters() -> None:
    tokens, logprobs = draw(50, temperature=0.7, top_k=2, top_p=0.9)
    table = torch.log_softmax(LOGITS / 0.7, -1)
    assert logprobs == pytest.approx([float(table[token]) for token in tokens], abs=1e-6)


def test_greedy_takes_the_best_and_mixes_with_others_in_one_batch() -> None:
    mixed = requests(3, top_k=1) + requests(200, temperature=5.0)
    tokens, logprobs = sample(LOGITS.expand(len(mixed), -1), mixed)
    assert tokens[:3] == [0, 0, 0]
    assert logprobs[:3] == pytest.approx([float(torch.log_softmax(LOGITS, -1)[0])] * 3)
    assert len(set(tokens[3:])) > 2


def test_filters_act_on_their_own_row_only() -> None:
    mixed = requests(2000, temperature=3.0) + requests(2000, temperature=3.0, top_k=2)
    tokens, _ = sample(LOGITS.expand(len(mixed), -1), mixed)
    assert len(set(tokens[:2000])) > 3
    assert set(tokens[2000:]) == {0, 1}


def test_banned_tokens_wait_for_the_minimum_and_the_rest_is_normalised() -> None:
    banned = {"banned_until_min": frozenset({0}), "min_new_tokens": 1}
    tokens, logprobs = draw(500, **banned)
    assert 0 not in tokens
    rest = torch.log_softmax(LOGITS[1:], -1)
    assert logprobs == pytest.approx([float(rest[token - 1]) for token in tokens], abs=1e-6)
    late = requests(500, **banned)
    for request in late:
        request.ids.append(3)
    assert 0 in sample(LOGITS.expand(500, -1), late)[0]


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((2000, 6), float("-inf"))
    logits[:, 2] = 0.0
    assert set(sample(logits, requests(2000))[0]) == {2}


def test_a_row_that_is_not_finite_gives_nan_and_leaves_the_others() -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 2] = float("nan")
    _, logprobs = sample(logits, requests(3))
    assert [math.isnan(value) for value in logprobs] == [False, True, False]
