"""Recorded answers on disk: safetensors files of whole rows, written atomically and checked on
reading.

Tensors of a shard (R rows; P prompt tokens, N generated tokens and M laws in all):
    row              int64 R    number of the answer in the job; the job is resumed by these
    category         uint8 R    index into the metadata's list of categories
    temperature      float32 R  temperature the answer was sampled at
    num_prompt       int32 R
    num_generated    int32 R
    num_laws         int32 R
    prompt           packed P   prompt ids, rows one after another
    generated        packed N   answer ids
    counts, rest, ids, second, further    the laws, see data.codec
    hidden           bfloat16 N D         what the target's head read (only in the first shards)
The metadata hold the format's number, the vocabulary size, the categories and a checksum of all
this.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from conf.contracts import Shard, SplitLessons
from conf.errors import UserError
from conf.run import write_atomically
from data.codec import VERSION, Laws, encode, join, pack, read_packed, width

SHARDS = "*.safetensors"  # their names in a folder


class ShardError(UserError, ValueError):
    """A shard that cannot be trusted. The message names the file and says how to make it again."""


@dataclass
class Row:
    """One answered prompt with the target's laws of the last M tokens: of all generated ones, and,
    where M > N, of the prompt's before them. A law of fewer than K ids ends in UNRECORDED ones.
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
    bits = width(vocab_size)
    tensors = {
        "row": torch.tensor([row.index for row in rows]),
        "category": torch.tensor(
            [categories.index(row.category) for row in rows], dtype=torch.uint8
        ),
        "temperature": torch.tensor([row.temperature for row in rows]),
        "num_prompt": torch.tensor([len(row.prompt) for row in rows], dtype=torch.int32),
        "num_generated": torch.tensor([len(row.generated) for row in rows], dtype=torch.int32),
        "num_laws": torch.tensor([row.num_laws for row in rows], dtype=torch.int32),
        "prompt": pack(torch.cat([row.prompt for row in rows]), bits),
        "generated": pack(torch.cat([row.generated for row in rows]), bits),
        **encode(*join([(row.top_ids, row.top_log_p) for row in rows]), vocab_size),
    }
    hidden = [row.hidden for row in rows if row.hidden is not None]
    assert len(hidden) in (0, len(rows)), "rows with and without hidden states share no file"
    if hidden:
        tensors["hidden"] = torch.cat(hidden)
    metadata = {
        "format": str(VERSION),
        "vocab_size": str(vocab_size),
        "categories": json.dumps(categories),
    }
    content = save(tensors, {**metadata, "checksum": _checksum(tensors, metadata)})
    write_atomically(path, content)
    return entry_of(path, rows, content)


def entry_of(path: Path, rows: Sequence[Row], content: bytes) -> Shard:
    """The manifest's entry for a file of these rows and bytes."""
    return Shard(
        file=path.name,
        sha256=hashlib.sha256(content).hexdigest(),
        num_rows=len(rows),
        num_tokens=sum(len(row.generated) for row in rows),
        num_bytes=len(content),
        num_hidden_bytes=sum(row.hidden.nbytes for row in rows if row.hidden is not None),
    )


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_shard(folder: Path, shard: Shard) -> None:
    """Raise ShardError unless the file is there with the recorded checksum."""
    path = folder / shard.file
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != shard.sha256:
        raise ShardError(
            f"{path}: missing, cut short or changed since it was written. Rerun stage=generate:"
            " only its answers are generated again."
        )


class ShardFile:
    """A shard, memory-mapped: what is asked for is read and decoded, and nothing else. The checksum
    is not looked at, unless by `check`. Raises ShardError when it is no shard of this format.
    """

    def __init__(self, path: Path):
        self.path = path
        with self._readable():
            self._file = safe_open(path, framework="pt")
            self._metadata: dict[str, str] = self._file.metadata() or {}
            self._check_format()
            self._categories: list[str] = json.loads(self._metadata["categories"])
            self._bits = width(int(self._metadata["vocab_size"]))
            self._row, self._category, self._temperature = (
                self._file.get_tensor(name).tolist() for name in ("row", "category", "temperature")
            )
            self._starts = {
                name: [0, *accumulate(self._file.get_tensor(f"num_{name}").tolist())]
                for name in ("prompt", "generated", "laws")
            }
            self._names = set(self._file.keys())
            counts_M = self._file.get_tensor("counts")
            self._laws = Laws(counts_M, int(self._metadata["vocab_size"]), self._read)

    def __len__(self) -> int:
        return len(self._row)

    def check(self) -> None:
        """Raise ShardError unless everything in the file is as it was written."""
        with self._readable():
            tensors = {name: self._file.get_tensor(name) for name in self._names}
            metadata = {key: self._metadata[key] for key in self._metadata if key != "checksum"}
            if _checksum(tensors, metadata) != self._metadata["checksum"]:
                raise ValueError("its checksum is another")

    def rows(self, start: int = 0, stop: int | None = None) -> list[Row]:
        """Rows by their place in the file."""
        places = range(len(self))[start:stop]
        with self._readable():
            return self._decoded(places) if places else []

    def law(self, place: int, number: int) -> tuple[Tensor, Tensor]:
        """Ids and log-probabilities of one recorded position of the row at this place."""
        first, after = self._starts["laws"][place : place + 2]
        assert 0 <= number < after - first
        with self._readable():
            ids_1K, log_p_1K = self._laws.decode(first + number, first + number + 1)
        return ids_1K[0], log_p_1K[0]

    def _decoded(self, places: range) -> list[Row]:
        first, last = places[0], places[-1] + 1
        begin, end = (
            {name: all_[at] for name, all_ in self._starts.items()} for at in (first, last)
        )
        lengths = {
            name: [all_[i + 1] - all_[i] for i in places] for name, all_ in self._starts.items()
        }
        prompt, generated = (
            read_packed(self._read, name, self._bits, begin[name], end[name])
            .long()
            .split(lengths[name])
            for name in ("prompt", "generated")
        )
        ids, log_p = (
            part.split(lengths["laws"]) for part in self._laws.decode(begin["laws"], end["laws"])
        )
        hidden = [None] * len(places)
        if "hidden" in self._names:
            whole_ND = self._read("hidden", begin["generated"], end["generated"])
            hidden = whole_ND.split(lengths["generated"])
        return [
            Row(
                index=self._row[place],
                category=self._categories[self._category[place]],
                temperature=round(self._temperature[place], 6),
                prompt=prompt[i],
                generated=generated[i],
                top_ids=ids[i],
                top_log_p=log_p[i],
                hidden=hidden[i],
            )
            for i, place in enumerate(places)
        ]

    def _read(self, name: str, start: int, stop: int) -> Tensor:
        part: Tensor = self._file.get_slice(name)[start:stop]
        return part

    def _check_format(self) -> None:
        found = self._metadata.get("format", "1" if self._metadata else "unknown")
        if found != str(VERSION):
            raise ShardError(
                f"{self.path}: recorded in format {found}, and this version reads format {VERSION}."
                " Choose another name= to record again."
            )

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Whatever reading dies of becomes a ShardError: a garbled header still parses at times,
        and then a tensor is absent or of another length.
        """
        try:
            yield
        except ShardError:
            raise
        except (SafetensorError, OSError, LookupError, TypeError, ValueError, RuntimeError) as no:
            raise ShardError(
                f"{self.path}: not a complete shard ({no}). stage=generate generates its answers"
                " again."
            ) from None


def read_shard(path: Path) -> list[Row]:
    """Rows of one file. Raises ShardError when it is not as it was written."""
    file = ShardFile(path)
    file.check()
    return file.rows()


def read_split(folder: Path, split: SplitLessons) -> Iterator[Row]:
    """Rows of a split, in the order of its shards; every file's checksum is verified first."""
    for shard in split.shards:
        check_shard(folder, shard)
    for shard in split.shards:
        yield from read_shard(folder / shard.file)
