import random

import pytest

from miles_rl.batch.partition import by_packed_size, by_padded_size, karmarkar_karp


def test_parts_are_balanced_far_better_than_in_order() -> None:
    lengths = [random.Random(0).randint(50, 4000) for _ in range(64)]
    parts = karmarkar_karp(lengths, 8)
    sums = [sum(lengths[i] for i in part) for part in parts]
    assert sorted(i for part in parts for i in part) == list(range(64))
    assert max(sums) - min(sums) < 0.01 * max(sums)


def test_equal_sized_parts_have_the_same_number_of_members() -> None:
    lengths = [random.Random(1).randint(1, 100) for _ in range(24)]
    assert {len(part) for part in karmarkar_karp(lengths, 6, equal_size=True)} == {4}


def test_no_part_is_empty_even_for_lengths_of_zero() -> None:
    assert all(karmarkar_karp([0, 0, 0, 5], 3))


def test_parts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="2 trajectories cannot fill 3 parts"):
        karmarkar_karp([1, 2], 3)
    with pytest.raises(ValueError, match="3 trajectories cannot be split into 2 parts of equal number"):
        karmarkar_karp([1, 2, 3], 2, equal_size=True)


def test_padded_rectangles_fit_the_budget_and_hold_similar_lengths() -> None:
    lengths = [random.Random(2).randint(10, 300) for _ in range(64)]
    parts = by_padded_size(lengths, 1024)
    assert sorted(i for part in parts for i in part) == list(range(64))
    assert all(len(part) * max(lengths[i] for i in part) <= 1024 for part in parts)
    filled = sum(len(part) * max(lengths[i] for i in part) for part in parts)
    assert filled < 1.15 * sum(lengths)


def test_packed_sums_fit_the_budget() -> None:
    lengths = [random.Random(3).randint(10, 300) for _ in range(64)]
    parts = by_packed_size(lengths, 1024)
    assert sorted(i for part in parts for i in part) == list(range(64))
    assert all(sum(lengths[i] for i in part) <= 1024 for part in parts)
    assert len(parts) <= -(-sum(lengths) // 1024) + 1


def test_one_trajectory_longer_than_the_budget_gets_a_micro_batch_of_its_own() -> None:
    assert by_padded_size([5, 2000, 6], 100) == [[1], [2, 0]]
    assert by_packed_size([5, 2000, 6], 100) == [[1], [0, 2]]
    assert by_packed_size([100], 100) == [[0]]


def test_nothing_gives_no_micro_batch() -> None:
    assert by_padded_size([], 100) == []
    assert by_packed_size([], 100) == []


def test_trajectories_of_no_length_go_into_one_micro_batch() -> None:
    assert by_packed_size([0, 0, 0], 100) == [[0, 1, 2]]
    assert by_padded_size([0, 0, 0], 100) == [[0, 1, 2]]
    assert by_packed_size([0, 200, 0], 100) == [[1], [0, 2]]
