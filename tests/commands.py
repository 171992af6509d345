"""The pipeline's command on a tiny target, as a process of its own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.tiny import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[1]
TIMEOUT = 900  # a busy machine; each command takes seconds
LETTERS = "abcdefghijklmnoprstuvw"


def prompts(path: Path, category: str, number: int) -> str:
    """A file of questions about words that do not exist, no two alike."""
    rng = random.Random(category)
    lines = []
    for i in range(number):
        words = ("".join(rng.choices(LETTERS, k=rng.randint(3, 6))) for _ in range(8))
        lines.append(json.dumps({"prompt": f"{category} {i}: {' '.join(words)}?"}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


@dataclass(frozen=True)
class Place:
    """A tiny target, prompts of two categories, and a recipe of a user's own that names them."""

    folder: Path

    @property
    def outputs(self) -> Path:
        return self.folder / "outputs"

    def command(self, *overrides: str) -> list[str]:
        """What is typed after `python`."""
        flags = [each for each in overrides if each.startswith("-")]
        rest = [each for each in overrides if not each.startswith("-")]
        recipe = ["--config-dir", str(self.folder / "conf"), *flags, "experiment=tiny"]
        return ["-m", "train", *recipe, f"outputs={self.outputs}", *rest]

    def environment(self) -> dict[str, str]:
        home = {f"WANDB_{name}_DIR": str(self.folder / "wandb") for name in ("CONFIG", "CACHE")}
        return {**os.environ, **home, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}

    def run(self, *overrides: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """`python -m train`, which must leave with this code."""
        return self.execute([sys.executable, *self.command(*overrides)], code)

    def execute(self, command: list[str], code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        assert done.returncode == code, done.stderr[-4000:]
        return done


def tiny_place(folder: Path) -> Place:
    """Fill a folder: the target, the prompts, the recipe."""
    tiny_model(num_layers=4).save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    train = {name: prompts(folder / f"{name}.jsonl", name, 30) for name in ("chat", "code")}
    suites = {name: prompts(folder / f"{name}_test.jsonl", f"test {name}", 3) for name in train}
    for group, key, files in (("data", "sources", train), ("eval", "suites", suites)):
        lines = ["defaults:", f"  - /schema/{group}/base@_here_", "  - _self_", f"{key}:"]
        lines += [f"  {name}: {{category: {name}, path: {path}}}" for name, path in files.items()]
        (folder / "conf" / group).mkdir(parents=True)
        (folder / "conf" / group / "tiny.yaml").write_text("\n".join(lines) + "\n")
    (folder / "conf" / "experiment").mkdir()
    (folder / "conf" / "experiment" / "tiny.yaml").write_text(
        f"""# @package _global_
defaults:
  - override /data: tiny
  - override /eval: tiny
  - override /target: hub
  - override /objective: forward_kl
  - _self_
target: {{path: {folder / "target"}, dtype: float32}}
data: {{num_train: 36, num_validation: 8}}
draft: {{num_layers: 2}}
generate: {{max_new_tokens: 32, batch_size: 4, rows_per_shard: 8}}
optim: {{lr: 0.004, tokens_per_step: 512, evaluate_every: 4, num_epochs: 1}}
eval: {{prompts_per_category: 2, max_new_tokens: 16, gammas: [1, 3]}}
runtime: {{device: cpu, compile: false, train_dtype: float32}}
"""
    )
    return Place(folder)


def wait_for(found: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Until something is there; the process must still be running."""
    limit = time.monotonic() + TIMEOUT
    while not found():
        assert process.poll() is None, "the command ended first"
        assert time.monotonic() < limit
        time.sleep(0.005)
