"""The closed shell of a config: every key that is not an option of some component.

Hydra refuses an unknown key or a wrong type here while it composes. The groups are open (`Any`): their options are
checked against the constructors they reach, in `pipelines.signature`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

GROUPS = (
    "model",
    "parallelism",
    "rollout",
    "dataset",
    "offload",
    "suite",
    "sandbox",
    "engine",
    "router",
    "trainer",
    "loss",
    "cluster",
    "faults",
)
"""Groups whose values are config; `pipeline` fills `stages`, `experiment` changes any key."""


@dataclass
class Resources:
    """What one stage takes of the cluster, on each of its nodes."""

    nodes: int = 1
    gpus_per_node: int = 0
    cpus: float = 0.1


@dataclass
class StageShell:
    """One stage of the graph. The deadlines bound its start, its stop, and each call that another stage makes."""

    run: Any = MISSING
    needs: list[str] = field(default_factory=list[str])
    resources: Resources = field(default_factory=Resources)
    start_timeout_s: float = 120.0
    stop_timeout_s: float = 20.0
    call_timeout_s: float = 600.0


@dataclass
class Cluster:
    """Where the stages run, and how the run notices that one of them is gone or stuck."""

    num_cpus: int = MISSING
    num_gpus: int = MISSING
    object_store_mb: int = MISSING
    include_dashboard: bool = MISSING
    temp_dir: str = MISSING
    start_timeout_s: float = MISSING
    heartbeat_s: float = MISSING
    heartbeat_timeout_s: float = MISSING
    stall_s: float = MISSING
    env: dict[str, str] = MISSING


@dataclass
class RunShell:
    """The top of every config."""

    name: str = MISSING
    seed: int = MISSING
    steps: int = MISSING
    plan_only: bool = False
    resume: str | None = None
    resume_changed: bool = False
    run_dir: str = MISSING
    checks: list[str] = field(default_factory=list[str])
    model: Any = MISSING
    parallelism: Any = MISSING
    rollout: Any = MISSING
    dataset: Any = MISSING
    offload: Any = MISSING
    suite: Any = MISSING
    sandbox: Any = MISSING
    engine: Any = MISSING
    router: Any = MISSING
    trainer: Any = MISSING
    loss: Any = MISSING
    cluster: Cluster = field(default_factory=Cluster)
    faults: Any = MISSING
    stages: dict[str, StageShell] = field(default_factory=dict[str, StageShell])


ConfigStore.instance().store(name="schema", node=RunShell)
