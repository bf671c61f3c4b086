"""Router policies as the simulator needs them: which replica gets a request.

`manual` is what a run uses, with `min_load`: a session stays where it was, a new one goes to the replica with the
fewest requests, the first of equals. `round_robin` takes no notice of sessions or loads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Routing(Protocol):
    """One policy with its memory."""

    def route(self, session: str, loads: Sequence[int]) -> int:
        """Index of the replica for a request of `session`; `loads` are the requests at each replica now."""
        ...


class Manual:
    """Sticky by session, new sessions to the least loaded replica."""

    def __init__(self) -> None:
        self._at: dict[str, int] = {}

    def route(self, session: str, loads: Sequence[int]) -> int:
        """See `Routing`."""
        if session not in self._at:
            self._at[session] = min(range(len(loads)), key=loads.__getitem__)
        return self._at[session]


class RoundRobin:
    """The replicas in turn."""

    def __init__(self) -> None:
        self._next = 0

    def route(self, session: str, loads: Sequence[int]) -> int:
        """See `Routing`."""
        chosen, self._next = self._next % len(loads), self._next + 1
        return chosen


POLICIES: dict[str, Callable[[], Routing]] = {"manual": Manual, "round_robin": RoundRobin}


def make_routing(policy: str) -> Routing:
    """The policy of that name. `ValueError` for one that is not modelled."""
    if policy not in POLICIES:
        raise ValueError(f"router.policy: {policy}; the simulator models {', '.join(POLICIES)}")
    return POLICIES[policy]()
