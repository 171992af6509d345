"""Where the target's side of the loss comes from: recorded laws, the target itself, its tokens.

One training loop asks a source twice a step: which text to learn from, and which laws hold there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conf.choices import DraftVocab, Supervision
from conf.contracts import Lessons
from conf.errors import ConfigError, require
from conf.groups import ObjectiveConfig
from conf.schema import Config
from conf.tracking import Tracker
from data.batches import Batch
from data.shards import Row
from models.draft import DraftModel
from models.load import Target, dtype_of, load_model
from models.packed import hidden_states, pack_attention
from train.head import Head, TargetLaws
from train.rollout import continue_answers

# what the draft's head reads at the supervised positions of answers
Features = Callable[[Sequence[Row]], Tensor]
TOLERANCE = 1e-2  # of logits, relative to their spread, where two ways to compute them round


class Teacher:
    """The target in memory, reading what the draft reads. Never trained.

    Raises ConfigError for a model that changes its logits after its head.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        pack_attention(model)
        self.model = model.eval().requires_grad_(False)
        self._require_plain_head()

    @torch.no_grad()
    def laws(self, batch: Batch) -> TargetLaws:
        """Whole laws at the supervised positions of a packed line."""
        states = hidden_states(self.model, batch)[0, batch.supervised_N]
        return TargetLaws(states, self.model.get_output_embeddings())

    @torch.no_grad()
    def _require_plain_head(self) -> None:
        """Some families cap or scale their logits, which a head by itself does not."""
        ids = torch.arange(4, device=self.model.device).unsqueeze(0)
        whole = self.model(input_ids=ids, use_cache=False).logits
        states = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        plain = self.model.get_output_embeddings()(states)
        if (whole - plain).abs().max() > TOLERANCE * whole.std():
            raise ConfigError(
                f"objective.source: {type(self.model).__name__} changes its logits behind its head,"
                " which training beside it does not. Use objective.source=recorded."
            )


@dataclass
class Source:
    """What one step learns from.

    Args:
        answers_only: leave out the laws of prompts, which hold no token of the target's.
        teacher: the target, for its whole laws; None: the recorded ones.
        rewrite: changes the answers of a step, given its number; None: they stay.
    """

    answers_only: bool = False
    teacher: Teacher | None = None
    rewrite: Callable[[Sequence[Row], int, Features], list[Row]] | None = None

    def rows(self, rows: Sequence[Row], step: int, features: Features) -> list[Row]:
        """The answers to learn from in a step, made from its recorded ones."""
        if self.answers_only:
            rows = [row.of_answer() for row in rows]
        return list(rows) if self.rewrite is None else self.rewrite(rows, step, features)

    def laws(self, batch: Batch) -> TargetLaws | None:
        """Whole laws of the target; None: those in the batch."""
        return None if self.teacher is None else self.teacher.laws(batch)


def require_laws(config: Config, lessons: Lessons) -> None:
    """Raise ConfigError when distributions are needed that were not recorded."""
    there = lessons.engine.get("laws", True)
    require(
        there or config.draft.vocab is not DraftVocab.shared,
        "draft.vocab",
        config.draft.vocab,
        "such a draft is calibrated on distributions, and the lessons were recorded with"
        " generate.server.laws=false",
        "Record them with generate.server.laws=true under another name=",
    )
    require(
        there or not config.draft.chooses_depth,
        "draft.num_layers",
        config.draft.num_layers,
        "drafts are compared by distributions, and the lessons were recorded with"
        " generate.server.laws=false",
        "Say how many layers",
    )
    require(
        there or config.objective.finish_source is not Supervision.recorded,
        "objective.finish_source",
        config.objective.finish_source,
        "the lessons were recorded with generate.server.laws=false and hold no distributions",
        "Use objective.finish_source=on_policy, or none",
    )
    require(
        there or config.objective.source is Supervision.hard,
        "objective.source",
        config.objective.source,
        "the lessons were recorded with generate.server.laws=false and hold no distributions",
        "Use objective=hard",
    )


class Sources:
    """The source of each step: one for the first part of the run, another one for its end.

    Args:
        first: of the steps before the last phase.
        last: opens that of the last phase, when its first step comes: until then no target takes
            memory for it. None: there is no such phase.
        share: of the steps, that the last phase takes.
        last_bytes: of the target that the last phase loads.
    """

    def __init__(
        self,
        first: Source,
        last: Callable[[], Source] | None = None,
        share: float = 0.0,
        last_bytes: int = 0,
    ) -> None:
        self.first, self.share, self.last_bytes = first, share, last_bytes
        self._open = last
        self._last: Source | None = None

    def num_first(self, num_steps: int) -> int:
        """Steps of the first phase among so many."""
        # the margin is for rounding: 0.3 * 10 is above 3
        return num_steps if self._open is None else math.ceil((1 - self.share) * num_steps - 1e-9)

    def at(self, step: int, num_steps: int) -> Source:
        """Of a step of so many."""
        if self._open is None or step < self.num_first(num_steps):
            return self.first
        if self._last is None:
            self._last = self._open()
        return self._last


def needs_target(source: Supervision | None) -> bool:
    """Whether the target has to be in memory while this source teaches."""
    return source in (Supervision.online, Supervision.on_policy)


def source_of(
    config: ObjectiveConfig,
    kind: Supervision,
    *,
    seed: int,
    target: PreTrainedModel | None,
    model: DraftModel,
    head: Head,
    stop_ids: Collection[int],
) -> Source:
    """A source of this kind; `target` where `needs_target` says so.

    Everything random depends on the seed, the step and the number of the answer alone: a resumed
    run, or one on several processes, learns from the same text.
    """
    assert (target is not None) == needs_target(kind)
    teacher = None if target is None else Teacher(target)

    def on_policy(rows: Sequence[Row], step: int, features: Features) -> list[Row]:
        with torch.no_grad():
            return continue_answers(
                model,
                head,
                rows,
                features(rows) if rows else torch.empty(0),
                share=config.on_policy_share,
                num_tokens=config.rollout_tokens,
                stop_ids=stop_ids,
                seed=f"{seed}-{step}",
            )

    return Source(
        answers_only=config.reads_tokens,
        teacher=teacher,
        rewrite=on_policy if kind is Supervision.on_policy else None,
    )


def open_sources(
    config: Config,
    target: Target,
    lessons: Lessons,
    model: DraftModel,
    head: Head,
    tracker: Tracker,
) -> Sources:
    """Who teaches, and who teaches in the last steps, whose target is loaded when they begin."""
    objective = config.objective
    device = head.weight_HE.device

    def opened(kind: Supervision) -> Source:
        beside = load_model(target, config.target, device) if needs_target(kind) else None
        return source_of(
            objective,
            kind,
            seed=config.seed,
            target=beside,
            model=model,
            head=head,
            stop_ids=target.stop_ids,
        )

    kind = objective.finish_source
    if kind is None:
        return Sources(opened(objective.source))

    def last() -> Source:
        tracker.message(f"distill: from here on objective.finish_source={kind} teaches.")
        return opened(kind)

    size = lessons.target["parameters"] * dtype_of(config.target.dtype, device).itemsize
    size *= needs_target(kind)
    return Sources(opened(objective.source), last, objective.finish_source_share, size)
