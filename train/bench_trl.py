"""The peer: trl's distillation trainer on the work that ours does.

GKD with lmbda=0 (the recorded text, nothing sampled) and beta=0 (forward KL), without gradient
checkpointing, in the same numbers, with the same answers in every step and as many threads.
"""

# B answers of a step, T positions of the longest

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from conf.run import peak_memory_gib
from data.batches import num_positions, plan_batches
from data.shards import Row
from models.load import load_model
from train.bench_work import Bench, Found, Work, spent_rate

IGNORED = -100  # label of a position that is not learned from
ENDLESS = 1_000_000  # steps: the time ends the run


def by_trl(bench: Bench, work: Work) -> Found:
    """Train for `work.seconds` with trl's GKD trainer."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    model = bench.draft()
    plain = model.full[0]
    size, width = model.head.shape
    frozen = nn.Linear(width, size, bias=False)
    frozen.weight = nn.Parameter(model.head.float(), requires_grad=False)
    plain.lm_head = nn.Sequential(model.map, frozen)
    table = plain.get_input_embeddings().weight
    table.data = table.float()  # as it loads by itself
    plain.set_attn_implementation("sdpa")
    found = Found()
    settings = bench.config.optim
    optimizer = torch.optim.AdamW(
        [parameter for parameter in plain.parameters() if parameter.requires_grad],
        lr=settings.lr, betas=(0.9, 0.95), weight_decay=settings.weight_decay, fused=True,
    )  # fmt: skip

    class Clock(TrainerCallback):
        """Ends the run with the time; counts what was learned from."""

        start = 0.0

        def spent(self) -> float:
            return (time.perf_counter() - self.start) / work.seconds

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            found.steps += 1
            found.tokens += counts[found.steps - 1]
            if self.spent() >= 1:
                control.should_training_stop = True

    steps = _steps(bench)
    counts: list[int] = []
    clock = Clock()

    def collate(_: Any) -> dict[str, Tensor]:
        rows = next(steps)
        counts.append(sum(row.num_laws for row in rows))
        return padded(rows)

    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda _: spent_rate(clock.spent() if clock.start else 0.0, settings)
    )
    half = bench.dtype is torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        trainer = GKDTrainer(
            model=plain,
            teacher_model=load_model(bench.target, bench.config.target, bench.device),
            args=GKDConfig(
                output_dir=folder, lmbda=0.0, beta=0.0, temperature=1.0, bf16=half,
                use_cpu=bench.device.type == "cpu", per_device_train_batch_size=1,
                max_steps=ENDLESS, max_grad_norm=settings.grad_clip, gradient_checkpointing=False,
                report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
            ),
            data_collator=collate,
            train_dataset=Dataset.from_dict({"step": list(range(ENDLESS // 1000))}),
            processing_class=bench.target.tokenizer,
            optimizers=(optimizer, schedule),
            callbacks=[clock],
        )  # fmt: skip
        trainer.train()
        found.seconds = time.perf_counter() - clock.start
    found.peak_gib = peak_memory_gib()
    del trainer
    bench.judge(found, model, whole=True)
    return found


def _steps(bench: Bench) -> Iterator[list[Row]]:
    """The answers of each step, as our loop takes them."""
    plan = plan_batches(
        [num_positions(row) for row in bench.train],
        tokens_per_step=bench.config.optim.tokens_per_step,
        seed=bench.config.seed,
        num_epochs=1.0,
    )
    return cycle([[bench.train[i] for i in share] for (share,) in plan])


def padded(rows: list[Row]) -> dict[str, Tensor]:
    """Answers as a padded batch, labelled where a law was recorded."""
    texts = [torch.cat([row.prompt, row.generated]) for row in rows]
    longest = max(map(len, texts))
    ids_BT = torch.zeros(len(rows), longest, dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT)
    labels_BT = torch.full_like(ids_BT, IGNORED)
    for number, (row, text) in enumerate(zip(rows, texts, strict=True)):
        ids_BT[number, : len(text)] = text
        mask_BT[number, : len(text)] = 1
        labels_BT[number, len(text) - row.num_laws : len(text)] = text[-row.num_laws :]
    return {"input_ids": ids_BT, "attention_mask": mask_BT, "labels": labels_BT}
