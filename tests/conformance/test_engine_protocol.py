"""The engine's HTTP, checked on a real process: shapes, options, control, bad input."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from engines import FOREVER, Http, random_ids, running_engine
from safetensors.torch import load_file, save_file

from miles_rl.engine.embedded.random_model import write_random_qwen3
from miles_rl.weights.checksum import checksum


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_random_qwen3(folder / name, seed) for seed, name in enumerate(("old", "new"))}


@pytest.fixture(scope="module")
def process(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Http]:
    with running_engine(models["old"], str(tmp_path_factory.mktemp("logs"))) as replica:
        yield Http(replica.url)


@pytest.fixture
async def engine(process: Http, models: dict[str, str]) -> Http:
    """The one process, with old weights in force as version 0, running, idle and with an empty cache."""
    await process.post("/continue_generation", {})
    await process.post("/abort_request", {"rid": "", "abort_all": True})
    await update(process, models["old"], "0")
    await process.until_running(0)
    return process


async def update(engine: Http, model_dir: str, version: str, **more: Any) -> tuple[int, Any]:
    body = {"model_path": model_dir, "weight_version": version, "flush_cache": False, **more}
    return await engine.post("/update_weights_from_disk", body)


async def test_an_answer_has_the_shape_that_sglang_gives(engine: Http) -> None:
    prompt = random_ids(20, 0)
    result = await engine.generate(prompt, rid="me", max_new_tokens=5, ignore_eos=True, return_prompt_token_ids=True)
    meta = result["meta_info"]
    assert result["prompt_token_ids"] == prompt
    assert len(result["output_ids"]) == 5
    assert meta["id"] == "me"
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (20, 5, 0)
    assert meta["weight_version"] == "0"
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 5}]
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in result["output_ids"]]
    assert all(entry[0] < 0 for entry in meta["output_token_logprobs"])
    assert meta["output_token_logprobs_length"] == 5
    assert meta["input_token_logprobs"] == []
    assert meta["e2e_latency"] > 0


async def test_logprobs_are_left_out_unless_asked_for(engine: Http) -> None:
    result = await engine.generate([5, 6], return_logprob=False, max_new_tokens=2)
    assert "output_token_logprobs" not in result["meta_info"]


async def test_a_batch_and_n_answer_with_a_list_prompt_by_prompt(engine: Http) -> None:
    results = await engine.generate([random_ids(9, 1), random_ids(4, 2)], n=2, max_new_tokens=3, ignore_eos=True)
    assert [result["meta_info"]["prompt_tokens"] for result in results] == [9, 9, 4, 4]
    assert isinstance(await engine.generate([random_ids(3, 1)], max_new_tokens=1), list)


async def test_each_prompt_of_a_batch_may_have_its_own_sampling_and_id(engine: Http) -> None:
    params = [{"max_new_tokens": 2, "ignore_eos": True}, {"max_new_tokens": 4, "ignore_eos": True}]
    body = {"input_ids": [[5, 6], [7, 8]], "sampling_params": params, "rid": ["a", "b"]}
    status, results = await engine.post("/generate", body)
    assert status == 200
    assert [(r["meta_info"]["id"], len(r["output_ids"])) for r in results] == [("a", 2), ("b", 4)]


async def test_a_stop_token_ends_the_reply_and_is_part_of_it(engine: Http) -> None:
    prompt = random_ids(12, 3)
    free = await engine.generate(prompt, temperature=0, max_new_tokens=12, ignore_eos=True)
    stop = free["output_ids"][6]
    first = free["output_ids"].index(stop)
    result = await engine.generate(prompt, temperature=0, max_new_tokens=12, ignore_eos=True, stop_token_ids=[stop])
    assert result["output_ids"] == free["output_ids"][: first + 1]
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


ALMOST_UNIFORM = {"n": 64, "max_new_tokens": 100, "temperature": 100.0, "sampling_seed": 0}


async def test_the_models_own_end_token_stops_unless_ignored(engine: Http) -> None:
    results = await engine.generate(random_ids(8, 4), **ALMOST_UNIFORM)
    stopped = [r for r in results if r["meta_info"]["finish_reason"]["type"] == "stop"]
    assert stopped
    assert all(r["output_ids"][-1] == 1 and 1 not in r["output_ids"][:-1] for r in stopped)
    results = await engine.generate(random_ids(8, 4), ignore_eos=True, **ALMOST_UNIFORM)
    assert {len(r["output_ids"]) for r in results} == {100}
    assert any(1 in r["output_ids"] for r in results)


async def test_stop_tokens_cannot_come_before_min_new_tokens(engine: Http) -> None:
    results = await engine.generate(random_ids(8, 4), min_new_tokens=50, **ALMOST_UNIFORM)
    assert all(1 not in r["output_ids"][:50] for r in results)
    assert any(1 in r["output_ids"] for r in results)


async def test_no_new_tokens_scores_the_prompt_only(engine: Http) -> None:
    prompt = random_ids(30, 5)
    result = await engine.generate(prompt, max_new_tokens=0, logprob_start_len=4)
    assert result["output_ids"] == []
    entries = result["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == prompt[4:]
    assert entries[0][0] is None
    assert all(entry[0] < 0 for entry in entries[1:])


async def test_a_seed_repeats_its_tokens_whatever_else_runs(engine: Http) -> None:
    prompt = random_ids(25, 6)
    alone = await engine.generate(prompt, max_new_tokens=20, sampling_seed=7, ignore_eos=True)
    crowd = [engine.generate(random_ids(10 + i, i), max_new_tokens=20) for i in range(12)]
    again, *_ = await asyncio.gather(
        engine.generate(prompt, max_new_tokens=20, sampling_seed=7, ignore_eos=True), *crowd
    )
    other = await engine.generate(prompt, max_new_tokens=20, sampling_seed=8, ignore_eos=True)
    assert alone["output_ids"] == again["output_ids"]
    assert alone["output_ids"] != other["output_ids"]


async def test_samples_of_one_seeded_prompt_differ_from_one_another(engine: Http) -> None:
    results = await engine.generate(random_ids(9, 7), n=4, max_new_tokens=16, sampling_seed=1, ignore_eos=True)
    assert len({tuple(r["output_ids"]) for r in results}) == 4


async def test_samples_without_a_seed_are_independent(engine: Http) -> None:
    prompt = random_ids(9, 7)
    together = await engine.generate(prompt, n=4, max_new_tokens=16, ignore_eos=True)
    apart = [await engine.generate(prompt, max_new_tokens=16, ignore_eos=True) for _ in range(4)]
    assert len({tuple(r["output_ids"]) for r in [*together, *apart]}) == 8


async def events(engine: Http, body: Any) -> list[Any]:
    async with aiohttp.ClientSession() as session, session.post(engine.url + "/generate", json=body) as response:
        assert response.content_type == "text/event-stream"
        lines = [line async for line in response.content if line.strip()]
    assert all(line.startswith(b"data: ") for line in lines)
    assert lines[-1] == b"data: [DONE]\n"
    return [json.loads(line[6:]) for line in lines[:-1]]


async def test_a_stream_is_cumulative_and_equals_the_plain_answer(engine: Http) -> None:
    sampling = {"max_new_tokens": 12, "sampling_seed": 3, "ignore_eos": True}
    body = {"input_ids": random_ids(10, 8), "sampling_params": sampling, "return_logprob": True}
    parts = await events(engine, {**body, "stream": True})
    for earlier, later in itertools.pairwise(parts):
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert earlier["meta_info"]["finish_reason"] is None
        assert "weight_versions" not in earlier["meta_info"]
    last = parts[-1]["meta_info"]
    assert last["weight_versions"] == [{"version": "0", "start": 0, "end": 12}]
    _, plain = await engine.post("/generate", body)
    assert plain["output_ids"] == parts[-1]["output_ids"]
    for got, wanted in zip(last["output_token_logprobs"], plain["meta_info"]["output_token_logprobs"], strict=True):
        assert got == [pytest.approx(wanted[0], abs=1e-4), *wanted[1:]]


async def test_a_stream_of_a_batch_names_the_sequence_of_each_event(engine: Http) -> None:
    body = {"input_ids": [[5, 6], [7, 8]], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    parts = await events(engine, {**body, "stream": True})
    finished = {part["index"] for part in parts if part["meta_info"]["finish_reason"]}
    assert finished == {0, 1}


BAD_BODIES: list[tuple[Any, str]] = [
    ([1, 2], "JSON object"),
    ({}, "input_ids"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[]]}, "input_ids is empty"),
    ({"input_ids": "hello"}, "input_ids"),
    ({"input_ids": [[5], 6]}, "integers only"),
    ({"input_ids": [5, 524]}, "524 is outside the vocabulary"),
    ({"input_ids": [5, -1]}, "-1 is outside the vocabulary"),
    ({"input_ids": [5, 2**70]}, "outside the vocabulary"),
    ({"input_ids": [5, 1.0]}, "integers only"),
    ({"input_ids": [5, True]}, "integers only"),
    ({"input_ids": [5, None]}, "integers only"),
    ({"input_ids": [5], "text": "also"}, "text"),
    ({"input_ids": [5], "rid": 7}, "rid"),
    ({"input_ids": [5], "stream": "yes"}, "stream"),
    ({"input_ids": [5], "logprob_start_len": -2}, "logprob_start_len"),
    ({"input_ids": [5], "top_logprobs_num": 3}, "top_logprobs_num"),
    ({"input_ids": [5], "sampling_params": []}, "sampling_params"),
    ({"input_ids": [5] * 2048}, "longer than the model's context length"),
    ({"input_ids": [5] * 2000, "sampling_params": {"max_new_tokens": 49}}, "exceeds the model's maximum context"),
]
BAD_SAMPLING: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (-1, "hot", float("nan"), float("inf"), 10**400, True)),
    *(("top_p", value) for value in (0, 1.5, float("nan"))),
    *(("top_k", value) for value in (0, -2, 1.5)),
    *(("min_p", value) for value in (-0.1, 2)),
    *(("max_new_tokens", value) for value in (-1, 1.5, "many")),
    *(("n", value) for value in (0, -1, 10**9)),
    *(("stop_token_ids", value) for value in ([524], [-1], ["a"], 5)),
    ("min_new_tokens", 500),
    ("sampling_seed", "x"),
    ("ignore_eos", 1),
    ("stop", ["END"]),
    ("regex", "a+"),
    ("frequency_penalty", 0.5),
    ("temprature", 1.0),
]


async def test_bad_input_fails_alone_and_says_why(engine: Http) -> None:
    good = asyncio.create_task(engine.generate(random_ids(50, 9), max_new_tokens=300, ignore_eos=True))
    bad = [*BAD_BODIES, *(({"input_ids": [5], "sampling_params": {k: v}}, k) for k, v in BAD_SAMPLING)]
    answers = await asyncio.gather(*(engine.post("/generate", data=json.dumps(body).encode()) for body, _ in bad))
    for (body, message), (status, answer) in zip(bad, answers, strict=True):
        assert status == 400, (body, answer)
        assert message in answer["error"]["message"], (str(body)[:100], answer)
        assert len(answer["error"]["message"]) < 400
    assert len((await good)["output_ids"]) == 300
    assert (await engine.get("/health"))[0] == 200


@pytest.mark.parametrize(
    "data", [b"{", b"\xff\xfe", b"[" * 100_000, b"null", b'{"input_ids": [1' + b"0" * 5000 + b"]}"]
)
async def test_a_body_that_is_not_json_is_refused(engine: Http, data: bytes) -> None:
    status, answer = await engine.post("/generate", data=data)
    assert status == 400
    assert answer["error"]["message"]


async def test_a_huge_body_is_refused_and_the_engine_goes_on(engine: Http) -> None:
    status, _ = await engine.post("/generate", data=b'{"input_ids": [' + b"5," * (9 << 20) + b"5]}")
    assert status == 413
    assert (await engine.generate([5, 6], max_new_tokens=1))["output_ids"]


async def test_unknown_paths_and_bad_control_bodies_are_client_errors(engine: Http) -> None:
    assert (await engine.get("/nothing"))[0] == 404
    assert (await engine.post("/pause_generation", {"mode": "maybe"}))[0] == 400
    assert (await engine.post("/abort_request", {}))[0] == 400
    assert (await engine.post("/update_weights_from_disk", {}))[0] == 400
    assert (await engine.post("/weights_checker", {"action": "reset_tensors"}))[0] == 400


async def test_an_aborted_request_answers_with_what_it_has(engine: Http) -> None:
    running = asyncio.create_task(engine.generate(random_ids(5, 1), rid="victim", **FOREVER))
    other = asyncio.create_task(engine.generate(random_ids(5, 2), rid="other", max_new_tokens=400, ignore_eos=True))
    await engine.until_running(2)
    assert (await engine.post("/abort_request", {"rid": "victim"}))[0] == 200
    result = await running
    assert result["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(result["output_ids"]) < 1900
    assert len((await other)["output_ids"]) == 400


async def test_a_caller_that_goes_away_frees_its_place(engine: Http) -> None:
    gone = asyncio.create_task(engine.generate(random_ids(5, 1), **FOREVER))
    await engine.until_running(1)
    gone.cancel()
    await engine.until_running(0)


async def test_paused_in_place_a_request_goes_on_under_the_new_weights(engine: Http, models: dict[str, str]) -> None:
    running = asyncio.create_task(engine.generate(random_ids(5, 1), max_new_tokens=600, ignore_eos=True))
    await engine.until_running(1)
    assert (await engine.post("/pause_generation", {"mode": "in_place"}))[1]["status"] == "ok"
    status, answer = await update(engine, models["new"], "1")
    assert (status, answer["success"], answer["num_paused_requests"]) == (200, True, 1)
    late = asyncio.create_task(engine.generate(random_ids(5, 2), max_new_tokens=3, ignore_eos=True))
    await asyncio.sleep(0.2)
    assert not running.done()
    assert not late.done()
    assert (await engine.post("/continue_generation", {}))[1]["status"] == "ok"
    old, new = (await running)["meta_info"]["weight_versions"]
    assert (old["version"], old["start"], new["version"], new["end"]) == ("0", 0, "1", 600)
    assert 0 < old["end"] == new["start"] < 600
    assert (await late)["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 3}]


async def test_pause_with_abort_ends_what_runs_and_holds_what_comes(engine: Http) -> None:
    running = asyncio.create_task(engine.generate(random_ids(5, 1), **FOREVER))
    await engine.until_running(1)
    await engine.post("/pause_generation", {})
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
    late = asyncio.create_task(engine.generate([5, 6], max_new_tokens=2, ignore_eos=True))
    await asyncio.sleep(0.2)
    assert not late.done()
    await engine.post("/continue_generation", {})
    assert len((await late)["output_ids"]) == 2


async def test_retracted_requests_wait_and_are_counted(engine: Http) -> None:
    running = asyncio.create_task(engine.generate(random_ids(5, 1), max_new_tokens=400, ignore_eos=True))
    await engine.until_running(1)
    await engine.post("/pause_generation", {"mode": "retract"})
    _, loads = await engine.get("/v1/loads")
    assert (loads["loads"][0]["num_running_reqs"], loads["loads"][0]["num_waiting_reqs"]) == (0, 1)
    await engine.post("/continue_generation", {})
    result = await running
    assert len(result["output_ids"]) == 400
    assert result["meta_info"]["num_retractions"] == 1


async def test_a_turn_that_extends_an_earlier_one_reuses_its_prefix(engine: Http) -> None:
    first = await engine.generate(random_ids(100, 11), max_new_tokens=20, ignore_eos=True)
    ids = random_ids(100, 11) + first["output_ids"] + random_ids(10, 12)
    second = await engine.generate(ids, max_new_tokens=4)
    assert 96 <= second["meta_info"]["cached_tokens"] < 120
    other_key = await engine.generate(ids, max_new_tokens=4, extra_key="tenant")
    assert other_key["meta_info"]["cached_tokens"] == 0


async def test_no_request_after_an_update_reuses_what_older_weights_computed(
    engine: Http, models: dict[str, str]
) -> None:
    finished, spanning = random_ids(100, 13), random_ids(100, 14)
    await engine.generate(finished, max_new_tokens=20, ignore_eos=True)
    running = asyncio.create_task(engine.generate(spanning, max_new_tokens=600, ignore_eos=True))
    await engine.until_running(1)
    await engine.post("/pause_generation", {"mode": "in_place"})
    await update(engine, models["new"], "1")
    await engine.post("/continue_generation", {})
    # While the request that spans the update still runs, and after it has finished and given its place back.
    for ids in (finished, spanning):
        assert (await engine.generate(ids, max_new_tokens=1))["meta_info"]["cached_tokens"] == 0
        assert (await engine.generate(ids, max_new_tokens=1))["meta_info"]["cached_tokens"] > 0
    mixed = spanning + (await running)["output_ids"]
    # Only the prompt, which was computed anew above: not one block that holds the spanning request's own tokens.
    result = await engine.generate(mixed + [5] * 20, max_new_tokens=1)
    assert result["meta_info"]["cached_tokens"] == 96


async def test_flushing_needs_an_idle_engine_and_forgets_prefixes(engine: Http) -> None:
    prompt = random_ids(64, 15)
    await engine.generate(prompt, max_new_tokens=1)
    running = asyncio.create_task(engine.generate(random_ids(5, 1), rid="busy", **FOREVER))
    await engine.until_running(1)
    assert (await engine.post("/flush_cache", {}))[0] == 400
    await engine.post("/abort_request", {"rid": "busy"})
    await running
    assert (await engine.post("/flush_cache", {}))[0] == 200
    assert (await engine.generate(prompt, max_new_tokens=1))["meta_info"]["cached_tokens"] == 0


def _torn(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _without_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def _garbage(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"not a tensor file")


def _changed(name: str, change: Any) -> Any:
    def spoil(path: Path) -> None:
        tensors: dict[str, Any] = dict(load_file(path / "model.safetensors"))
        tensors[name] = change(tensors.get(name))
        save_file({key: value for key, value in tensors.items() if value is not None}, path / "model.safetensors")

    return spoil


NAME = "model.layers.1.mlp.up_proj.weight"
SPOILED = {
    "missing file": (_without_weights, "no .safetensors"),
    "torn file": (_torn, "model.safetensors"),
    "garbage": (_garbage, "model.safetensors"),
    "missing tensor": (_changed(NAME, lambda tensor: None), "is missing"),
    "other shape": (_changed(NAME, lambda tensor: tensor[:-1].clone()), "has shape"),
    "NaN": (_changed(NAME, lambda tensor: tensor * torch.nan), "NaN"),
    "surplus tensor": (_changed("model.extra", lambda tensor: torch.ones(1)), "does not belong"),
}


@pytest.mark.parametrize("fault", SPOILED)
async def test_bad_weights_are_refused_and_the_old_stay_in_force(
    engine: Http, models: dict[str, str], tmp_path: Path, fault: str
) -> None:
    spoil, message = SPOILED[fault]
    folder = tmp_path / "spoiled"
    shutil.copytree(models["new"], folder)
    spoil(folder)
    _, before = await engine.post("/weights_checker", {"action": "checksum"})
    running = asyncio.create_task(engine.generate(random_ids(5, 1), max_new_tokens=300, ignore_eos=True))
    status, answer = await update(engine, str(folder), "9")
    assert (status, answer["success"]) == (400, False)
    assert message in answer["message"]
    _, after = await engine.post("/weights_checker", {"action": "checksum"})
    assert before["per_engine_checksum"] == after["per_engine_checksum"]
    assert (await running)["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 300}]


async def test_a_folder_that_is_not_there_is_refused(engine: Http) -> None:
    status, answer = await update(engine, "/nowhere/at/all", "9")
    assert (status, answer["success"]) == (400, False)
    assert "/nowhere/at/all" in answer["message"]


async def test_the_checksum_is_that_of_the_file_in_force(engine: Http, models: dict[str, str]) -> None:
    for version, name in (("1", "new"), ("2", "old")):
        await update(engine, models[name], version)
        _, answer = await engine.post("/weights_checker", {"action": "checksum"})
        assert answer["success"]
        expected = checksum(load_file(Path(models[name]) / "model.safetensors").items())
        assert answer["per_engine_checksum"] == answer["ranks"][0]["per_gpu_checksum"] == expected


async def test_a_version_can_be_stamped_without_touching_requests(engine: Http) -> None:
    running = asyncio.create_task(engine.generate(random_ids(5, 1), max_new_tokens=500, ignore_eos=True))
    await engine.until_running(1)
    status, answer = await engine.post("/update_weight_version", {"new_version": "5", "abort_all_requests": False})
    assert (status, answer["success"], answer["new_version"]) == (200, True, "5")
    assert [span["version"] for span in (await running)["meta_info"]["weight_versions"]] == ["0", "5"]


async def test_the_engine_describes_itself(engine: Http, models: dict[str, str]) -> None:
    _, info = await engine.get("/server_info")
    assert (info["weight_version"], info["vocab_size"], info["context_length"], info["dp_size"]) == ("0", 524, 2048, 1)
    assert info["internal_states"][0]["num_generated_tokens"] >= 0
    _, model = await engine.get("/model_info")
    assert (model["model_path"], model["is_generation"]) == (models["old"], True)
    _, cards = await engine.get("/v1/models")
    assert cards["data"][0]["max_model_len"] == 2048
    assert (await engine.get("/health"))[0] == (await engine.get("/ready"))[0] == 200


async def test_many_requests_of_all_lengths_join_and_leave(engine: Http) -> None:
    work = [(1 + 37 * i % 400, 1 + 23 * i % 90) for i in range(150)]
    results = await asyncio.gather(
        *(engine.generate(random_ids(n, i), max_new_tokens=m, ignore_eos=True) for i, (n, m) in enumerate(work))
    )
    assert [len(result["output_ids"]) for result in results] == [m for _, m in work]
    assert await engine.num_running() == 0
