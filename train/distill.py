"""Stage distill: a draft learns the target's distributions. From recorded ones, the target is in
memory only to copy layers from it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conf.choices import DraftVocab
from conf.contracts import Acceptance, BeforeAfter, Draft, Lessons
from conf.errors import ConfigError
from conf.run import (
    Resume,
    Run,
    determined,
    fingerprint,
    process_rank,
    provenance,
    write_atomically,
)
from conf.schema import Config, as_tree
from conf.tracking import Tracker
from conf.validate import validate_draft_layers
from data.batches import collate, compact
from data.shards import Row, read_split
from models.calibration import calibrate, laws_of
from models.draft import (
    DraftModel,
    choose_hot_ids,
)
from models.load import (
    device_of,
    dtype_of,
    load_folder,
    open_target,
    release_freed,
    set_threads,
    stored_dtype,
)
from models.lora import adapt, merged
from train.adopt import adopt
from train.checkpoint import BEST, STATE, load_state
from train.depth import settle_depth
from train.estimate import estimate
from train.head import Head
from train.loop import NUM_COLD, Trainer
from train.processes import gathered, require_shardable, shard, shards_weights
from train.select import open_selection
from train.start import build, warm_up
from train.supervision import open_sources, require_laws

MODEL = "model"  # the trained draft, a plain transformers folder
INITIAL = "initial"  # the same draft before its first step
STARTED = "started.json"  # the configuration that training began with


def distill(config: Config, run: Run, tracker: Tracker) -> Draft:
    """Train a draft on the recorded answers and export the checkpoint with the best validation
    acceptance. One with another tokenizer is not trained: see `train.adopt`.

    Rerunning continues from the last checkpoint, bit for bit on a CPU; a finished draft of the same
    configuration is kept as it is.
    """
    lessons = Lessons.read(run.lessons)
    require_laws(config, lessons)
    made_by = determined_by(config, lessons)
    if run.resume(run.draft, Draft, made_by) is Resume.complete:
        draft = Draft.read(run.draft)
        tracker.message(f"distill: the draft is there already (step {draft.best_step}).")
        return draft
    require_shardable(config)
    start = time.perf_counter()
    set_threads(config.runtime)
    run.draft.mkdir(parents=True, exist_ok=True)
    device = device_of(config.runtime)
    target = open_target(config)
    if config.draft.vocab is DraftVocab.shared:
        draft = adopt(config, run, tracker, target, lessons, made_by)
        _finish(tracker, run, draft)
        return draft
    require_same_start(run, made_by)
    validate_draft_layers(config, target.config.num_hidden_layers)
    train = sorted(read_split(run.lessons, lessons.splits["train"]), key=lambda row: row.index)
    validation = sorted(
        read_split(run.lessons, lessons.splits["validation"]), key=lambda row: row.index
    )
    hot_ids = choose_hot_ids(config.draft, train, target.config.vocab_size)
    config, depths = settle_depth(
        config, run, tracker, target, lessons, hot_ids, train, validation, made_by
    )
    model, layers = build(config, target, device)
    dtype = dtype_of(config.runtime.train_dtype, device)
    head = Head(
        model.head, hot_ids, num_cold=NUM_COLD, dtype=dtype, chunk=config.runtime.head_chunk
    )
    warm_up(config, target, lessons, model, head, train, tracker)
    for row in [*train, *validation]:
        compact(row)
    sources = open_sources(config, target, lessons, model, head, tracker)
    selection = open_selection(config.objective, reference_folder(config) / MODEL, head, device)
    release_freed()
    stored = stored_dtype(config.target, device)
    if process_rank() == 0:
        model.export(run.draft / INITIAL, target.tokenizer, stored, hot_ids)
    if config.draft.lora_rank:
        adapt(model.body, config.draft.lora_rank, config.seed)
    if shards_weights():
        shard(model, device)
    trainer = Trainer(config, model, head, train, validation, sources, selection)
    _announce(tracker, model, trainer)
    expected = estimate(trainer)
    if trainer.restore(run.draft):
        tracker.message(
            f"distill: going on from step {trainer.progress.step} of {len(trainer.plan)}."
        )
    if config.optim.max_seconds:
        trainer.limit(expected.steps_within(config.optim.max_seconds))
        expected = expected.limited(len(trainer.plan))
        tracker.message(
            f"distill: {len(trainer.plan)} steps fit into {config.optim.max_seconds:g} seconds."
        )
    tracker.event("distill/estimate", expected.event(trainer.progress.step))
    earlier = trainer.progress.seconds  # spent by interrupted runs
    progress = trainer.fit(run.draft, tracker)
    del trainer, sources, selection
    release_freed()  # gradients and moments, before a second copy of the draft is made
    best = load_state(run.draft / BEST)
    assert best is not None
    model = gathered(model, best["model"])
    assert progress.first is not None and progress.best is not None
    draft = Draft(
        fingerprint=fingerprint(made_by),
        determined_by=made_by,
        provenance=provenance(config.seed, str(device), progress.seconds),
        parameters=sum(p.numel() for p in merged(model.body).values()) + model.head.numel(),
        num_layers=model.config.num_hidden_layers,
        layers=layers,
        depths=depths,
        num_bytes=0,
        hot_vocab=0 if hot_ids is None else len(hot_ids),
        expected_acceptance=BeforeAfter(
            before=Acceptance(**progress.first), after=Acceptance(**progress.best)
        ),
        best_step=progress.best_step,
        num_steps=progress.step,
        num_tokens_seen=progress.num_tokens,
        tokens_per_second=progress.num_tokens / max(progress.seconds, 1e-9),
        seconds=round(progress.seconds, 1),
    )
    if process_rank() == 0:
        model.export(run.draft / MODEL, target.tokenizer, stored, hot_ids)
        check_export(run.draft / MODEL, model, validation[0], device)
        write_calibration(run.draft / MODEL, hot_ids, validation, device)
        draft.num_bytes = sum(
            path.stat().st_size for path in (run.draft / MODEL).glob("*.safetensors")
        )
        write_atomically(run.draft / "curve.json", json.dumps(progress.curve) + "\n")
        draft.provenance.seconds = round(earlier + time.perf_counter() - start, 1)
        draft.write(run.draft)  # last: a draft with a manifest is complete
    _finish(tracker, run, draft)
    return draft


def determined_by(config: Config, lessons: Lessons) -> dict[str, Any]:
    """What determines the draft."""
    is_trained = config.draft.vocab is DraftVocab.same
    groups = ("draft", "objective", "optim") if is_trained else ("draft",)
    made_by = determined(config, *groups, lessons=lessons.fingerprint)
    if not config.draft.chooses_depth:
        del made_by["draft"]["most_layers"]  # which nothing reads then
    if not is_trained:
        return made_by
    made_by["dtype"] = str(config.runtime.train_dtype)
    if config.objective.reference:
        made_by["reference"] = Draft.read(reference_folder(config)).fingerprint
    return made_by


def require_same_start(run: Run, made_by: dict[str, Any]) -> None:
    """Raise ConfigError when the unfinished draft of this folder was begun with another
    configuration.
    """
    path = run.draft / STARTED
    now = _by_key(as_tree(made_by))
    if (run.draft / STATE).is_file() and path.is_file():
        then = _by_key(json.loads(path.read_text("utf-8")))
        changed = [key for key in sorted({*then, *now}) if then.get(key) != now.get(key)]
        listed = "; ".join(
            f"{key}: was {then.get(key)!r}, is now {now.get(key)!r}" for key in changed
        )
        if changed:
            raise ConfigError(
                f"the unfinished draft of run {run.name} was begun with another configuration"
                f" ({listed}). Give this run its own name (name=...), restore the values, or remove"
                f" {run.draft} to start again."
            )
    if process_rank() == 0:
        write_atomically(path, json.dumps(as_tree(made_by), indent=1) + "\n")


def _by_key(tree: dict[str, Any]) -> dict[str, Any]:
    groups = [
        (f"{group}.", value) if isinstance(value, dict) else ("", {group: value})
        for group, value in tree.items()
    ]
    return {prefix + key: value for prefix, group in groups for key, value in group.items()}


def reference_folder(config: Config) -> Path:
    """Where the draft is that selects what this one learns."""
    return Path(config.outputs).absolute() / config.objective.reference / "draft"


def write_calibration(
    folder: Path, hot_ids: Tensor | None, rows: Sequence[Row], device: torch.device
) -> None:
    """Write what the exported draft's probabilities are worth beside it, where laws tell."""
    exported = load_folder(folder, dtype=torch.float32, device=device)
    calibration = calibrate(laws_of(exported, hot_ids), rows)
    if calibration is not None:
        calibration.write(folder)


@torch.no_grad()
def check_export(folder: Path, model: DraftModel, row: Row, device: torch.device) -> None:
    """Raise ValueError unless the exported folder, loaded as anybody would, computes what was
    trained.
    """
    plain: PreTrainedModel = load_folder(folder, dtype=torch.float32, device=device)
    batch = collate([row]).to(device)
    ours = model(batch)[0] @ model.head.float().T
    theirs = plain(input_ids=batch.tokens_T.unsqueeze(0)).logits[0]
    overlap = torch.minimum(ours.softmax(-1), theirs.softmax(-1)).sum(-1).mean()
    if not overlap > 0.95:
        raise ValueError(
            f"{folder}: the exported draft is not the trained one (their laws overlap by"
            f" {float(overlap):.3f}). Architecture {type(plain).__name__} post-processes its logits"
            " in a way training does not know."
        )


def _announce(tracker: Tracker, model: DraftModel, trainer: Trainer) -> None:
    trainable = sum(parameter.numel() for parameter in trainer.optimizers.parameters)
    tracker.message(
        f"distill: {model.config.num_hidden_layers} layers, {trainable / 1e6:.1f}M trainable"
        f" parameters, {len(trainer.plan)} steps."
    )


def _finish(tracker: Tracker, run: Run, draft: Draft) -> None:
    tracker.summary(
        {
            "distill/expected_acceptance_before": draft.expected_acceptance.before.value,
            "distill/expected_acceptance": draft.expected_acceptance.after.value,
            "distill/best_step": draft.best_step,
            "distill/tokens_per_second": draft.tokens_per_second,
            "distill/seconds": draft.seconds,
        }
    )
    tracker.artifact(
        "draft", run.draft, uses=["lessons"], metadata={"fingerprint": draft.fingerprint}
    )
