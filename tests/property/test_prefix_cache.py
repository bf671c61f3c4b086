"""The prefix cache against a plain model of what it promises, and rows of keys and values against plain lists."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_rl.engine.embedded.kv import BlockStore, KvRows, KvShape, Row
from miles_rl.engine.embedded.prefix_cache import PrefixCache

IDS = st.lists(st.integers(0, 2), max_size=24)
STEPS = st.lists(
    st.tuples(st.sampled_from(["insert", "insert", "match", "clear"]), IDS, st.sampled_from(["", "tenant"])),
    max_size=40,
)


class Model:
    """What is in each slot, by the exact tokens before and in the block; the cache may forget, never mix up."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, tuple[str, tuple[int, ...]]] = {}

    def prefix(self, ids: list[int], number: int, namespace: str) -> tuple[str, tuple[int, ...]]:
        return namespace, tuple(ids[: (number + 1) * self.block_size])


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, num_blocks=st.integers(0, 6), block_size=st.integers(1, 4))
def test_a_match_is_always_the_exact_prefix_that_was_put_in_its_slots(
    steps: list[tuple[str, list[int], str]], num_blocks: int, block_size: int
) -> None:
    cache, model = PrefixCache(num_blocks, block_size), Model(block_size)
    for kind, ids, namespace in steps:
        if kind == "insert":
            before = len(cache.match(ids, len(ids), namespace))
            added = cache.insert(ids, len(ids), namespace)
            assert [number for number, _ in added] == list(range(before, before + len(added)))
            model.slots |= {slot: model.prefix(ids, number, namespace) for number, slot in added}
            kept = len(cache.match(ids, len(ids), namespace))
            assert kept == min(len(ids) // block_size, num_blocks)
        elif kind == "match":
            limit = len(ids) // 2
            slots = cache.match(ids, limit, namespace)
            assert len(slots) * block_size <= limit
            assert len(set(slots)) == len(slots)
            for number, slot in enumerate(slots):
                assert model.slots[slot] == model.prefix(ids, number, namespace)
        else:
            cache.clear()
            assert cache.match(ids, len(ids), namespace) == []
        assert len(cache) <= num_blocks


@settings(max_examples=100, deadline=None)
@given(old=st.lists(IDS.filter(lambda ids: len(ids) >= 2), min_size=1, max_size=6), used=IDS)
def test_the_least_recently_used_block_goes_first(old: list[list[int]], used: list[int]) -> None:
    cache = PrefixCache(12, 2)
    for ids in old:
        cache.insert(ids, len(ids))
    hit = len(cache.match(used, len(used)))
    free = 12 - len(cache)
    # Fill with a foreign chain that needs all room but that of the blocks just used.
    cache.insert([9] * 2 * (12 - hit), 2 * (12 - hit))
    assert len(cache.match(used, len(used))) == hit
    assert free >= 0


@settings(max_examples=100, deadline=None)
@given(ids=IDS, others=st.lists(IDS, max_size=4))
def test_a_claim_makes_others_wait_exactly_for_the_same_missing_block(ids: list[int], others: list[list[int]]) -> None:
    cache = PrefixCache(16, 2)
    free, key = cache.claim(ids, len(ids))
    assert free
    assert (key is None) == (len(ids) < 2)
    for other in others:
        may_go, other_key = cache.claim(other, len(other))
        shares = len(ids) >= 2 and len(other) >= 2 and other[:2] == ids[:2]
        assert may_go or shares or other_key is None
        assert not (may_go and shares)
        cache.drop_claim(other_key)
    cache.drop_claim(key)
    assert cache.claim(ids, len(ids))[0]


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "grow", "promote", "remove"]), st.integers(0, 200)), max_size=60
)


Parts = tuple[torch.Tensor, torch.Tensor]


def write(row: Row, start: int, end: int) -> Parts:
    """Fill tokens `start:end` of a row with random keys and values; returns them."""
    written = tuple(torch.randn_like(part) for part in row.view(start, end))
    for part, contents in zip(row.view(start, end), written, strict=True):
        part.copy_(contents)
    row.length = end
    return written[0], written[1]


@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS)
def test_rows_keep_their_contents_whatever_joins_grows_and_leaves(operations: list[tuple[str, int]]) -> None:
    shape = KvShape(2, 1, 1, 2, torch.float32, torch.device("cpu"))
    rows = KvRows(shape, 400)
    expected: list[tuple[Row, Parts, bool]] = []
    for kind, number in operations:
        index = number % len(expected) if expected else 0
        if kind == "add":
            row = rows.add(number + 1)
            expected.append((row, write(row, 0, number), False))
        elif expected and kind == "grow":
            row, (keys, values), is_decoding = expected[index]
            end = min(row.length + number, 400)
            rows.ensure(row, end)
            more_keys, more_values = write(row, row.length, end)
            expected[index] = (row, (torch.cat([keys, more_keys], 3), torch.cat([values, more_values], 2)), is_decoding)
        elif expected and kind == "promote" and not expected[index][2]:
            row, parts, _ = expected[index]
            row.pool.promote(row)
            expected[index] = (row, parts, True)
        elif expected and kind == "remove":
            rows.remove(expected.pop(index)[0])
        for row, parts, is_decoding in expected:
            assert all(torch.equal(*pair) for pair in zip(row.view(0, row.length), parts, strict=True))
            assert (row.index < row.pool.num_decoding) == is_decoding
        assert sum(pool.num_decoding for pool in rows.decoding_pools()) == sum(item[2] for item in expected)


@settings(max_examples=40, deadline=None)
@given(first=st.integers(0, 3), count=st.integers(0, 4), data=st.data())
def test_blocks_come_back_as_they_were_saved(first: int, count: int, data: st.DataObject) -> None:
    shape = KvShape(2, 2, 1, 4, torch.float32, torch.device("cpu"))
    rows, store = KvRows(shape, 256), BlockStore(shape, 10, 16)
    slots = data.draw(st.permutations(range(10)))[: first + count]
    source, target = rows.add(16 * (first + count) + 1), rows.add(200)
    written = write(source, 0, 16 * (first + count) + 1)
    # In two goes, as a prompt and later its reply.
    store.save(source, list(enumerate(slots))[:first])
    store.save(source, list(enumerate(slots))[first:])
    store.restore(target, slots)
    assert target.length == 16 * (first + count)
    keys, values = target.view(0, target.length)
    assert torch.equal(keys, written[0][..., : target.length])
    assert torch.equal(values, written[1][:, :, : target.length])
