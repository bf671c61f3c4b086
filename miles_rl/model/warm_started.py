"""A small policy that imitates demonstrations first, because a random one never earns a reward.

The result is a folder named by the hash of everything that determines it. It is looked for beside this module (the
one that ships with the project), then in the user's cache, and made if it is in neither. To make the shipped one
again, for example after the suite's demonstrations changed:

    python -m miles_rl.model.warm_started
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from miles_rl.model.base import Progress
from miles_rl.model.recipe import NUM_KEY_DEMONSTRATIONS, Architecture, WarmStartOptions, recipe_key
from sandbox_env.suites.base import Demonstration, Suite

SHIPPED = Path(__file__).parent / "shipped"
RECIPE = "recipe.json"


class WarmStarted:
    """A `PolicySource`: a Qwen3 model of `architecture` and a tokenizer of `vocab_size`, trained by `warm_start`.

    `cache_dir` holds what was made before; the default is `$MILES_CACHE`, else `~/.cache/miles_rl`. A folder whose
    files are not those that were written is made again. Training runs on one thread.
    """

    def __init__(
        self, architecture: Architecture, vocab_size: int, warm_start: WarmStartOptions, cache_dir: str | None = None
    ) -> None:
        self._architecture, self._vocab_size, self._options = architecture, vocab_size, warm_start
        root = cache_dir or os.environ.get("MILES_CACHE") or "~/.cache/miles_rl"
        self._cache = Path(root).expanduser() / "warm_start"

    def key(self, suite: Suite) -> str:
        """What stands for this policy on this suite: equal keys mean equal policies."""
        sample = min(self._options.num_demonstrations, NUM_KEY_DEMONSTRATIONS)
        return recipe_key(self._architecture, self._vocab_size, self._options, self._demonstrations(suite, sample))

    def prepare(self, suite: Suite, progress: Progress | None = None) -> str:
        """The folder of the policy: shipped, cached, or trained now (minutes)."""
        key = self.key(suite)
        for folder in (*sorted(SHIPPED.glob("*/")), self._cache / key):
            if is_intact(folder, key):
                return str(folder)
        return str(self.train(suite, self._cache / key, progress))

    def train(self, suite: Suite, target: Path, progress: Progress | None = None) -> Path:
        """Train the policy and put it at `target`, which is replaced in one move when all is written."""
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
        try:
            key = self.key(suite)
            self._write(suite, key, scratch, progress)
            scratch.chmod(0o755)
            if not is_intact(target, key):
                shutil.rmtree(target, ignore_errors=True)
                scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return target

    def _write(self, suite: Suite, key: str, folder: Path, progress: Progress | None) -> None:
        import torch

        from miles_rl.model.tokenizer import END, PAD, SPECIAL, train_tokenizer
        from miles_rl.rollout.chat import ChatRenderer
        from miles_rl.trainer.warm_start import (
            build_model,
            render_demonstration,
            save_weights,
            texts_of,
            train_warm_start,
        )

        started = time.monotonic()
        demonstrations = self._demonstrations(suite, self._options.num_demonstrations)
        tokenizer = train_tokenizer(texts_of(demonstrations), self._vocab_size, self._architecture.context_length)
        tokenizer.save_pretrained(folder)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._options.seed)
                model = build_model(
                    self._architecture,
                    self._vocab_size,
                    pad_token_id=SPECIAL.index(PAD),
                    eos_token_id=SPECIAL.index(END),
                )
                model.config.save_pretrained(folder)  # the renderer reads it
                renderer = ChatRenderer(str(folder))
                examples = [render_demonstration(renderer, d) for d in demonstrations]
                loss = train_warm_start(model, examples, self._options, progress)
        finally:
            torch.set_num_threads(threads)
        model.generation_config.save_pretrained(folder)
        save_weights(model, folder)
        facts = {
            "key": key,
            "architecture": asdict(self._architecture),
            "vocab_size": self._vocab_size,
            "warm_start": asdict(self._options),
            "num_parameters": sum(p.numel() for p in model.parameters()),
            "loss": round(loss, 4),
            "train_s": round(time.monotonic() - started, 1),
            "files": {p.name: _digest(p) for p in sorted(folder.iterdir())},
        }
        (folder / RECIPE).write_text(json.dumps(facts, indent=2) + "\n")

    def _demonstrations(self, suite: Suite, count: int) -> Sequence[Demonstration]:
        return suite.demonstrations(count, seed=self._options.seed, mistake_rate=self._options.mistake_rate)


def is_intact(folder: Path, key: str) -> bool:
    """True if `folder` holds the policy of `key`, every file as it was written."""
    try:
        recipe = json.loads((folder / RECIPE).read_text())
        return recipe["key"] == key and all(
            _digest(folder / name) == digest for name, digest in recipe["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_shipped(model: Path, suite: Path, target: Path) -> None:
    """Train the policy of the config file `model` on that of `suite`, and replace `target` with it when it is done."""
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    def progress(step: int, steps: int, loss: float) -> None:
        if step % 100 == 0 or step == steps:
            print(f"warm start {step}/{steps}, loss {loss:.3f}", flush=True)

    source, tasks = (instantiate(OmegaConf.load(path), _convert_="all") for path in (model, suite))
    made = source.train(tasks, target.with_name(f"{target.name}.new"), progress)
    shutil.rmtree(target, ignore_errors=True)
    made.rename(target)


if __name__ == "__main__":
    conf = Path(__file__).parents[2] / "conf"
    write_shipped(conf / "model" / "tiny.yaml", conf / "suite" / "minibench.yaml", SHIPPED / "tiny")
