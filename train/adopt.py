"""A draft with a tokenizer of its own, exported as it is: what was recorded are laws over the
target's tokens, which this draft neither reads nor predicts.
"""

# S tokens that both vocabularies have

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from conf.contracts import BeforeAfter, Draft, Lessons
from conf.run import Run, fingerprint, process_rank, provenance, write_atomically
from conf.schema import Config
from conf.tracking import Tracker
from data.shards import Row, read_split
from data.statistics import pooled
from models.calibration import Observed, fit, observe
from models.decoding.engine import Engine, narrow_head
from models.decoding.kernels import use_kernel
from models.decoding.translated import TranslatedDrafter, Translation
from models.draft import rank_vocabulary, write_hot_ids
from models.load import Target, device_of, load_folder, num_weights, stored_dtype
from train.validation import CONFIDENCE

NUM_ANSWERS = 24  # recorded validation answers that the draft is measured on, token by token


def adopt(
    config: Config,
    run: Run,
    tracker: Tracker,
    target: Target,
    lessons: Lessons,
    made_by: dict[str, Any],
) -> Draft:
    """Export the pretrained draft with the tokens it shares with the target, its calibration and
    its expected acceptance. Nothing is trained.
    """
    start = time.perf_counter()
    name, folder, device = config.draft.pretrained, run.draft / "model", device_of(config.runtime)
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = load_folder(name, dtype=stored_dtype(config.target, device), device=device)
    translation = _proposed(config, run, target, lessons, tokenizer, model)
    tracker.message(
        f"distill: {name} has a tokenizer of its own (draft.vocab=shared). The recorded"
        " distributions are over the target's tokens and cannot teach it: it is used as it is,"
        f" proposing {len(translation.target_ids_S)} tokens that both have."
    )
    parameters = num_weights(model)
    if process_rank() == 0:
        _export(model, tokenizer, translation, run)
    rows = sorted(read_split(run.lessons, lessons.splits["validation"]), key=lambda row: row.index)
    found = _observed(model, translation, target.config.vocab_size, rows[:NUM_ANSWERS])
    overlaps = [one.overlap_N for one in found]
    expected = pooled([float(one.sum()) for one in overlaps], [*map(len, overlaps)], CONFIDENCE)
    seconds = round(time.perf_counter() - start, 1)
    draft = Draft(
        fingerprint=fingerprint(made_by),
        determined_by=made_by,
        provenance=provenance(config.seed, str(device), seconds),
        parameters=parameters,
        num_layers=model.config.num_hidden_layers,
        layers=[],
        num_bytes=0,
        hot_vocab=0,
        shared_vocab=len(translation.target_ids_S),
        expected_acceptance=BeforeAfter(before=expected, after=expected),
        best_step=0,
        num_steps=0,
        num_tokens_seen=0,
        tokens_per_second=0.0,
        seconds=seconds,
    )
    if process_rank() == 0:
        fit(found).write(folder)
        draft.num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        write_atomically(run.draft / "curve.json", "[]\n")
        draft.write(run.draft)  # last: a draft with a manifest is complete
    return draft


def _proposed(
    config: Config,
    run: Run,
    target: Target,
    lessons: Lessons,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
) -> Translation:
    """The shared tokens, with draft.hot_vocab those among the target's so many most frequent."""
    found = Translation.of(target.tokenizer, tokenizer)
    size = target.config.vocab_size
    # a tokenizer may have more ids than its model
    is_kept_S = (found.target_ids_S < size) & (found.draft_ids_S < model.config.vocab_size)
    if config.draft.hot_vocab:
        rows = read_split(run.lessons, lessons.splits["train"])
        hot_ids = rank_vocabulary(rows, size)[: config.draft.hot_vocab]
        is_kept_S &= torch.isin(found.target_ids_S, hot_ids)
    return found.only(is_kept_S)


def _export(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    translation: Translation,
    run: Run,
) -> None:
    known = model.generation_config
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    # without sampling settings, which may not even save
    model.generation_config = GenerationConfig(**{name: getattr(known, name) for name in names})
    folder = run.draft / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ids_S, size = translation.draft_ids_S, model.config.vocab_size
    write_hot_ids(folder, ids_S, size, translation.target_ids_S)


def _observed(
    model: PreTrainedModel, translation: Translation, vocab_size: int, rows: list[Row]
) -> list[Observed]:
    """The draft's laws beside the recorded ones; changes the model."""
    nn.Module.to(model, torch.float32)
    narrow_head(model, translation.draft_ids_S.to(model.device))
    use_kernel(model)
    longest = max(len(row.prompt) + len(row.generated) for row in rows)
    # a text may have more tokens in the draft's vocabulary
    engine = Engine(model, num_rows=1, capacity=2 * longest, compiled=False)
    drafter = TranslatedDrafter(engine, translation, vocab_size=vocab_size)

    def laws(row: Row) -> torch.Tensor:
        return drafter.laws_along(row.prompt.tolist(), row.generated.tolist())

    return [observe(laws, row) for row in rows]
