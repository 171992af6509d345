"""Recorded answers survive the disk exactly; a file that cannot be trusted is refused by name."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from conf.contracts import Shard, SplitLessons
from data.shards import Row, ShardError, check_shard, read_shard, read_split, write_shard
from tests.lessons import made_up_row

NAME = "train-000-00007.safetensors"


def rows(vocab_size: int, hidden_size: int = 0) -> list[Row]:
    shape = [(3, 5), (1, 1), (9, 2)]
    return [
        made_up_row(
            10 * i, p, g, vocab_size=vocab_size, hidden_size=hidden_size, record_prompt=i == 2
        )
        for i, (p, g) in enumerate(shape)
    ]


def assert_same(found: Sequence[Row], written: Sequence[Row]) -> None:
    assert len(found) == len(written)
    for one, other in zip(found, written, strict=True):
        for field in dataclasses.fields(Row):
            ours, theirs = getattr(one, field.name), getattr(other, field.name)
            if isinstance(theirs, torch.Tensor):
                assert ours.dtype is theirs.dtype, field.name
                assert torch.equal(ours, theirs), field.name
            else:
                assert ours == theirs, field.name


@pytest.mark.parametrize("hidden_size", [0, 6], ids=["without hidden", "with hidden"])
@pytest.mark.parametrize("vocab_size", [300, 2**16, 2**16 + 1, 262_144])
def test_rows_come_back_as_they_were_written(
    tmp_path: Path, vocab_size: int, hidden_size: int
) -> None:
    written = rows(vocab_size, hidden_size)
    # the ids at which a signed 16-bit number turns over, and the last one
    edges = [i for i in (0, 32_767, 32_768, 65_535, vocab_size - 1) if i < vocab_size]
    written[0].top_ids[0] = torch.tensor((edges * 5)[:5])
    written[0].prompt[0] = written[0].generated[0] = vocab_size - 1
    shard = write_shard(tmp_path / NAME, written, vocab_size)
    assert_same(read_shard(tmp_path / NAME), written)
    assert shard.file == NAME
    assert (shard.num_rows, shard.num_tokens) == (3, 8)
    assert shard.num_bytes == (tmp_path / NAME).stat().st_size


def test_ids_take_two_bytes_where_they_fit(tmp_path: Path) -> None:
    small = write_shard(tmp_path / "small", rows(2**16), 2**16)
    large = write_shard(tmp_path / "large", rows(2**16), 2**16 + 1)
    assert large.num_bytes - small.num_bytes == pytest.approx(2 * 16 * 5, abs=8)


def test_a_split_is_read_in_the_order_of_its_manifest(tmp_path: Path) -> None:
    parts = [rows(300)[:2], rows(300)[2:]]
    shards = [
        write_shard(tmp_path / name, part, 300) for name, part in zip("ba", parts, strict=True)
    ]
    assert_same(list(read_split(tmp_path, split_of(shards))), rows(300))


def split_of(shards: list[Shard]) -> SplitLessons:
    return SplitLessons(
        shards=shards,
        num_rows=3,
        num_tokens=8,
        num_prompt_tokens=13,
        num_laws=9,
        num_truncated=0,
        num_empty=0,
        num_looping=0,
        num_duplicates=0,
        rows_by_category={},
        tokens_by_temperature={},
    )


def test_any_damage_stops_the_reading_of_a_split_before_its_first_row(tmp_path: Path) -> None:
    """A flipped bit anywhere, also in a later file, a cut at any length, an absent file."""
    good = write_shard(tmp_path / "good", rows(300), 300)
    shard = write_shard(tmp_path / NAME, rows(300, 4), 300)
    path, content = tmp_path / NAME, (tmp_path / NAME).read_bytes()
    for place in (*range(0, len(content), 97), len(content) - 1):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ShardError, match=f"{NAME}: .*rerun stage=generate"):
            next(read_split(tmp_path, split_of([good, shard])))
        path.write_bytes(content[:place])
        with pytest.raises(ShardError, match=NAME):
            check_shard(tmp_path, shard)
    path.unlink()
    with pytest.raises(ShardError, match=NAME):
        check_shard(tmp_path, shard)
    path.write_bytes(content)
    check_shard(tmp_path, shard)


def test_a_broken_file_without_a_manifest_is_a_shard_error_and_nothing_else(tmp_path: Path) -> None:
    """Resumed generation reads shards that no manifest lists yet: cut, empty or garbled ones."""
    write_shard(tmp_path / NAME, rows(300), 300)
    path, content = tmp_path / NAME, (tmp_path / NAME).read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for length in (0, 5, header - 1, header, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ShardError, match=NAME):
            read_shard(path)
    rng = random.Random(0)
    num_refused = 0
    for place in range(header):
        garbled = bytearray(content)
        garbled[place] = rng.randrange(256)
        path.write_bytes(garbled)
        try:
            read_shard(path)
        except ShardError as refused:
            assert NAME in str(refused)
            num_refused += 1
    assert num_refused > header / 2
    path.write_bytes(content)
    for tensor in ("num_prompt", "num_generated", "category"):  # numbers that fit no tensor
        start = header + offset_of(content[8:header], tensor)
        path.write_bytes(content[:start] + b"\x7f\x7f" + content[start + 2 :])
        with pytest.raises(ShardError, match=NAME):
            read_shard(path)
    with pytest.raises(ShardError, match="absent"):
        read_shard(tmp_path / "absent")


def offset_of(header: bytes, tensor: str) -> int:

    return json.loads(header)[tensor]["data_offsets"][0]
