"""All simulated replicas behind the router's policy."""

from __future__ import annotations

import asyncio

from miles_rl.simulator.replica import Generated, Replica, ReplicaModel
from miles_rl.simulator.routing import make_routing
from miles_rl.types import WeightVersion


class SimulatedFleet:
    """`num_replicas` of `model`, new requests routed by `policy`. Counts what the prefix caches served."""

    def __init__(self, model: ReplicaModel, num_replicas: int, policy: str) -> None:
        self._replicas = [Replica(model) for _ in range(num_replicas)]
        self._router = make_routing(policy)
        self.prompt_tokens = self.cached_tokens = 0

    @property
    def load(self) -> int:
        """Requests at all replicas."""
        return sum(replica.load for replica in self._replicas)

    async def generate(self, session: str, prompt_tokens: int, num_tokens: int) -> Generated:
        """See `Replica.generate`, at the replica that the router chooses."""
        chosen = self._router.route(session, [replica.load for replica in self._replicas])
        generated = await self._replicas[chosen].generate(session, prompt_tokens, num_tokens)
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += generated.cached_tokens
        return generated

    async def publish(self, version: WeightVersion, publish_s: float) -> None:
        """Pause all requests, take in the weights of `version` for `publish_s`, go on."""
        for replica in self._replicas:
            replica.pause()
        await asyncio.sleep(publish_s)
        for replica in self._replicas:
            replica.resume(version)
