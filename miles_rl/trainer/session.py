"""A loaded policy in training: what stands behind `TorchTrainer` once there are weights. Heavy to import."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from miles_rl.loss.base import Loss
from miles_rl.loss.checks import OptionError
from miles_rl.trainer.checkpoint import export_model, read_state, restore_rng_state, weights_checksum, write_state
from miles_rl.trainer.learner import Learner
from miles_rl.trainer.options import TorchOptions
from miles_rl.trainer.policy_model import PolicyModel
from miles_rl.types import Batch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchSession:
    """Model, optimizer and generators of one process. See `miles_rl.trainer.base.Trainer` for the methods."""

    def __init__(self, loss: Loss, options: TorchOptions, model_dir: str, checkpoint_dir: str | None) -> None:
        self._options = options
        self._dtype = DTYPES[options.dtype]
        state = None if checkpoint_dir is None else read_state(Path(checkpoint_dir))
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        _seed_all(options.seed)
        self._model = self._read_model(model_dir, trainable=True)
        self._reference_dir: str | None = None
        reference = None
        if loss.needs.reference:
            first = model_dir if state is None else state["reference_dir"] or model_dir
            reference_dir = options.reference_model_dir or first
            reference = self._read_model(reference_dir, trainable=False)
            self._reference_dir = reference_dir
        self._learner = Learner(self._model, loss, options, reference)
        if state is not None:
            self._restore(state, model_dir)

    def step(self, batch: Batch) -> Mapping[str, float]:
        """Learn from one batch."""
        return self._learner.step(batch)

    def export(self, target_dir: str) -> str:
        """Write the weights in the dtype of the options."""
        return export_model(self._model.module, self._model.source_dir, Path(target_dir), self._dtype)

    def save(self, target_dir: str) -> None:
        """Write the state, with the float32 weights where the export rounds them."""
        parameters = dict(self._model.named_parameters())
        rounded = self._dtype != torch.float32
        write_state(
            Path(target_dir),
            {
                **self._learner.state(),
                "dtype": self._options.dtype,
                "masters": {name: p.detach().cpu() for name, p in parameters.items()} if rounded else None,
                "weights_checksum": weights_checksum(parameters.items(), self._dtype),
                "reference_dir": self._reference_dir,
            },
        )

    def _restore(self, state: Mapping[str, Any], model_dir: str) -> None:
        if state["dtype"] != self._options.dtype:
            raise OptionError("trainer.dtype", self._options.dtype, f"the checkpoint has {state['dtype']}: give that")
        self._learner.restore(state)
        if weights_checksum(self._model.named_parameters(), self._dtype) != state["weights_checksum"]:
            raise ValueError(f"trainer: the weights in {model_dir} are not those that the checkpoint was saved with")
        if state["masters"] is not None:
            with torch.no_grad():
                for name, parameter in self._model.named_parameters():
                    parameter.copy_(state["masters"][name])
        restore_rng_state(state["rng"])

    def _read_model(self, model_dir: str, *, trainable: bool) -> PolicyModel:
        return PolicyModel(
            model_dir,
            device=_device(self._options.device),
            compute_dtype=self._dtype,
            temperature=self._options.temperature,
            chunk_tokens=self._options.logprob_chunk_tokens,
            trainable=trainable,
        )


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise OptionError("trainer.device", name, "torch sees no CUDA device: give cpu or auto")
    return torch.device("cuda" if name != "cpu" and available else "cpu")
