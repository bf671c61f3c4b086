"""Configs as the command line would compose them, without a command line."""

import os
from pathlib import Path

from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from pipelines import schema as schema

EXPERIMENTS = sorted(path.stem for path in (Path(__file__).parents[1] / "conf/experiment").glob("*.yaml"))


def compose_config(*overrides: str) -> DictConfig:
    """The composed config, with a fixed `run_dir` and nothing from this machine's environment."""
    os.environ.pop("MILES_CACHE", None)
    with initialize_config_module("conf", version_base="1.3"):
        return compose("run", overrides=["run_dir=RUN_DIR", *overrides])
