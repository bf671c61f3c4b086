"""How trajectories are put into micro-batches. Lengths in, lists of indices out.

A token budget is what a micro-batch should hold, not a bound on one trajectory: a trajectory longer than the budget
gets a micro-batch of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(order=True, slots=True)
class _State:
    """A partial partition: `parts` by falling sum. States with the widest gap between sums are merged first."""

    neg_spread: int
    order: int
    parts: list[tuple[int, list[int]]] = field(compare=False)


def karmarkar_karp(lengths: Sequence[int], num_parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Split indices into `num_parts` of nearly equal summed length by largest differencing (Karmarkar, Karp 1982).

    A heuristic: the sums are close, not always as close as they could be. No part is empty. With `equal_size` all
    parts have the same number of members, which must divide. Raises `ValueError` if that cannot be.
    """
    if not 1 <= num_parts <= len(lengths):
        raise ValueError(f"{len(lengths)} trajectories cannot fill {num_parts} parts")
    if equal_size and len(lengths) % num_parts:
        raise ValueError(f"{len(lengths)} trajectories cannot be split into {num_parts} parts of equal number")
    by_length = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    step = num_parts if equal_size else 1
    heap: list[_State] = []
    for order, start in enumerate(range(0, len(by_length), step)):
        parts = [(lengths[i], [i]) for i in by_length[start : start + step]]
        parts += [(0, [])] * (num_parts - len(parts))
        heap.append(_state(parts, order))
    heapq.heapify(heap)
    order = len(heap)
    while len(heap) > 1:
        heapq.heappush(heap, _merged(heapq.heappop(heap), heapq.heappop(heap), order))
        order += 1
    return _without_empty([sorted(members) for _, members in heap[0].parts])


def by_padded_size(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Micro-batches of similar length, longest first, whose padded rectangles (rows x longest) fit `max_tokens`."""
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    parts: list[list[int]] = []
    start = 0
    while start < len(longest_first):
        num_rows = max(1, max_tokens // max(1, lengths[longest_first[start]]))
        parts.append(longest_first[start : start + num_rows])
        start += num_rows
    return parts


def by_packed_size(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """The fewest balanced micro-batches whose summed lengths fit `max_tokens`, single long trajectories apart."""
    alone = [[i] for i, length in enumerate(lengths) if length >= max_tokens]
    rest = [i for i, length in enumerate(lengths) if length < max_tokens]
    if not rest:
        return alone
    num_parts = max(1, -(-sum(lengths[i] for i in rest) // max_tokens))  # all can be empty
    while True:
        parts = karmarkar_karp([lengths[i] for i in rest], num_parts)
        if all(sum(lengths[rest[i]] for i in part) <= max_tokens for part in parts):
            return [*alone, *([rest[i] for i in part] for part in parts)]
        num_parts += 1


def _state(parts: list[tuple[int, list[int]]], order: int) -> _State:
    parts = sorted(parts, key=lambda part: (-part[0], part[1]))
    return _State(parts[-1][0] - parts[0][0], order, parts)


def _merged(first: _State, second: _State, order: int) -> _State:
    """Join the heaviest parts of one state with the lightest of the other."""
    pairs = zip(first.parts, reversed(second.parts), strict=True)
    return _state([(a + b, left + right) for (a, left), (b, right) in pairs], order)


def _without_empty(parts: list[list[int]]) -> list[list[int]]:
    """Fill an empty part with a member of the fullest; only trajectories of length 0 make one."""
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return parts
