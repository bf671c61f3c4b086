"""The model thread: takes requests in, steps the model, gives tokens out.

Requests join and leave at every step. All changes to the engine's state (pause, abort, new weights) are calls that
run on this thread between two steps, so a step never sees half a change. If the thread fails, every request gets an
error and `failure` says why; nothing waits for ever.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from miles_rl.engine.embedded.backend import Admission, Backend
from miles_rl.engine.embedded.request import Request
from miles_rl.engine.embedded.sampling import sample

T = TypeVar("T")
_log = logging.getLogger(__name__)


class EngineDead(Exception):
    """The model thread ended; the message says why."""


@dataclass(slots=True)
class _Call(Generic[T]):
    function: Callable[[], T]
    future: Future[T] = field(default_factory=Future)

    def run(self) -> None:
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.function())
            except Exception as error:
                self.future.set_exception(error)


class EngineCore:
    """Continuous batching over one `Backend`.

    At most `max_running` requests run at a time, the others wait in order. A step takes one token of every decoding
    request and at most `max_prefill_tokens` prompt tokens. `notify` is called after each step, on the model thread,
    with the requests that finished or stream.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        weight_version: str = "default",
        max_running: int = 128,
        max_prefill_tokens: int = 2048,
        notify: Callable[[list[Request]], None] | None = None,
    ) -> None:
        self.backend = backend
        self.weight_version = weight_version
        self.max_running, self.max_prefill_tokens = max_running, max_prefill_tokens
        self.notify: Callable[[list[Request]], None] = notify or (lambda requests: None)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.is_paused = False
        self.num_generated_tokens = self.num_prompt_tokens = self.num_cached_tokens = self.num_finished = 0
        self.failure: str | None = None
        self.step_started_s: float | None = None
        self._inbox: deque[Request | _Call[Any]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        """Start the model thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the model thread after the step in progress; requests that are left get an error."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout=30)
        self._fail("the engine is stopping")

    def submit(self, requests: list[Request]) -> None:
        """Queue requests; any thread. Raises `EngineDead`."""
        self._put(requests)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the model thread between two steps; any thread. The future gets its result or error."""
        call = _Call(function)
        self._put([call])
        return call.future

    def _put(self, items: list[Any]) -> None:
        with self._wake:
            if self.failure is not None:
                raise EngineDead(self.failure)
            self._inbox.extend(items)
            self._wake.notify()

    # The rest runs on the model thread (or on a caller's own, where the thread was never started).

    def pause(self, mode: str) -> None:
        """Stop stepping. `abort` ends all requests, `retract` puts them back in the queue, `in_place` freezes them."""
        self.is_paused = True
        if mode == "abort":
            self.abort(lambda request: True, "Abort because of pause_generation")
        elif mode == "retract":
            for request in reversed(self.running):
                self.backend.release(request)
                request.num_computed, request.num_retractions = 0, request.num_retractions + 1
                request.prompt_logprobs.clear()
                self.waiting.appendleft(request)
            self.running.clear()

    def resume(self) -> None:
        """Step again."""
        self.is_paused = False

    def abort(self, chosen: Callable[[Request], bool], message: str) -> int:
        """End the chosen requests with what they have; returns their number."""
        aborted = [request for request in (*self.running, *self.waiting) if chosen(request)]
        for request in aborted:
            request.abort(message)
        self._settle(aborted)
        return len(aborted)

    def install(self, staged: Any, version: str | None) -> int:
        """Put new weights in force; returns the number of requests that go on across the change."""
        self.backend.install(staged)
        if version is not None:
            self.weight_version = version
        return len(self.running) + len(self.waiting)

    def step(self) -> bool:
        """Admit, compute and sample once. False if there was nothing to do."""
        self._admit()
        if not self.running:
            return False
        self.step_started_s = time.monotonic()
        output = self.backend.forward(self._plan_prefill())
        sampled = [request for request in output.requests if request.sampling.max_new_tokens > 0]
        if len(sampled) == len(output.requests) and sampled:
            self._take(sampled, *sample(output.logits, sampled))
        elif output.requests:
            self._take_unsampled(output.requests, output.logits)
        self.step_started_s = None
        self._settle(output.requests)
        return True

    def _take(self, requests: list[Request], tokens: list[int], logprobs: list[float]) -> None:
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            if logprob - logprob != 0.0:
                request.fail("the model gave logits that are not finite for this request")
            else:
                request.append(token, logprob, self.weight_version)
        self.num_generated_tokens += len(requests)

    def _take_unsampled(self, requests: list[Request], logits: Any) -> None:
        """A step in which some requests want no token at all: they only had their prompt scored."""
        rows = [index for index, request in enumerate(requests) if request.sampling.max_new_tokens > 0]
        for request in requests:
            if request.sampling.max_new_tokens == 0:
                request.finish({"type": "length", "length": 0})
        if rows:
            sampled = [requests[index] for index in rows]
            self._take(sampled, *sample(logits[rows], sampled))

    def _admit(self) -> None:
        postponed: list[Request] = []
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting.popleft()
            answer = self.backend.admit(request)
            if answer is not Admission.ADMITTED:
                postponed.append(request)
                if answer is Admission.FULL:
                    break
                continue
            self.running.append(request)
            if not request.num_retractions:
                request.num_cached = request.num_computed
                self.num_prompt_tokens += request.num_prompt
                self.num_cached_tokens += request.num_cached
        self.waiting.extendleft(reversed(postponed))
        if postponed and not self.running:
            raise RuntimeError(f"request {postponed[0].rid} can never be admitted")

    def _plan_prefill(self) -> list[tuple[Request, int]]:
        budget = self.max_prefill_tokens
        plan: list[tuple[Request, int]] = []
        for request in self.running:
            if budget and not request.is_decoding:
                count = min(budget, len(request.ids) - request.num_computed)
                plan.append((request, count))
                budget -= count
        return plan

    def _settle(self, touched: list[Request]) -> None:
        """Take finished requests out and tell the listeners."""
        finished = [request for request in touched if request.finish_reason is not None]
        if finished:
            gone = set(finished)
            for request in self.running:
                if request in gone:
                    self.backend.release(request)
            self.running = [request for request in self.running if request not in gone]
            self.waiting = deque(request for request in self.waiting if request not in gone)
            self.num_finished += len(finished)
        heard = [request for request in touched if request.finish_reason is not None or request.streams]
        if heard:
            self.notify(heard)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._drain()
                if not self.is_paused and self.step():
                    continue
                with self._wake:
                    self._wake.wait_for(lambda: self._inbox or self._stopping, timeout=1.0)
        except BaseException as error:
            _log.exception("the model thread failed")
            self._fail(f"the model thread failed: {type(error).__name__}: {error}")

    def _drain(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Request):
                self.waiting.append(item)
            else:
                item.run()

    def _fail(self, message: str) -> None:
        with self._wake:
            self.failure = self.failure or message
            left = list(self._inbox)
            self._inbox.clear()
        requests = [*self.running, *self.waiting, *(item for item in left if isinstance(item, Request))]
        self.running, self.waiting = [], deque()
        for request in requests:
            request.fail(message)
        self.notify(requests)
        for item in left:
            if not isinstance(item, Request) and item.future.set_running_or_notify_cancel():
                item.future.set_exception(EngineDead(message))
