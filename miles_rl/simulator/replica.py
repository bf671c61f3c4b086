"""A model of one inference engine: how long a request takes, by how many it shares the engine with.

Decoding: with n requests running, each gains one token every `token_s + token_s_per_request * n` seconds: reading the
weights costs the same for all, reading the KV cache and computing grows with each. Prefill: the tokens of the prompt
that are not cached are computed first come first served, beside the decoding. Above `max_running` requests wait in
line. New weights pause all requests in place. Tokens carry the version that wrote them.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from miles_rl.types import WeightVersion

_ROUNDING = 1e-6
"""Tokens: what the clock's resolution may leave of a request that is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaModel:
    """Speed and room of one replica. `flush_on_publish`: no KV of older weights is used again."""

    token_s: float
    token_s_per_request: float
    prefill_tokens_per_s: float
    max_running: int
    cache_tokens: int
    flush_on_publish: bool = True

    def __post_init__(self) -> None:
        for name in ("token_s", "prefill_tokens_per_s", "max_running"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: {getattr(self, name)}; give more than 0")
        for name in ("token_s_per_request", "cache_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)}; give at least 0")


@dataclass(frozen=True, slots=True)
class Generated:
    """Tokens of one reply by the version that wrote them, oldest first, and what the prefix cache had of the prompt."""

    spans: Sequence[tuple[WeightVersion, int]]
    cached_tokens: int


@dataclass(slots=True)
class _Cache:
    """Tokens of each session of which the KV is kept; the least recently used goes first."""

    room: int
    tokens: OrderedDict[str, int] = field(default_factory=OrderedDict[str, int])
    used: int = 0

    def hit(self, session: str, prompt_tokens: int) -> int:
        if session not in self.tokens:
            return 0
        self.tokens.move_to_end(session)
        return min(self.tokens[session], prompt_tokens)

    def keep(self, session: str, num_tokens: int) -> None:
        self.used += num_tokens - self.tokens.pop(session, 0)
        self.tokens[session] = num_tokens
        while self.used > self.room:
            self.used -= self.tokens.popitem(last=False)[1]

    def flush(self) -> None:
        self.tokens.clear()
        self.used = 0


class Replica:
    """One replica that runs `ReplicaModel` under weights `version`. Belongs to the running event loop."""

    def __init__(self, model: ReplicaModel, version: WeightVersion = 0) -> None:
        self._model = model
        self._marks: list[tuple[float, WeightVersion]] = [(0.0, version)]
        self._cache = _Cache(model.cache_tokens)
        self._decoding: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._places = model.max_running
        self._num_decoding = 0
        self._progress, self._at = 0.0, 0.0
        self._prefill_free_at = 0.0
        self._paused = False
        self._timer: asyncio.TimerHandle | None = None
        self.load = 0
        """Requests that are here, in line or running."""

    @property
    def version(self) -> WeightVersion:
        """Version of the weights."""
        return self._marks[-1][1]

    async def generate(self, session: str, prompt_tokens: int, num_tokens: int) -> Generated:
        """`num_tokens` after a prompt that begins with everything the session has had so far."""
        self.load += 1
        try:
            await self._place()
            try:
                cached, begun_with = self._cache.hit(session, prompt_tokens), self.version
                await self._prefill(prompt_tokens - cached)
                begin = self._advance()
                await self._decode(begin + num_tokens)
            finally:
                self._leave_place()
        finally:
            self.load -= 1
        if begun_with == self.version or not self._model.flush_on_publish:
            self._cache.keep(session, prompt_tokens + num_tokens)
        return Generated(self._spans(begin, num_tokens), cached)

    def pause(self) -> None:
        """Stop decoding in place; nothing is lost."""
        self._advance()
        self._paused = True
        self._arm()

    def resume(self, version: WeightVersion) -> None:
        """Go on with all requests under the weights of `version`."""
        self._marks.append((self._advance(), version))
        if self._model.flush_on_publish:
            self._cache.flush()
        self._paused = False
        self._arm()

    async def _place(self) -> None:
        if self._places > 0:
            self._places -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn  # bounded: the latencies that were drawn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave_place()
            raise

    def _leave_place(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._places += 1

    async def _prefill(self, num_tokens: int) -> None:
        now = asyncio.get_running_loop().time()
        self._prefill_free_at = max(now, self._prefill_free_at) + num_tokens / self._model.prefill_tokens_per_s
        if self._prefill_free_at > now:
            await asyncio.sleep(self._prefill_free_at - now)

    async def _decode(self, until: float) -> None:
        done = asyncio.get_running_loop().create_future()
        heapq.heappush(self._decoding, (until, next(self._order), done))
        self._num_decoding += 1
        self._arm()
        try:
            await done  # bounded: the latencies that were drawn
        except asyncio.CancelledError:
            if done.cancelled():  # its entry leaves the heap when it comes up
                self._advance()
                self._num_decoding -= 1
                self._arm()
            raise

    def _advance(self) -> float:
        """Tokens that a request which always ran would have by now."""
        now = asyncio.get_running_loop().time()
        if not self._paused and self._num_decoding:
            self._progress += (now - self._at) / self._token_s()
        self._at = now
        return self._progress

    def _token_s(self) -> float:
        return self._model.token_s + self._model.token_s_per_request * self._num_decoding

    def _arm(self) -> None:
        """Wake up when the next request is complete."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._decoding and self._decoding[0][2].done():
            heapq.heappop(self._decoding)
        if self._decoding and not self._paused:
            rest = max(0.0, self._decoding[0][0] - self._progress)
            self._timer = asyncio.get_running_loop().call_at(self._at + rest * self._token_s(), self._complete)

    def _complete(self) -> None:
        self._timer = None
        # The first is complete, as this is its time, also where a late clock is too coarse for what is left of it.
        complete_to = max(self._advance() + _ROUNDING, self._decoding[0][0])
        while self._decoding and self._decoding[0][0] <= complete_to:
            done = heapq.heappop(self._decoding)[2]
            if not done.done():
                done.set_result(None)
                self._num_decoding -= 1
        self._arm()

    def _spans(self, begin: float, num_tokens: int) -> list[tuple[WeightVersion, int]]:
        """Tokens per version: each mark says from which progress on a version wrote."""
        spans: list[tuple[WeightVersion, int]] = []
        end = num_tokens
        for mark, version in reversed(self._marks):
            start = min(end, max(0, round(mark - begin)))
            if end > start:
                spans.append((version, end - start))
            end = start
            if end == 0:
                break
        return spans[::-1]
