"""Which prefixes have their keys and values kept, and where: a tree of token blocks with LRU eviction.

A block is `block_size` tokens after one exact chain of earlier blocks, so that equal tokens after another beginning
are another block. Running requests copy blocks out and in; nothing points into the cache, so any block may go at any
time. The cache holds values of one set of weights only: it is cleared when weights change. Pure bookkeeping, without
tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

Key = tuple[int, tuple[int, ...]]


class _Node:
    __slots__ = ("children", "parent", "slot", "tokens")

    def __init__(self, parent: _Node | None, tokens: tuple[int, ...], slot: int) -> None:
        self.parent, self.tokens, self.slot = parent, tokens, slot
        self.children: dict[tuple[int, ...], _Node] = {}


class PrefixCache:
    """At most `num_blocks` blocks of `block_size` tokens. Namespaces never share."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size: {block_size}; must be at least 1")
        self.num_blocks, self.block_size = max(0, num_blocks), block_size
        self._roots: dict[str, _Node] = {}
        self._recency: OrderedDict[_Node, None] = OrderedDict()
        self._free: list[int] = []
        self._claims: set[Key] = set()
        self.clear()

    def __len__(self) -> int:
        """Number of blocks held."""
        return len(self._recency)

    def clear(self) -> None:
        """Forget everything, claims too."""
        self._roots, self._recency, self._claims = {}, OrderedDict(), set()
        self._free = list(range(self.num_blocks))[::-1]

    def match(self, ids: Sequence[int], limit: int, namespace: str = "") -> list[int]:
        """Slots of the longest kept chain of blocks at the start of `ids[:limit]`, in order. Counts as a use."""
        path = self._walk(ids, limit, namespace)
        self._touch(path)
        return [node.slot for node in path]

    def claim(self, ids: Sequence[int], limit: int, namespace: str = "") -> tuple[bool, Key | None]:
        """Announce that the first missing block of `ids[:limit]` is about to be computed.

        `(False, None)` if another request has announced the same block: wait for it rather than compute it twice.
        `(True, None)` if no whole block is missing.
        """
        path = self._walk(ids, limit, namespace)
        start = len(path) * self.block_size
        if start + self.block_size > limit or not self.num_blocks:
            return True, None
        parent = id(path[-1]) if path else hash(namespace)
        key = (parent, tuple(ids[start : start + self.block_size]))
        if key in self._claims:
            return False, None
        self._claims.add(key)
        return True, key

    def drop_claim(self, key: Key | None) -> None:
        """The claimed block was inserted, or never will be."""
        if key is not None:
            self._claims.discard(key)

    def insert(self, ids: Sequence[int], num_tokens: int, namespace: str = "") -> list[tuple[int, int]]:
        """Keep the whole blocks of `ids[:num_tokens]`. Returns `(block number in ids, slot)` of those to copy in.

        The least recently used blocks make room; if the chain alone is more than the cache holds, its tail is left out.
        """
        path = self._walk(ids, num_tokens, namespace)
        self._touch(path)
        kept = set(path)
        added: list[tuple[int, int]] = []
        for number in range(len(path), num_tokens // self.block_size):
            slot = self._take_slot(kept)
            if slot is None:
                break
            parent = path[-1] if path else self._roots.setdefault(namespace, _Node(None, (), -1))
            tokens = tuple(ids[number * self.block_size : (number + 1) * self.block_size])
            node = _Node(parent, tokens, slot)
            parent.children[tokens] = node
            self._recency[node] = None
            path.append(node)
            kept.add(node)
            added.append((number, slot))
        self._touch(path)
        return added

    def _walk(self, ids: Sequence[int], limit: int, namespace: str) -> list[_Node]:
        node = self._roots.get(namespace)
        path: list[_Node] = []
        size = self.block_size
        for start in range(0, limit - size + 1, size):
            node = node.children.get(tuple(ids[start : start + size])) if node is not None else None
            if node is None:
                break
            path.append(node)
        return path

    def _touch(self, path: list[_Node]) -> None:
        """Deepest first, so that a block is always more recent than what hangs below it, and leaves go first."""
        for node in reversed(path):
            self._recency.move_to_end(node)

    def _take_slot(self, kept: set[_Node]) -> int | None:
        if self._free:
            return self._free.pop()
        victim = next(iter(self._recency), None)
        if victim is None or victim in kept:
            return None
        del self._recency[victim]
        parent = victim.parent
        if parent is not None:
            del parent.children[victim.tokens]
            if parent.parent is None and not parent.children:
                self._roots = {name: root for name, root in self._roots.items() if root is not parent}
        return victim.slot
