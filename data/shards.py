"""Recorded answers on disk: safetensors files of whole rows, written atomically and checked on
reading.

Tensors of a shard (R rows; P prompt tokens, N generated tokens and M laws in all; K recorded ids):
    row              int64 R    number of the answer in the job; the job is resumed by these
    category         uint8 R    index into the metadata's list of categories
    temperature      float32 R  temperature the answer was sampled at
    num_prompt       int32 R
    num_generated    int32 R
    num_laws         int32 R
    prompt           int32 P    prompt ids, rows one after another
    generated        int32 N    answer ids
    top_ids          int32 or uint16 M K   the likeliest ids, in falling order
    top_log_p        float16 M K           their log-probabilities at temperature 1, not
    renormalised
    hidden           bfloat16 N D          what the target's head read (only in the first shards)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from conf.contracts import Shard, SplitLessons
from conf.errors import UserError
from conf.run import write_atomically


class ShardError(UserError, ValueError):
    """A shard that cannot be trusted. The message names the file and says how to make it again."""


@dataclass
class Row:
    """One answered prompt with the target's laws of the last M tokens: of all generated ones, and,
    where M > N, of the prompt's before them.
    """

    index: int
    category: str
    temperature: float
    prompt: Tensor  # int64 P
    generated: Tensor  # int64 N
    top_ids: Tensor  # int64 M K
    top_log_p: Tensor  # float32 M K
    hidden: Tensor | None = None  # bfloat16 N D

    @property
    def num_laws(self) -> int:
        """M, the supervised positions."""
        return len(self.top_ids)

    def of_answer(self) -> Row:
        """The same with the laws of the answer alone."""
        start = self.num_laws - len(self.generated)
        return replace(self, top_ids=self.top_ids[start:], top_log_p=self.top_log_p[start:])


def write_shard(path: Path, rows: Sequence[Row], vocab_size: int) -> Shard:
    """Write whole rows to one file and return its entry for the manifest."""
    categories = sorted({row.category for row in rows})
    ids_dtype = torch.uint16 if vocab_size <= 2**16 else torch.int32
    tensors = {
        "row": torch.tensor([row.index for row in rows]),
        "category": torch.tensor(
            [categories.index(row.category) for row in rows], dtype=torch.uint8
        ),
        "temperature": torch.tensor([row.temperature for row in rows]),
        "num_prompt": torch.tensor([len(row.prompt) for row in rows], dtype=torch.int32),
        "num_generated": torch.tensor([len(row.generated) for row in rows], dtype=torch.int32),
        "num_laws": torch.tensor([row.num_laws for row in rows], dtype=torch.int32),
        "prompt": torch.cat([row.prompt for row in rows]).int(),
        "generated": torch.cat([row.generated for row in rows]).int(),
        "top_ids": torch.cat([row.top_ids for row in rows]).to(ids_dtype),
        "top_log_p": torch.cat([row.top_log_p for row in rows]).half(),
    }
    hidden = [row.hidden for row in rows if row.hidden is not None]
    if len(hidden) == len(rows):
        tensors["hidden"] = torch.cat(hidden).bfloat16()
    content = save(tensors, {"categories": json.dumps(categories)})
    write_atomically(path, content)
    return Shard(
        file=path.name,
        sha256=hashlib.sha256(content).hexdigest(),
        num_rows=len(rows),
        num_tokens=len(tensors["generated"]),
        num_bytes=len(content),
    )


def check_shard(folder: Path, shard: Shard) -> None:
    """Raise ShardError unless the file is there with the recorded checksum."""
    path = folder / shard.file
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != shard.sha256:
        raise ShardError(
            f"{path}: missing, cut short or changed since it was written. Remove this file and the"
            " manifest.json beside it, and rerun stage=generate: only its rows are generated"
            " again."
        )


def read_shard(path: Path) -> list[Row]:
    """Rows of one file. Raises ShardError when it is not a complete shard."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            categories = json.loads(file.metadata()["categories"])
        return _rows(tensors, categories)
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, RuntimeError) as broken:
        # a garbled header still parses at times: then a tensor is absent or of another length
        raise ShardError(
            f"{path}: not a complete shard ({broken}). Remove it and rerun stage=generate."
        ) from None


def _rows(tensors: dict[str, Tensor], categories: list[str]) -> list[Row]:
    num_prompt, num_generated, num_laws = (
        tensors[name].tolist() for name in ("num_prompt", "num_generated", "num_laws")
    )
    prompts = tensors["prompt"].long().split(num_prompt)
    generated = tensors["generated"].long().split(num_generated)
    # uint16 lacks most operations; a view as int16 is widened and its sign bit undone
    top_ids = tensors["top_ids"]
    if top_ids.dtype is torch.uint16:
        top_ids = top_ids.view(torch.int16).int() & 0xFFFF
    ids = top_ids.long().split(num_laws)
    log_p = tensors["top_log_p"].float().split(num_laws)
    hidden = (
        tensors["hidden"].split(num_generated) if "hidden" in tensors else [None] * len(num_prompt)
    )
    return [
        Row(
            index=int(tensors["row"][i]),
            category=categories[int(tensors["category"][i])],
            temperature=round(float(tensors["temperature"][i]), 6),
            prompt=prompts[i],
            generated=generated[i],
            top_ids=ids[i],
            top_log_p=log_p[i],
            hidden=hidden[i],
        )
        for i in range(len(num_prompt))
    ]


def read_split(folder: Path, split: SplitLessons) -> Iterator[Row]:
    """Rows of a split, in the order of its shards; every file's checksum is verified first."""
    for shard in split.shards:
        check_shard(folder, shard)
    for shard in split.shards:
        yield from read_shard(folder / shard.file)
