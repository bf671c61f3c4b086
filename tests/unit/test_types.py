"""What a trajectory refuses, with the sample and the token by name."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from makers import make_trajectory

from miles_rl.types import NO_VERSION, Trajectory

SOUND = make_trajectory("g0.1.2", 0, "task", version=3)
"""One token of the prompt, two of the policy."""


def changed(name: str, index: int, value: Any) -> Trajectory:
    array = getattr(SOUND, name).copy()
    array[index] = value
    return replace(SOUND, **{name: array})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("token_ids", np.array([1.0, 2.0, 3.0]), "token_ids is float64; give an array of integers"),
        ("token_ids", np.array([True, True, True]), "token_ids is bool; give an array of integers"),
        ("token_ids", [1, 2, 3], "token_ids is list; give an array of integers"),
        ("loss_mask", np.array([0, 1, 1]), "loss_mask is int64; give an array of booleans"),
        ("logprobs", np.array([0, -1, -1]), "logprobs is int64; give an array of floats"),
        ("logprobs", np.array([0, -1, -1], complex), "logprobs is complex128; give an array of floats"),
        ("versions", np.array([-1.0, 3.0, 3.0]), "versions is float64; give an array of signed integers"),
        ("versions", np.array([0, 3, 3], np.uint32), "versions is uint32; give an array of signed integers"),
        ("versions", np.array(["-1", "3", "3"], object), "versions is object; give an array of signed integers"),
    ],
)
def test_arrays_of_another_kind_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^g0.1.2: {message}$"):
        replace(SOUND, **{name: value})


@pytest.mark.parametrize("name", ["token_ids", "loss_mask", "logprobs", "versions"])
@pytest.mark.parametrize("shape", [(), (3, 1), (1, 3)])
def test_arrays_of_another_number_of_dimensions_are_refused(name: str, shape: tuple[int, ...]) -> None:
    array = getattr(SOUND, name)
    array = array.reshape(shape) if shape else array[0]
    with pytest.raises(ValueError, match=f"^g0.1.2: {name} has {len(shape)} dimensions; give one, a value per token$"):
        replace(SOUND, **{name: array})


@pytest.mark.parametrize("index", [0, 1])
def test_ids_that_no_token_has_are_refused(index: int) -> None:
    with pytest.raises(ValueError, match=rf"^g0.1.2: token_ids\[{index}\] is -1: no token has such an id$"):
        changed("token_ids", index, -1)
    too_large = SOUND.token_ids.astype(np.int64)
    too_large[index] = 2**31
    with pytest.raises(ValueError, match=rf"token_ids\[{index}\] is {2**31}: no token has such an id$"):
        replace(SOUND, token_ids=too_large)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.5])
def test_log_probabilities_of_the_policy_s_tokens_are_finite_and_not_above_0(value: float) -> None:
    with pytest.raises(
        ValueError, match=r"^g0.1.2: logprobs\[2\] is .*: a log-probability that is not finite or above 0$"
    ):
        changed("logprobs", 2, value)


@pytest.mark.parametrize("value", [np.nan, -0.5])
def test_a_token_that_the_policy_did_not_write_has_no_log_probability(value: float) -> None:
    with pytest.raises(ValueError, match=r"^g0.1.2: logprobs\[0\] is .*log-probability"):
        changed("logprobs", 0, value)


@pytest.mark.parametrize("version", [-1, -7])
def test_the_policy_s_tokens_have_versions_from_0_on(version: int) -> None:
    message = rf"versions\[1\] is {version}: a token that the policy wrote needs one of at least 0"
    with pytest.raises(ValueError, match=f"^g0.1.2: {message}$"):
        changed("versions", 1, version)
    assert changed("versions", 1, 0).oldest_version == 0


@pytest.mark.parametrize("version", [0, 3, -2])
def test_all_other_tokens_have_exactly_no_version(version: int) -> None:
    message = rf"versions\[0\] is {version}: one that is not the policy's has {NO_VERSION}"
    with pytest.raises(ValueError, match=f"^g0.1.2: {message}$"):
        changed("versions", 0, version)


def test_a_trajectory_of_which_the_policy_wrote_nothing_is_refused() -> None:
    nothing = {"loss_mask": np.zeros(3, bool), "logprobs": np.zeros(3), "versions": np.full(3, NO_VERSION)}
    with pytest.raises(ValueError, match=r"^g0.1.2: no token was written by the policy$"):
        replace(SOUND, **nothing)
    empty = {name: array[:0] for name, array in {**nothing, "token_ids": SOUND.token_ids}.items()}
    with pytest.raises(ValueError, match=r"^g0.1.2: no token was written by the policy$"):
        replace(SOUND, **empty)


def test_wider_numbers_of_the_right_kind_are_taken() -> None:
    wide = replace(SOUND, token_ids=SOUND.token_ids.astype(np.int64), logprobs=SOUND.logprobs.astype(np.float64))
    assert wide.num_policy_tokens == 2
