"""Values that only a constructor knows to be wrong are refused before anything starts, in one line."""

import pytest
from composed import compose_config

from pipelines.errors import ConfigError
from pipelines.origin import resolve
from pipelines.plan import make_plan


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("loss.clip_low=-1", "loss.clip_low: -1; give a number at least 0"),
        ("loss.advantage=gropo", "loss.advantage: gropo; "),
        ("parallelism.tensor=2", "parallelism.tensor: 2; "),
        ("trainer.lr=-1", "trainer.lr: -1"),
        ("rollout.agent.temperature=0", "rollout.agent.temperature: 0"),
        ("rollout.num_groups=0", "rollout.num_groups: 0; give at least 1"),
        ("rollout.batch_timeout_s=0", "rollout.batch_timeout_s: 0"),
        ("engine.device=foo", "engine.device: foo; give cpu, cuda or cuda:N"),
        ("engine.max_running=0", "engine.max_running: 0"),
        ("sandbox.size=0", "sandbox.size: 0; at least 1"),
        ("sandbox.provider.memory_mb=0", "sandbox.provider.memory_mb: 0"),
        ("suite.seed=-3", "suite.seed: -3"),
        ("model.warm_start.steps=0", "model.warm_start.steps: 0"),
        ("stages.eval.run.num_samples=0", "stages.eval.run.num_samples: 0"),
        ("stages.fleet.run.num_replicas=0", "stages.fleet.run.num_replicas: 0"),
        ("stages.trainer.run.keep_checkpoints=0", "stages.trainer.run.keep_checkpoints: 0"),
    ],
)
def test_a_value_that_cannot_be_meant_is_one_line(override: str, line: str) -> None:
    resolved, raw = resolve(compose_config(override))
    with pytest.raises(ConfigError) as caught:
        make_plan(resolved, raw)
    assert any(problem.line.startswith(line) for problem in caught.value.problems), str(caught.value)


def test_the_default_run_can_be_built_before_it_is_launched() -> None:
    plan = make_plan(*resolve(compose_config()))
    assert [stage.name for stage in plan.stages][-1] == plan.driver == "trainer"
