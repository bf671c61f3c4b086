"""With `engine.deterministic`, the bits of a reply depend on the weights, its own request and its seed alone."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Http, random_ids, run_to_end, running_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_rl.engine.embedded import determinism
from miles_rl.engine.embedded.__main__ import make_backend, parse_arguments
from miles_rl.engine.embedded.core import EngineCore
from miles_rl.engine.embedded.engine import EmbeddedEngine
from miles_rl.engine.embedded.qwen3_backend import Qwen3Backend
from miles_rl.engine.embedded.random_model import write_random_qwen3
from miles_rl.engine.embedded.request import Request, SamplingParams
from miles_rl.engine.embedded.row_counts import RowCounts
from miles_rl.engine.embedded.weights import WeightsError

Reply = tuple[list[int], list[float], list[float]]

VARIANTS: dict[str, dict[str, Any]] = {
    "tied, two groups": {},
    "untied, biased, eight groups": {
        "tie_word_embeddings": False,
        "attention_bias": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
    "one group, sizes that are no powers of two": {
        "vocab_size": 301,
        "hidden_size": 100,
        "intermediate_size": 150,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 24,
    },
    "very small": {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    },
}
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 33, 60, 100, 127, 129, 170, 255, 300, 520)
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"top_p": 0.9, "top_k": 20},
    {"temperature": 1.3, "min_p": 0.05},
    {"top_k": 1},
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_request(number: int, vocab_size: int) -> Request:
    """A request that is a function of its number; some share the beginning of their prompts, some score it."""
    rng = random.Random(number)
    length = LENGTHS[number % len(LENGTHS)]
    ids = random_ids(length - length // 4, number % 3, vocab_size) + random_ids(length // 4, number, vocab_size)
    sampling = SamplingParams(max_new_tokens=rng.randrange(1, 30), seed=number, **SAMPLING[number % len(SAMPLING)])
    scored = rng.randrange(length) if number % 4 == 0 else None
    return Request(str(number), ids, sampling, prompt_logprob_start=scored)


def reply(request: Request) -> Reply:
    assert request.error is None
    return list(request.ids), list(request.logprobs), list(request.prompt_logprobs)


def alone(backend: Qwen3Backend, number: int) -> Reply:
    backend.clear_cache()
    return reply(run_to_end(EngineCore(backend), [make_request(number, backend.vocab_size)])[0])


def schedule(core: EngineCore, numbers: list[int], rng: random.Random, *, pauses: bool = False) -> dict[int, Reply]:
    """Requests that arrive in order, some at each step, between which generation pauses now and then."""
    requests = {number: make_request(number, core.backend.vocab_size) for number in numbers}
    waiting, at_once = list(numbers), rng.choice([1, 3, len(numbers)])
    while waiting or core.running or core.waiting:
        for _ in range(min(len(waiting), rng.randrange(at_once + 1))):
            core.waiting.append(requests[waiting.pop()])
        if pauses and rng.random() < 0.1:
            core.pause(rng.choice(["in_place", "retract"]))
            core.resume()
        core.step()
    return {number: reply(request) for number, request in requests.items()}


def different(backend: Qwen3Backend, trials: int, seed: int) -> int:
    """Replies of random schedules that are not, bit for bit, what each request gets alone in an empty engine."""
    numbers = list(range(len(LENGTHS)))
    wanted = {number: alone(backend, number) for number in numbers}
    rng, count = random.Random(seed), 0
    for trial in range(trials):
        if trial % 2:
            backend.clear_cache()
        core = EngineCore(
            backend, max_running=rng.choice([2, 5, 64]), max_prefill_tokens=rng.choice([5, 16, 50, 100, 2048])
        )
        got = schedule(core, rng.sample(numbers, len(numbers)), rng)
        count += sum(got[number] != wanted[number] for number in numbers)
    return count


@pytest.mark.parametrize("variant", VARIANTS)
def test_batches_arrivals_pieces_and_prefixes_leave_every_bit_as_it_is(variant: str, tmp_path: Path) -> None:
    backend = Qwen3Backend(write_random_qwen3(tmp_path, **VARIANTS[variant]), deterministic=True)
    assert different(backend, trials=6, seed=0) == 0


def test_the_same_schedules_change_bits_without_it(tmp_path: Path) -> None:
    assert different(Qwen3Backend(write_random_qwen3(tmp_path), deterministic=False), trials=2, seed=0) > 0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_random_qwen3(folder / name, seed) for seed, name in enumerate(("old", "new"))}


@pytest.fixture(scope="module")
def shared(models: dict[str, str]) -> tuple[Qwen3Backend, dict[int, Reply]]:
    """A backend, and what some requests get from it alone."""
    torch.set_num_threads(1)
    backend = Qwen3Backend(models["old"], deterministic=True)
    return backend, {number: alone(backend, number) for number in range(len(LENGTHS))}


@settings(max_examples=12, deadline=None)
@given(numbers=st.permutations(range(len(LENGTHS))), size=st.integers(1, len(LENGTHS)), seed=st.integers(0, 1 << 20))
def test_pausing_and_going_on_leaves_every_bit_as_it_is(
    shared: tuple[Qwen3Backend, dict[int, Reply]], numbers: list[int], size: int, seed: int
) -> None:
    backend, wanted = shared
    rng = random.Random(seed)
    core = EngineCore(backend, max_running=rng.choice([3, 64]), max_prefill_tokens=rng.choice([7, 64, 2048]))
    got = schedule(core, list(numbers[:size]), rng, pauses=True)
    assert got == {number: wanted[number] for number in numbers[:size]}


def test_a_prefix_from_the_cache_is_what_computing_it_again_gives(
    shared: tuple[Qwen3Backend, dict[int, Reply]],
) -> None:
    backend, _ = shared
    backend.clear_cache()
    core, turns = EngineCore(backend), random_ids(40, 1)
    for turn in range(6):
        turns += random_ids(37, turn)
        request = Request("r", list(turns), SamplingParams(max_new_tokens=25, seed=turn))
        run_to_end(core, [request])
        fresh = Request("f", list(turns), SamplingParams(max_new_tokens=25, seed=turn), namespace=f"none {turn}")
        run_to_end(core, [fresh])
        assert reply(request) == reply(fresh)
        assert fresh.num_cached == 0
        assert turn == 0 or request.num_cached >= len(turns) - 37 - 16
        turns = list(request.ids)


@pytest.mark.parametrize("counts", determinism.CANDIDATES[2:])
def test_the_row_counts_of_other_processors_keep_the_promise_too(
    counts: RowCounts, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(determinism, "CANDIDATES", (counts,))
    backend = Qwen3Backend(models["old"])
    if not backend.deterministic:
        pytest.skip("this processor does not have them")
    assert different(backend, trials=1, seed=1) == 0


@given(
    counts=st.one_of(st.sampled_from(determinism.CANDIDATES), st.just(RowCounts(4, 2, 8))),
    count=st.integers(1, 5000),
)
def test_padded_rows_split_into_allowed_parts_and_are_as_few_as_can_be(counts: RowCounts, count: int) -> None:
    def is_allowed(number: int) -> bool:
        rest = number % counts.most
        return rest == 0 or (rest >= counts.least and rest % counts.multiple == 0)

    padded = counts.padded(count)
    assert padded == next(number for number in range(count, count + counts.most) if is_allowed(number))
    assert counts.padded(padded) == padded


async def _ask(engine: Http, numbers: list[int]) -> dict[int, tuple[list[int], list[float]]]:
    async def one(number: int) -> tuple[list[int], list[float]]:
        request = make_request(number, 524)
        options = {"max_new_tokens": 30, "temperature": 0.8, "ignore_eos": True, "sampling_seed": number}
        answer = await engine.generate(request.ids, **options)
        return answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]

    return dict(zip(numbers, await asyncio.gather(*(one(number) for number in numbers)), strict=True))


def test_another_process_with_weights_loaded_later_gives_the_same_bits(models: dict[str, str], tmp_path: Path) -> None:
    async def serially(url: str) -> dict[int, Any]:
        status, info = await Http(url).get("/server_info")
        assert (status, info["deterministic"]) == (200, True)
        return {number: (await _ask(Http(url), [number]))[number] for number in range(12)}

    async def together_after_an_update(url: str) -> dict[int, Any]:
        noise = await _ask(Http(url), [20, 21])
        await Http(url).post("/update_weights_from_disk", {"model_path": models["old"], "weight_version": "1"})
        got = await _ask(Http(url), [*range(12), 22, 23, 24])
        assert noise != await _ask(Http(url), [20, 21])
        return {number: got[number] for number in range(12)}

    with running_engine(models["old"], str(tmp_path / "first"), deterministic=True) as replica:
        first = asyncio.run(serially(replica.url))
    with running_engine(models["new"], str(tmp_path / "second"), deterministic=True) as replica:
        assert asyncio.run(together_after_an_update(replica.url)) == first


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"device": "cuda"}, "engine.device is cuda; set engine.device=cpu"),
        ({"dtype": "bfloat16"}, "engine.dtype is bfloat16; set engine.dtype=float32"),
        ({"backend": "transformers"}, "engine.backend is transformers; set engine.backend=auto"),
        ({"num_threads": 2}, "engine.num_threads is 2; set engine.num_threads=1"),
    ],
)
def test_settings_that_cannot_keep_the_promise_are_refused_in_one_line(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=r"^engine\.deterministic: true; ") as caught:
        EmbeddedEngine(deterministic=True, **options)
    assert str(caught.value).endswith(f"{named} or engine.deterministic=false")
    EmbeddedEngine(**options)


def test_what_only_the_model_or_the_machine_shows_is_refused_or_left_out(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = write_random_qwen3(tmp_path / "narrow", dtype="bfloat16")
    with pytest.raises(WeightsError, match=r"needs the CPU and float32, not cpu and bfloat16; set engine\.determin"):
        Qwen3Backend(narrow, deterministic=True)
    assert not Qwen3Backend(narrow).deterministic
    other = write_random_qwen3(tmp_path / "other", use_sliding_window=True)
    with pytest.raises(WeightsError, match="true; the model has sliding window attention, which only transformers"):
        make_backend(parse_arguments(["--model", other, "--deterministic=true"]))
    monkeypatch.setattr(determinism, "CANDIDATES", ())
    with pytest.raises(WeightsError, match="products of this machine depend on the batch"):
        Qwen3Backend(models["old"], deterministic=True)
    assert not Qwen3Backend(models["old"]).deterministic
