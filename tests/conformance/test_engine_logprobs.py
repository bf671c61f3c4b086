"""The engine's log-probabilities equal those of transformers to 1e-4 in float32, however a token comes about."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Http, random_ids, run_to_end, running_engine
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GPT2Config

from miles_rl.engine.embedded.backend import Backend
from miles_rl.engine.embedded.core import EngineCore
from miles_rl.engine.embedded.qwen3_backend import Qwen3Backend
from miles_rl.engine.embedded.random_model import write_random_qwen3
from miles_rl.engine.embedded.request import Request, SamplingParams
from miles_rl.engine.embedded.transformers_backend import TransformersBackend

TOLERANCE = 1e-4
LENGTHS = (1, 2, 15, 16, 17, 31, 64, 127, 128, 129, 300, 700)


class Reference:
    """transformers' own model of a folder."""

    def __init__(self, model_dir: str, dtype: torch.dtype = torch.float32) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int], start: int, temperature: float = 1.0, cache: Any = None) -> list[float]:
        """Log-probability of each of `ids[start:]`; with `cache`, of the tokens before the first of `ids`."""
        logits = self.model(input_ids=torch.tensor([list(ids)]), past_key_values=cache).logits[0].float()
        table = torch.log_softmax(logits / temperature, -1)
        return [float(table[index - 1, ids[index]]) for index in range(start, len(ids))]

    @torch.no_grad()
    def cache(self, ids: Sequence[int]) -> DynamicCache:
        """Keys and values of `ids` under these weights."""
        output = self.model(input_ids=torch.tensor([list(ids)]), past_key_values=DynamicCache(), use_cache=True)
        return copy.deepcopy(output.past_key_values)


def worst(got: Sequence[float], wanted: Sequence[float]) -> float:
    assert len(got) == len(wanted) > 0
    return max(abs(a - b) for a, b in zip(got, wanted, strict=True))


def check(reference: Reference, requests: list[Request]) -> None:
    for request in requests:
        wanted = reference.logprobs(request.ids, request.num_prompt, request.sampling.temperature)
        assert worst(request.logprobs, wanted) < TOLERANCE, request.num_prompt


def work(vocab_size: int, lengths: Sequence[int] = LENGTHS, **sampling: Any) -> list[Request]:
    temperatures = (1.0, 0.6, 1.7)
    return [
        Request(
            str(index),
            random_ids(length, index, vocab_size),
            SamplingParams(max_new_tokens=3 + 7 * index % 40, temperature=temperatures[index % 3], **sampling),
        )
        for index, length in enumerate(lengths)
    ]


VARIANTS: dict[str, dict[str, Any]] = {
    "tied, grouped heads": {},
    "untied, biased, many groups": {
        "tie_word_embeddings": False,
        "attention_bias": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
    "old rope form, one group, wide vocabulary": {
        "rope_parameters": None,
        "rope_theta": 1_000_000.0,
        "num_key_value_heads": 4,
        "vocab_size": 5000,
        "rms_norm_eps": 1e-5,
    },
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_fast_path_agrees_at_all_lengths_in_one_batch(variant: str, deterministic: bool, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    path = write_random_qwen3(tmp_path, **VARIANTS[variant])
    backend = Qwen3Backend(path, deterministic=deterministic)
    core, reference = EngineCore(backend), Reference(path)
    requests = run_to_end(core, work(backend.vocab_size, top_p=0.9, top_k=100))
    check(reference, requests)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_random_qwen3(folder / name, seed) for seed, name in enumerate(("old", "new"))}


@pytest.fixture(scope="module")
def references(models: dict[str, str]) -> dict[str, Reference]:
    return {name: Reference(path) for name, path in models.items()}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 40])
def test_the_batch_size_does_not_change_the_numbers(
    batch: int, deterministic: bool, models: dict[str, str], references: dict[str, Reference]
) -> None:
    torch.set_num_threads(1)
    core = EngineCore(Qwen3Backend(models["old"], deterministic=deterministic), max_running=batch)
    check(references["old"], run_to_end(core, work(524, LENGTHS[:9])))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_prompt_computed_in_pieces_agrees(
    deterministic: bool, models: dict[str, str], references: dict[str, Reference]
) -> None:
    torch.set_num_threads(1)
    core = EngineCore(Qwen3Backend(models["old"], deterministic=deterministic), max_prefill_tokens=50)
    check(references["old"], run_to_end(core, work(524)))


def test_reused_prefixes_agree_over_turns(models: dict[str, str], references: dict[str, Reference]) -> None:
    core = EngineCore(Qwen3Backend(models["old"]))
    requests = run_to_end(core, work(524))
    for turn in range(3):
        more = [
            Request(f"{turn}-{r.rid}", r.ids + random_ids(5 + turn, turn), SamplingParams(max_new_tokens=9))
            for r in requests
        ]
        requests = run_to_end(core, more)
        check(references["old"], requests)
    assert sum(request.num_cached for request in requests) > 0.9 * sum(request.num_prompt - 16 for request in requests)


def test_a_cache_too_small_for_the_work_agrees(models: dict[str, str], references: dict[str, Reference]) -> None:
    core = EngineCore(Qwen3Backend(models["old"], prefix_cache_gib=0.001, running_kv_gib=0.004))
    for seed in range(2):
        requests = run_to_end(core, work(524, LENGTHS[seed:]))
        check(references["old"], requests)


def test_requests_that_share_a_prompt_share_its_computation(
    models: dict[str, str], references: dict[str, Reference]
) -> None:
    core = EngineCore(Qwen3Backend(models["old"]))
    prompt = random_ids(100, 1)
    requests = [Request(str(i), list(prompt), SamplingParams(max_new_tokens=8)) for i in range(6)]
    check(references["old"], run_to_end(core, requests))
    assert [request.num_cached for request in requests] == [0, 96, 96, 96, 96, 96]


def test_prompt_logprobs_agree_with_and_without_a_cached_prefix(
    models: dict[str, str], references: dict[str, Reference]
) -> None:
    core = EngineCore(Qwen3Backend(models["old"]), max_prefill_tokens=64)
    ids = random_ids(200, 3)
    for start in (0, 120, 199):
        request = Request("r", list(ids), SamplingParams(max_new_tokens=2), prompt_logprob_start=start)
        run_to_end(core, [request])
        wanted = references["old"].logprobs(ids, start + 1)
        assert len(request.prompt_logprobs) == len(wanted) == 199 - start
        assert not wanted or worst(request.prompt_logprobs, wanted) < TOLERANCE


def half_way(core: EngineCore, request: Request, num_steps: int) -> None:
    core.waiting.append(request)
    for _ in range(num_steps):
        core.step()


@pytest.mark.parametrize("num_steps", [1, 20])
def test_a_request_that_spans_an_update_goes_on_from_its_old_keys_and_values(
    num_steps: int, models: dict[str, str], references: dict[str, Reference]
) -> None:
    core = EngineCore(Qwen3Backend(models["old"]), weight_version="0")
    request = Request("r", random_ids(70, 5), SamplingParams(max_new_tokens=50))
    half_way(core, request, num_steps)
    core.pause("in_place")
    core.install(core.backend.stage(models["new"]), "1")
    core.resume()
    run_to_end(core, [])
    assert [(s["version"], s["end"]) for s in request.version_spans()] == [("0", num_steps), ("1", 50)]
    switch = request.num_prompt + num_steps
    before = references["old"].logprobs(request.ids[:switch], request.num_prompt)
    cache = references["old"].cache(request.ids[: switch - 1])
    after = references["new"].logprobs(request.ids[switch - 1 :], 1, cache=cache)
    assert worst(request.logprobs, before + after) < TOLERANCE
    assert worst(request.logprobs[num_steps:], references["new"].logprobs(request.ids, switch)) > 0.01


def test_a_retracted_request_is_computed_anew_under_the_new_weights(
    models: dict[str, str], references: dict[str, Reference]
) -> None:
    core = EngineCore(Qwen3Backend(models["old"]), weight_version="0")
    request = Request("r", random_ids(70, 5), SamplingParams(max_new_tokens=50))
    half_way(core, request, 20)
    core.pause("retract")
    core.install(core.backend.stage(models["new"]), "1")
    core.resume()
    run_to_end(core, [])
    switch = request.num_prompt + 20
    assert worst(request.logprobs[:20], references["old"].logprobs(request.ids[:switch], 70)) < TOLERANCE
    assert worst(request.logprobs[20:], references["new"].logprobs(request.ids, switch)) < TOLERANCE
    follow = Request("s", [*request.ids, 5, 6], SamplingParams(max_new_tokens=3))
    check(references["new"], run_to_end(core, [follow]))
    assert follow.num_cached == 112


def test_an_update_drops_what_older_weights_computed(models: dict[str, str], references: dict[str, Reference]) -> None:
    core = EngineCore(Qwen3Backend(models["old"]))
    done = run_to_end(core, work(524, LENGTHS[5:]))
    spanning = Request("r", random_ids(70, 99), SamplingParams(max_new_tokens=50))
    half_way(core, spanning, 10)
    core.install(core.backend.stage(models["new"]), "1")
    run_to_end(core, [])
    again = [Request(r.rid, [*r.ids, 7], SamplingParams(max_new_tokens=5)) for r in (*done, spanning)]
    check(references["new"], run_to_end(core, again))
    assert {request.num_cached for request in again} == {0}


@pytest.fixture(scope="module")
def engine(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Http]:
    with running_engine(models["old"], str(tmp_path_factory.mktemp("logs"))) as replica:
        yield Http(replica.url)


async def test_over_http_logprobs_agree_before_and_after_an_update(
    engine: Http, models: dict[str, str], references: dict[str, Reference]
) -> None:
    for version, name in (("0", "old"), ("1", "new")):
        await engine.post("/update_weights_from_disk", {"model_path": models[name], "weight_version": version})
        prompts = [random_ids(length, length) for length in LENGTHS]
        for _ in range(2):
            results = await asyncio.gather(
                *(engine.generate(prompt, max_new_tokens=20, temperature=0.8, ignore_eos=True) for prompt in prompts)
            )
            for prompt, result in zip(prompts, results, strict=True):
                got = [entry[0] for entry in result["meta_info"]["output_token_logprobs"]]
                wanted = references[name].logprobs(prompt + result["output_ids"], len(prompt), 0.8)
                assert worst(got, wanted) < TOLERANCE
            prompts = [p + r["output_ids"] + [9, 8] for p, r in zip(prompts, results, strict=True)]


async def test_greedy_follows_the_most_likely_tokens_and_reports_temperature_1(
    engine: Http, references: dict[str, Reference], models: dict[str, str]
) -> None:
    await engine.post("/update_weights_from_disk", {"model_path": models["old"]})
    prompt = random_ids(40, 2)
    result = await engine.generate(prompt, temperature=0, max_new_tokens=20, ignore_eos=True)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    wanted = references["old"].model.generate(torch.tensor([prompt]), **options)
    assert result["output_ids"] == wanted[0, 40:].tolist()
    got = [entry[0] for entry in result["meta_info"]["output_token_logprobs"]]
    assert worst(got, references["old"].logprobs(prompt + result["output_ids"], 40)) < TOLERANCE


def test_bfloat16_stays_close_to_transformers_in_bfloat16(models: dict[str, str]) -> None:
    core = EngineCore(Qwen3Backend(models["old"], dtype="bfloat16"))
    reference = Reference(models["old"], torch.bfloat16)
    for request in run_to_end(core, work(524, LENGTHS[:8])):
        wanted = reference.logprobs(request.ids, request.num_prompt, request.sampling.temperature)
        differences = [abs(a - b) for a, b in zip(request.logprobs, wanted, strict=True)]
        assert sum(differences) / len(differences) < 0.1


def other_models() -> dict[str, Any]:
    small = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "eos_token_id": 1}
    sizes = {"intermediate_size": 96, "max_position_embeddings": 1024, "bos_token_id": 0, **small}
    mistral = AutoConfig.for_model("mistral", num_key_value_heads=2, sliding_window=24, head_dim=16, **sizes)
    gpt2 = GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=1024, eos_token_id=1, bos_token_id=0)
    llama = AutoConfig.for_model("llama", num_key_value_heads=2, **sizes)
    return {"llama": llama, "gpt2": gpt2, "mistral with a sliding window": mistral}


def write_other(config: Any, folder: Path, seed: int) -> str:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += 0.08 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral with a sliding window"])
def test_any_other_architecture_agrees_through_transformers(name: str, tmp_path: Path) -> None:
    config = other_models()[name]
    old, new = (write_other(config, tmp_path / str(seed), seed) for seed in range(2))
    backend: Backend = TransformersBackend(old)
    core = EngineCore(backend, max_prefill_tokens=64)
    requests = run_to_end(core, work(300, (1, 7, 40, 100)))
    check(Reference(old), requests)
    more = [Request(r.rid, [*r.ids, 5, 6, 7], SamplingParams(max_new_tokens=5)) for r in requests]
    check(Reference(old), run_to_end(core, more))
    assert all(request.num_cached == request.num_prompt - 4 for request in more)
    before = backend.checksum()
    core.install(backend.stage(new), "1")
    assert backend.checksum() != before
    again = [Request(r.rid, [*r.ids, 8], SamplingParams(max_new_tokens=5)) for r in more]
    check(Reference(new), run_to_end(core, again))
    assert {request.num_cached for request in again} == {0}


def test_both_ways_of_computing_a_qwen3_agree(models: dict[str, str], references: dict[str, Reference]) -> None:
    backends = (TransformersBackend(models["old"]), Qwen3Backend(models["old"]))
    assert backends[0].checksum() == backends[1].checksum()
    requests = [run_to_end(EngineCore(backend), work(524, LENGTHS[:6], top_k=1)) for backend in backends]
    assert [r.ids for r in requests[0]] == [r.ids for r in requests[1]]
    check(references["old"], requests[0])


def test_a_foreign_model_is_served_over_http_and_its_torn_update_refused(tmp_path: Path) -> None:
    old, new = (write_other(other_models()["llama"], tmp_path / str(seed), seed) for seed in range(2))
    weights = Path(new) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    prompt = random_ids(30, 1, 300)
    with running_engine(old, str(tmp_path / "logs")) as replica:
        engine = Http(replica.url)
        status, answer = asyncio.run(engine.post("/update_weights_from_disk", {"model_path": new}))
        result = asyncio.run(engine.generate(prompt, max_new_tokens=10, ignore_eos=True))
    assert (status, answer["success"]) == (400, False)
    got = [entry[0] for entry in result["meta_info"]["output_token_logprobs"]]
    assert worst(got, Reference(old).logprobs(prompt + result["output_ids"], 30)) < TOLERANCE
