import asyncio

import pytest

from miles_rl.deadline import deadline


async def test_a_deadline_that_passes_names_its_key_value_and_what_was_late() -> None:
    with pytest.raises(TimeoutError, match=r"^a\.b_s: 0\.01; the step did not end in time; raise it"):
        async with deadline("a.b_s", 0.01, "the step"):
            await asyncio.sleep(5)


async def test_a_time_out_inside_keeps_its_own_words() -> None:
    with pytest.raises(TimeoutError, match=r"^the engine$"):
        async with deadline("a.b_s", 5, "the step"):
            raise TimeoutError("the engine")
