"""The training loop: packed batches, chunked loss, one global denominator over all processes, exact
resume.
"""

# N supervised positions, E features

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor

from conf.choices import Supervision
from conf.errors import UserError
from conf.schema import Config
from conf.tracking import Tracker
from data.batches import collate, num_positions, plan_batches
from data.shards import Row
from models.draft import DraftModel
from models.load import dtype_of, peak_gib
from train.checkpoint import BEST, STATE, Progress, load_state, save_state
from train.head import Head, Sums, features_of
from train.objectives import Objective, objective
from train.optim import Optimizers, rate_factor
from train.processes import (
    agreed,
    is_sharded,
    share_out_weights,
    sum_gradients,
    sum_over_processes,
    whole,
)
from train.select import Selection, num_selected
from train.supervision import Source, Sources
from train.validation import acceptances, mean_acceptance, position_acceptance

LOG_SECONDS = 10.0
NUM_COLD = 1024
DRAFTED = 4  # tokens whose acceptance one after another a validation shows


class NonFiniteLoss(UserError, ArithmeticError):
    """The loss or its gradient is not a number. The last good checkpoint is kept."""


class Trainer:
    """Trains a draft on recorded answers; every process holds the whole draft, or its shard."""

    def __init__(
        self,
        config: Config,
        model: DraftModel,
        head: Head,
        train: Sequence[Row],
        validation: Sequence[Row],
        sources: Sources | None = None,
        selection: Selection | None = None,
    ):
        self.config, self.model, self.head = config, model, head
        self.sources, self.selection = sources or Sources(Source()), selection
        self.train_rows, self.validation_rows = train, validation
        self.state = PartialState()
        self.device = head.weight_HE.device
        self.dtype = dtype_of(config.runtime.train_dtype, self.device)
        self.optimizers = Optimizers(model, config.optim)
        self.progress = Progress()
        self._seconds_for_data = 0.0  # since the last line of the log
        settings = config.optim
        plan = plan_batches(
            [num_positions(row) for row in train],
            tokens_per_step=settings.tokens_per_step,
            seed=config.seed,
            num_epochs=settings.num_epochs,
            num_processes=self.state.num_processes,
        )
        self.plan = list(plan)
        if settings.max_steps >= 0:
            self.plan = self.plan[: settings.max_steps]

    def restore(self, folder: Path) -> bool:
        """Go on from a checkpoint; False when there is none."""
        saved = load_state(folder / STATE)
        self.state.wait_for_everyone()  # before the first process writes the next one
        if saved is None:
            return False
        # frozen weights are rebuilt, not saved
        self.model.load_state_dict(share_out_weights(saved["model"], self.model), strict=False)
        self.optimizers.load_state_dict(saved["optimizers"])
        self.progress = Progress(**saved["progress"])
        self._last_saved = self.progress.step
        return True

    def limit(self, num_steps: int) -> None:
        """End after so many steps, and no fewer or more when the run is resumed. The first process
        decides, as each may have measured other times.
        """
        if self.progress.num_planned < 0:
            self.progress.num_planned = agreed(num_steps, self.device)
        self.plan = self.plan[: self.progress.num_planned]

    def fit(self, folder: Path, tracker: Tracker) -> Progress:
        """Train to the end of the plan. Raises NonFiniteLoss naming the answers of the step."""
        done = self.progress
        settings = self.config.optim
        if done.first is None:
            self._validate(folder, tracker)
        start = last = time.perf_counter()
        before = done.seconds
        since = Sums()
        with tracker.progress("distill", len(self.plan), "steps") as bar:
            bar.advance(done.step)
            for step in range(done.step, len(self.plan)):
                sums, norm = self.step(step)
                since += sums
                done.step, done.num_tokens = step + 1, done.num_tokens + sums.count
                bar.advance()
                now = time.perf_counter()
                done.seconds = before + now - start
                if (now - last > LOG_SECONDS or self._turns(step + 1)) and since.count:
                    self._log(tracker, since, norm, step, now - last)
                    since, last = Sums(), now
                if done.step % settings.evaluate_every == 0 or done.step == len(self.plan):
                    self._validate(folder, tracker)
        self.state.wait_for_everyone()  # until the first process has written the best weights
        return done

    def step(self, step: int) -> tuple[Sums, float]:
        """One optimizer step; sums over all processes."""
        rows = self.texts_of(self.rows_of(step), step)
        learned = float(sum(map(self._num_learned, rows)))
        count = self._sum_over_processes(torch.tensor([learned]))
        local = self.add_gradients(rows, step, 1.0 / max(float(count), 1.0))
        names = list(self._objective(step).weights)
        totals = self._sum_over_processes(
            torch.tensor(
                [local.loss, local.acceptance, float(local.count)]
                + [local.parts.get(name, 0.0) for name in names if len(names) > 1]
            )
        )
        if self.state.num_processes > 1:
            sum_gradients(self.optimizers.parameters)
        loss = float(totals[0])
        norm = self.optimizers.step(self._rate_factor(step)) if math.isfinite(loss) else math.nan
        if not math.isfinite(norm):
            answers = sorted(self.train_rows[i].index for share in self.plan[step] for i in share)
            raise self._non_finite(
                f"step {step}: the loss or its gradient", f"answers {answers} of the training split"
            )
        parts = dict(zip(names, totals[3:].tolist(), strict=False))
        return Sums(loss, float(totals[1]), int(totals[2]), parts), norm

    def _objective(self, step: int) -> Objective:
        return objective(self.config.objective, step / len(self.plan))

    def _turns(self, step: int) -> bool:
        """Whether something else is minimised from this step on: no mean is taken across it."""
        return self._objective(step).weights != self._objective(step - 1).weights

    def _rate_factor(self, step: int) -> float:
        settings = self.config.optim
        return rate_factor(
            step,
            len(self.plan),
            warmup_share=settings.warmup_share,
            decay_share=settings.decay_share,
        )

    def rows_of(self, step: int) -> list[Row]:
        """This process's answers of a step."""
        return [self.train_rows[i] for i in self.plan[step][self.state.process_index]]

    def _num_learned(self, row: Row) -> int:
        share = 1.0 if self.selection is None else self.selection.share
        return num_selected(row.num_laws, share)

    def texts_of(self, rows: Sequence[Row], step: int) -> list[Row]:
        """What a step learns from, made from its recorded answers."""
        return self._source(step).rows(rows, step, self._features)

    def _source(self, step: int) -> Source:
        return self.sources.at(step, len(self.plan))

    def _features(self, rows: Sequence[Row]) -> Tensor:
        self.model.eval()
        return features_of(self.model, collate(rows).to(self.device), self.dtype)

    def add_gradients(self, rows: Sequence[Row], step: int, scale: float) -> Sums:
        """Add the gradients of `scale` * (summed loss of these answers) to the parameters'."""
        # no dropout: its random state would be one more thing to resume, and the target had none
        self.model.eval()
        if not rows and not is_sharded(self.model):
            return Sums()
        if not rows:  # a sharded draft computes on all processes or not at all
            rows = self.texts_of([self.train_rows[sum(self.plan[step], [])[0]]], step)
            self.add_gradients(rows, step, 0.0)
            return Sums()
        seed = hash((self.config.seed, step)) % 2**63
        start = time.perf_counter()
        batch = collate(rows).to(self.device)
        self._seconds_for_data += time.perf_counter() - start
        target = self._source(step).laws(batch)
        features = features_of(self.model, batch, self.dtype)
        if self.selection is not None:
            counts = [row.num_laws for row in rows]
            kept = self.selection.choose(batch, counts, features, self.head, target, seed)
            batch, features = batch.supervise(kept), features[kept]
            target = None if target is None else target.at(kept)
        sums, gradient = self.head.backward(
            features.detach(),
            batch,
            self._objective(step),
            scale=scale,
            rng=torch.Generator().manual_seed(seed),
            target=target,
        )
        features.backward(gradient)
        return sums

    _last_saved: int | None = None

    def _non_finite(self, what: str, where: str) -> NonFiniteLoss:
        kept = (
            "No checkpoint was written"
            if self._last_saved is None
            else f"The checkpoint of step {self._last_saved} is kept"
        )
        return NonFiniteLoss(
            f"{what} is not finite, on {where}. {kept}. Lower optim.lr or set"
            " runtime.train_dtype=float32, under a new name=."
        )

    def _sum_over_processes(self, values: Tensor) -> Tensor:
        return values if self.state.num_processes == 1 else sum_over_processes(values, self.device)

    def _log(self, tracker: Tracker, sums: Sums, norm: float, step: int, seconds: float) -> None:
        tracker.event(
            "distill/train",
            {
                "loss": sums.loss / sums.count,
                **{f"loss_{name}": sums.parts[name] / sums.count for name in sums.parts},
                "expected_acceptance": sums.acceptance / sums.count,
                "gradient_norm": norm,
                "lr": self.config.optim.lr * self._rate_factor(step),
                "tokens": self.progress.num_tokens,
                "tokens_per_second": sums.count / seconds,
                "data_share": self._seconds_for_data / seconds,
                "peak_memory_gib": peak_gib(self.device),
            },
            step=step + 1,
        )
        self._seconds_for_data = 0.0

    def judge(self, rows: Sequence[Row]) -> list[Tensor]:
        """What checkpoints are selected by the mean of, at each position of each answer: expected
        acceptance on recorded laws, or, where only tokens are learned from, the probability of the
        target's token.
        """
        by_tokens = self.config.objective.source is Supervision.hard
        return acceptances(self.model, self.head, rows, self.dtype, by_tokens=by_tokens)

    def _validate(self, folder: Path, tracker: Tracker) -> None:
        """Validate, remember the best weights, save everything."""
        by_answer = self.judge(self.validation_rows)
        found = mean_acceptance(by_answer)
        done = self.progress
        if not math.isfinite(found.value):  # before such weights replace the last good ones
            raise self._non_finite(
                f"step {done.step}: the draft's distribution", "the validation answers"
            )
        done.curve.append(
            {"step": done.step, "tokens": done.num_tokens, "expected_acceptance": found.value}
        )
        done.first = done.first or asdict(found)
        is_best = done.best is None or found.value > done.best["value"]
        if is_best:
            done.best, done.best_step = asdict(found), done.step
        tracker.event(
            "distill/validation",
            {
                "expected_acceptance": found.value,
                "low": found.low,
                "high": found.high,
                **{
                    f"position_acceptance_{i}": rate
                    for i, rate in enumerate(position_acceptance(by_answer, DRAFTED), start=1)
                },
                "tokens": done.num_tokens,
            },
            step=done.step,
        )
        checkpoint = self._checkpoint()  # by all processes, each may hold a part
        if self.state.is_main_process:
            if is_best:
                save_state(folder / BEST, {"model": checkpoint["model"], "step": done.step})
            save_state(folder / STATE, checkpoint)
        self._last_saved = done.step

    def _checkpoint(self) -> dict[str, Any]:
        frozen = {name for name, each in self.model.named_parameters() if not each.requires_grad}
        weights = self.model.state_dict()
        return {
            "model": whole({name: weights[name] for name in weights if name not in frozen}),
            "optimizers": whole(self.optimizers.state_dict()),
            "progress": vars(self.progress),
        }
