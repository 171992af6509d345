"""Recorded answers for tests: made up ones, and those of a tiny target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from conf.contracts import SplitLessons
from data.shards import Row, write_shard
from models.decoding.autoregressive import Answer, Generator, Request
from models.decoding.engine import Engine
from models.recording import Writer
from tests.tiny import VOCAB_SIZE, tiny_lessons


@dataclass
class Kept(Writer):
    """Keeps rows in memory."""

    rows: list[Row] = field(default_factory=list)

    def add(self, _split: str, row: Row) -> None:
        self.rows.append(row)


def made_up_row(
    index: int,
    num_prompt: int,
    num_generated: int,
    *,
    vocab_size: int = VOCAB_SIZE,
    top_k: int = 5,
    hidden_size: int = 0,
    last: int | None = None,
    record_prompt: bool = False,
) -> Row:
    """An answer of the given lengths, random from its number, recorded as generation does."""
    rng = torch.Generator().manual_seed(index)
    num_laws = num_generated + (num_prompt - 1) * record_prompt
    logits_MV = torch.randn(num_laws, vocab_size, generator=rng) * 3
    top = logits_MV.log_softmax(-1).topk(top_k, -1)
    generated = torch.randint(vocab_size, (num_generated,), generator=rng)
    if last is not None:
        generated[-1] = last
    hidden = torch.randn(num_generated, hidden_size, generator=rng) if hidden_size else None
    return Row(
        index=index,
        category="code" if index % 2 else "chat",
        temperature=(0.0, 0.7, 1.0)[index % 3],
        prompt=torch.randint(vocab_size, (num_prompt,), generator=rng),
        generated=generated,
        top_ids=top.indices,
        top_log_p=top.values,
        hidden=None if hidden is None else hidden.bfloat16(),
    )


def recorded_rows(
    target: PreTrainedModel,
    num_rows: int,
    *,
    top_k: int = 16,
    max_new_tokens: int = 24,
    first: int = 0,
    keep_hidden: bool = True,
) -> list[Row]:
    """Answers of the target to random prompts of 2 to 7 ids, by the pipeline's own generator.

    Of different lengths: a tiny target says EOS as rarely as anything, so more ids end an answer.
    """
    vocab_size = target.config.vocab_size
    requests = []
    for index in range(first, first + num_rows):
        rng = torch.Generator().manual_seed(index)
        length = int(torch.randint(2, 8, (), generator=rng))
        prompt = torch.randint(3, vocab_size, (length,), generator=rng).tolist()
        uniforms = torch.rand(max_new_tokens, generator=rng)
        record_prompt = index % 3 == 0
        requests.append(
            Request(index, prompt, float(index % 4 > 0), uniforms, keep_hidden, record_prompt)
        )
    engine = Engine(target, num_rows=min(32, num_rows), capacity=64, compiled=False)
    generator = Generator(
        engine, stop_ids=frozenset(range(16)), max_new_tokens=max_new_tokens, top_k=top_k
    )
    answers = sorted(generator.answer(requests), key=lambda answer: answer.index)
    generator.close()
    return [_row(answer) for answer in answers]


def _row(answer: Answer) -> Row:
    return Row(
        index=answer.index,
        category="code" if answer.index % 2 else "chat",
        temperature=answer.temperature,
        prompt=torch.tensor(answer.prompt),
        generated=torch.tensor(answer.tokens),
        top_ids=answer.ids_MK.long(),
        top_log_p=answer.log_probabilities_MK,
        hidden=None if answer.hidden_ND is None else answer.hidden_ND.clone().bfloat16(),
    )


def write_recorded(
    folder: Path, train: Sequence[Row], validation: Sequence[Row], vocab_size: int = VOCAB_SIZE
) -> None:
    """Shards and manifest of a finished generate stage, two shards of training answers."""
    half = len(train) // 2
    splits = {}
    for name, parts in {"train": (train[:half], train[half:]), "validation": (validation,)}.items():
        shards = [
            write_shard(folder / f"{name}-000-{number:05d}.safetensors", part, vocab_size)
            for number, part in enumerate(parts)
        ]
        rows = [row for part in parts for row in part]
        splits[name] = SplitLessons(
            shards=shards,
            num_rows=len(rows),
            num_tokens=sum(len(row.generated) for row in rows),
            num_prompt_tokens=sum(len(row.prompt) for row in rows),
            num_laws=sum(row.num_laws for row in rows),
            num_truncated=0,
            num_empty=0,
            num_looping=0,
            num_duplicates=0,
            rows_by_category={},
            tokens_by_temperature={},
        )
    tiny_lessons(splits=splits).write(folder)
