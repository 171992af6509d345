"""Benchmarks of the codec: what a recorded law takes, what training on it loses, how fast it is
read.
"""

# N positions, V vocabulary, K recorded ids, E features of the draft's head

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from conf.contracts import Draft, Lessons
from conf.errors import require
from conf.groups import GenerateConfig
from conf.schema import Config
from data.batches import Batch, collate
from data.codec import UNRECORDED, Laws, cut_at_mass, encode
from data.shards import Row as Answer
from data.shards import read_split
from eval.bench import Row
from eval.chat import target_of
from eval.speed import ratio_interval
from models.draft import DraftModel
from models.load import device_of, load_folder, load_model, open_target

COMMAND = "make bench"
CONFIDENCE = 0.9
NUM_TRAINED = 12288  # positions that both drafts learn from
NUM_HELD_OUT = 16  # answers they are compared on
POSITIONS_PER_STEP = 512
LEARNING_RATE = 3e-4
SMALLEST = 1e-7  # what a law leaves over counts as at least this


def codec(folder: Path, _outputs: Path) -> Iterator[Row]:
    """Every figure of the codec."""
    lessons = Lessons.read(folder / "lessons")
    yield Row(
        name="codec.bytes_per_token",
        value=lessons.bytes_per_token,
        unit="bytes",
        to_reach="<= 64",
        command=COMMAND,
    )
    yield _acceptance_lost(folder, lessons)
    yield _read_rate(folder, lessons)


def _read_rate(folder: Path, lessons: Lessons) -> Row:
    """Supervised positions that are checked, read, decoded and collated in a second, over those
    that the run's training took in.
    """
    start = time.perf_counter()
    num_laws = sum(
        collate([row]).num_supervised
        for row in read_split(folder / "lessons", lessons.splits["train"])
    )
    rate = num_laws / (time.perf_counter() - start)
    return Row(
        name="codec.read_rate",
        value=rate / Draft.read(folder / "draft").tokens_per_second,
        unit="x",
        to_reach=">= 20",
        command=COMMAND,
    )


@dataclass
class Student:
    """A copy of the run's draft before its first step, in training by forward KL."""

    model: DraftModel
    head_VE: Tensor
    optimizer: torch.optim.Optimizer

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> Student:
        """The same each time."""
        plain = load_folder(folder / "draft" / "initial", dtype=torch.float32, device=device)
        model = DraftModel(plain).eval()
        model.freeze_embeddings()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
        return cls(model, model.head.float(), optimizer)  # frozen, it may be stored in bfloat16

    def laws(self, features_NE: Tensor) -> Tensor:
        """q over the whole vocabulary."""
        return (features_NE @ self.head_VE.T).softmax(-1)

    def features(self, batch: Batch) -> Tensor:
        """What the head reads at the supervised positions."""
        features_NE: Tensor = self.model(batch)[0, batch.supervised_N]
        return features_NE

    def learn(self, batch: Batch, p_NV: Tensor | None) -> None:
        """One step towards a full law, or towards the batch's recorded ones where that is None.

        The gradient of forward KL in the logits is q - p; that of the recorded outcomes, ids and
        rest, is the same with the rest spread as q spreads it.
        """
        features_NE = self.features(batch)
        with torch.no_grad():
            q_NV = self.laws(features_NE)
            toward_NV = (
                completed(batch.top_ids_NK, batch.top_log_p_NK, q_NV) if p_NV is None else p_NV
            )
            gradient_NE = (q_NV - toward_NV) @ self.head_VE / len(q_NV)
        self.optimizer.zero_grad()
        features_NE.backward(gradient_NE)
        self.optimizer.step()

    @torch.no_grad()
    def acceptance(self, batch: Batch, p_NV: Tensor) -> float:
        """sum min(p, q), summed over positions."""
        return float(torch.minimum(p_NV, self.laws(self.features(batch))).sum())


def completed(ids_NK: Tensor, log_p_NK: Tensor, q_NV: Tensor) -> Tensor:
    """p of the recorded ids; what they leave over has the shape of q."""
    there_NK = log_p_NK > UNRECORDED
    p_NK = log_p_NK.exp()
    rest_p_N1 = (1 - p_NK.sum(-1, keepdim=True)).clamp(min=SMALLEST)
    recorded_q_NK = q_NV.gather(-1, ids_NK) * there_NK
    rest_q_N1 = (1 - recorded_q_NK.sum(-1, keepdim=True)).clamp(min=SMALLEST)
    law_NV = q_NV * (rest_p_N1 / rest_q_N1)
    place_N, _ = there_NK.nonzero(as_tuple=True)
    law_NV[place_N, ids_NK[there_NK]] = p_NK[there_NK]
    return law_NV


def _acceptance_lost(folder: Path, lessons: Lessons) -> Row:
    """Exact expected acceptance on held-out answers of a draft that learned from full laws, less
    that of the same draft after the same steps on the same laws encoded and decoded.

    Full laws are what the target's head makes of the hidden states recorded for the warm start.
    Below 0 the encoded ones teach more: the rest's shape is left free, and a small draft spends
    itself on the ids that matter. The interval resamples held-out answers.
    """
    settings = GenerateConfig(**lessons.determined_by["generate"])
    config = Config(target=target_of(folder), generate=settings)
    device = device_of(config.runtime)
    target = load_model(open_target(config), config.target, device, torch.float32)
    head = target.get_output_embeddings()
    split = read_split(folder / "lessons", lessons.splits["train"])
    answers = sorted(
        (row.of_answer() for row in split if row.hidden is not None), key=lambda row: row.index
    )
    require(
        len(answers) > 1,
        "generate.warm_start_tokens",
        settings.warm_start_tokens,
        "no hidden states were recorded, of which full laws are made",
        "Record with a positive number",
    )
    num_held_out = min(NUM_HELD_OUT, len(answers) // 2)
    students = [Student.load(folder, device) for _ in range(2)]

    @torch.no_grad()
    def full(rows: Sequence[Answer]) -> Tensor:
        hidden_NE = torch.cat([row.hidden for row in rows if row.hidden is not None])
        log_p_NV: Tensor = head(hidden_NE.float().to(device)).log_softmax(-1)
        return log_p_NV

    num_trained = 0
    for rows in packs(answers[num_held_out:]):
        if num_trained >= NUM_TRAINED:
            break
        log_p_NV, batch = full(rows), collate(rows).to(device)
        students[0].learn(batch, log_p_NV.exp())
        students[1].learn(encoded(batch, log_p_NV, settings), None)
        num_trained += batch.num_supervised
    lost = []
    for row in answers[:num_held_out]:
        p_NV, batch = full([row]).exp(), collate([row]).to(device)
        whole, coded = (student.acceptance(batch, p_NV) for student in students)
        lost.append((whole - coded, float(batch.num_supervised)))
    mean = ratio_interval(lost, CONFIDENCE)
    return Row(
        name="codec.acceptance_lost",
        value=mean.median,
        low=mean.low,
        high=mean.high,
        unit="probability",
        to_reach="<= 0.003",
        command=COMMAND,
    )


def packs(rows: Sequence[Answer]) -> Iterator[list[Answer]]:
    """Answers in groups of about POSITIONS_PER_STEP positions."""
    group: list[Answer] = []
    for row in rows:
        group.append(row)
        if sum(each.num_laws for each in group) >= POSITIONS_PER_STEP:
            yield group
            group = []
    if group:
        yield group


def encoded(batch: Batch, log_p_NV: Tensor, settings: GenerateConfig) -> Batch:
    """The batch with these laws as a shard holds them."""
    top_NK = log_p_NV.cpu().topk(settings.top_k, -1)
    vocab_size = log_p_NV.shape[-1]
    tensors = encode(top_NK.indices, cut_at_mass(top_NK.values, settings.mass), vocab_size)
    ids_NK, log_p_NK = Laws.of(tensors, vocab_size).decode(0, len(log_p_NV))
    return replace(batch, top_ids_NK=ids_NK, top_log_p_NK=log_p_NK).to(log_p_NV.device)
