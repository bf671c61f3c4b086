"""The body of `/generate`: what is accepted, and what each mistake is told.

Names, defaults and limits are SGLang's. Nothing that would change the result is silently ignored: an option that
this engine does not have is an error unless it is set to what it does anyway.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from reprlib import repr as short
from typing import Any

from miles_rl.engine.embedded.request import Request, SamplingParams

MAX_SEQUENCES = 1024
"""Most sequences that one body may ask for: prompts times `n`."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0.0, None),
    "presence_penalty": (0.0, None),
    "repetition_penalty": (1.0, None),
    "stop": (None, [], ""),
    "stop_regex": (None, [], ""),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "logit_bias": (None, {}),
    "custom_params": (None, {}),
}
"""Sampling options of SGLang that this engine lacks, with the values that ask for nothing."""
_TEXT_ONLY = {"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval"}
_KNOWN = {
    *("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos", "min_new_tokens"),
    *("n", "sampling_seed"),
}
_NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {
    "text": (None,),
    "input_embeds": (None,),
    "image_data": (None,),
    "audio_data": (None,),
    "video_data": (None,),
    "lora_path": (None,),
    "top_logprobs_num": (None, 0),
    "token_ids_logprob": (None,),
    "return_hidden_states": (None, False),
    "return_routed_experts": (None, False),
    "return_indexer_topk": (None, False),
    "return_sampling_mask": (None, False),
}
"""The same for the body itself."""


class RequestError(Exception):
    """The caller's mistake; becomes `{"error": {"message"}}` with status 400."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model allows."""

    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A checked body: its sequences in the order of the answer, prompt by prompt."""

    requests: list[Request]
    is_list: bool
    streams: bool
    return_logprob: bool
    return_prompt_token_ids: bool


def parse_generate(body: Any, limits: Limits) -> GenerateCall:
    """Raises `RequestError` that names the field."""
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    _refuse(body, _NEUTRAL_FIELDS)
    prompts, is_batch = _prompts(body.get("input_ids"), limits)
    params = _spread(body.get("sampling_params"), len(prompts), "sampling_params", dict, {})
    rids = _spread(body.get("rid"), len(prompts), "rid", str, None)
    return_logprob = _typed(body, "return_logprob", bool, False)
    streams = _typed(body, "stream", bool, False)
    start = _typed(body, "logprob_start_len", int, -1)
    if start < -1:
        raise RequestError(f"logprob_start_len must be -1 or a position in the prompt, got {start}")
    namespace = "".join(f"{len(value)}:{value}" for value in (_text(body, "extra_key"), _text(body, "cache_salt")))
    requests: list[Request] = []
    for ids, given, rid in zip(prompts, params, rids, strict=True):
        sampling, count = parse_sampling(given, limits)
        sampling = _fit(len(ids), sampling, limits)
        if len(requests) + count > MAX_SEQUENCES:
            raise RequestError(f"one request may ask for at most {MAX_SEQUENCES} sequences")
        for copy in range(count):
            name = uuid.uuid4().hex if rid is None else rid if count == 1 else f"{rid}_{copy}"
            requests.append(
                Request(
                    rid=name,
                    ids=list(ids),
                    sampling=sampling if sampling.seed is None else _reseed(sampling, copy),
                    namespace=namespace,
                    prompt_logprob_start=start if return_logprob and 0 <= start < len(ids) else None,
                    streams=streams,
                )
            )
    is_list = is_batch or len(requests) > 1
    prompt_ids = _typed(body, "return_prompt_token_ids", bool, False)
    return GenerateCall(requests, is_list, streams, return_logprob, prompt_ids)


def parse_sampling(given: Mapping[str, Any], limits: Limits) -> tuple[SamplingParams, int]:
    """The sampling parameters and `n`. Raises `RequestError`."""
    _refuse(given, _NEUTRAL)
    unknown = given.keys() - _KNOWN - _NEUTRAL.keys() - _TEXT_ONLY
    if unknown:
        raise RequestError(f"sampling_params: unexpected key {short(min(unknown))}")
    temperature = _number(given, "temperature", 1.0)
    if temperature < 0:
        raise RequestError(f"temperature must be a non-negative finite number, got {temperature}")
    top_p, min_p = _number(given, "top_p", 1.0), _number(given, "min_p", 0.0)
    if not 0 < top_p <= 1:
        raise RequestError(f"top_p must be in (0, 1], got {top_p}")
    if not 0 <= min_p <= 1:
        raise RequestError(f"min_p must be in [0, 1], got {min_p}")
    top_k = _typed(given, "top_k", int, -1)
    if top_k < -1 or top_k == 0:
        raise RequestError(f"top_k must be -1 (disable) or at least 1, got {top_k}")
    is_greedy = temperature < 1e-6
    count = _typed(given, "n", int, 1)
    if not 1 <= count <= MAX_SEQUENCES:
        raise RequestError(f"n must be in [1, {MAX_SEQUENCES}], got {count}")
    seed = given.get("sampling_seed")
    if seed is not None and type(seed) is not int:
        raise RequestError(f"sampling_seed must be an integer, got {short(seed)}")
    stops = _stop_ids(given, limits)
    eos = frozenset() if _typed(given, "ignore_eos", bool, False) else limits.eos_token_ids
    min_new = _typed(given, "min_new_tokens", int, 0)
    max_new = _max_new(given, min_new)
    sampling = SamplingParams(
        max_new_tokens=max_new,
        temperature=1.0 if is_greedy else temperature,
        top_p=top_p,
        top_k=1 if is_greedy else 0 if top_k == -1 else min(top_k, limits.vocab_size),
        min_p=min_p,
        stop_token_ids=stops | eos,
        banned_until_min=frozenset(i for i in stops | limits.eos_token_ids if i < limits.vocab_size),
        min_new_tokens=min_new,
        seed=seed,
    )
    return sampling, count


def _max_new(given: Mapping[str, Any], min_new: int) -> int:
    """-1 when the caller sets no limit: then the context is the limit."""
    max_new = given.get("max_new_tokens", 128)
    if max_new is None:
        max_new = -1
    elif type(max_new) is not int or max_new < 0:
        raise RequestError(f"max_new_tokens must be at least 0, got {short(max_new)}")
    if min_new < 0 or (max_new >= 0 and min_new > max_new):
        raise RequestError(f"min_new_tokens must be in [0, max_new_tokens], got {min_new}")
    return max_new


def _stop_ids(given: Mapping[str, Any], limits: Limits) -> frozenset[int]:
    stops = given.get("stop_token_ids") or []
    if not isinstance(stops, list) or any(type(token) is not int for token in stops):
        raise RequestError("stop_token_ids must be a list of token ids")
    if outside := [token for token in stops if not 0 <= token < limits.vocab_size]:
        raise RequestError(f"stop_token_ids: {outside[0]} is outside the vocabulary of {limits.vocab_size}")
    return frozenset(stops)


def _fit(length: int, sampling: SamplingParams, limits: Limits) -> SamplingParams:
    """Check prompt and reply against the context, and resolve an open `max_new_tokens`."""
    context = limits.context_length
    if length >= context:
        raise RequestError(f"The input ({length} tokens) is longer than the model's context length ({context} tokens).")
    if sampling.max_new_tokens == -1:
        return replace(sampling, max_new_tokens=context - length)
    if length + sampling.max_new_tokens > context:
        raise RequestError(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a "
            f"total of {length + sampling.max_new_tokens} tokens: {length} tokens from the input and "
            f"{sampling.max_new_tokens} tokens for the completion."
        )
    return sampling


def _reseed(sampling: SamplingParams, copy: int) -> SamplingParams:
    """The n samples of one seeded prompt differ, and stay the same when asked for again."""
    return replace(sampling, seed=(sampling.seed or 0) + copy)


def _prompts(value: Any, limits: Limits) -> tuple[list[list[int]], bool]:
    if not isinstance(value, list) or not value:
        raise RequestError("input_ids must be a non-empty list of token ids, or a list of such lists")
    if all(isinstance(prompt, list) for prompt in value):
        for prompt in value:
            _check_ids(prompt, limits)
        return value, True
    _check_ids(value, limits)
    return [value], False


def _check_ids(ids: Sequence[Any], limits: Limits) -> None:
    if not ids:
        raise RequestError("input_ids is empty")
    if {type(token) for token in ids} != {int}:
        raise RequestError("input_ids must hold integers only")
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        outside = next(token for token in ids if not 0 <= token < limits.vocab_size)
        raise RequestError(f"input_ids: token id {outside} is outside the vocabulary of {limits.vocab_size}")


def _spread(value: Any, count: int, name: str, kind: type, default: Any) -> list[Any]:
    """One value for all prompts, or a list with one for each."""
    if value is None:
        return [default] * count
    if isinstance(value, kind):
        return [value] * count if count == 1 or kind is dict else [f"{value}_{index}" for index in range(count)]
    if not isinstance(value, list) or len(value) != count or any(not isinstance(item, kind) for item in value):
        raise RequestError(f"{name} must be one {kind.__name__}, or a list of {count}")
    return value


def _refuse(given: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    for name in neutral.keys() & given.keys():
        if given[name] not in neutral[name]:
            raise RequestError(f"{name}: {short(given[name])} is not supported by this engine")


def _typed(given: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = given.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise RequestError(f"{name} must be a {kind.__name__}, got {short(value)}")
    return value


def _text(given: Mapping[str, Any], name: str) -> str:
    return _typed(given, name, str, "")


def _number(given: Mapping[str, Any], name: str, default: float) -> float:
    value = given.get(name)
    if value is None:
        return default
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RequestError(f"{name} must be a finite number, got {short(value)}")
    return number
