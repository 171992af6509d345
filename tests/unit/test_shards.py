"""Recorded answers survive the disk, their laws as the codec has them; broken files are refused by
name.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from conf.contracts import Shard, SplitLessons
from data.codec import UNRECORDED, cut_at_mass
from data.shards import (
    Row,
    ShardError,
    ShardFile,
    check_shard,
    read_shard,
    read_split,
    write_shard,
)
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
            if field.name == "top_log_p":  # within the codec's bound at these distances
                assert ours.dtype is theirs.dtype
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0.15)
            elif isinstance(theirs, torch.Tensor):
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


def test_a_shard_says_what_hidden_states_take_of_it(tmp_path: Path) -> None:
    plain = write_shard(tmp_path / "plain", rows(300), 300)
    hidden = write_shard(tmp_path / "hidden", rows(300, 6), 300)
    assert (plain.num_hidden_bytes, hidden.num_hidden_bytes) == (0, 8 * 6 * 2)
    more = hidden.num_bytes - plain.num_bytes
    assert hidden.num_hidden_bytes <= more < hidden.num_hidden_bytes + 100  # its name in the header


def test_laws_of_different_lengths_share_a_shard(tmp_path: Path) -> None:
    written = [
        dataclasses.replace(row, top_log_p=cut_at_mass(row.top_log_p, mass))
        for row, mass in zip(rows(300), (1.0, 0.3, 0.6), strict=True)
    ]
    write_shard(tmp_path / NAME, written, 300)
    lengths = []
    for found, row in zip(read_shard(tmp_path / NAME), written, strict=True):
        there = row.top_log_p > UNRECORDED
        lengths += there.sum(-1).tolist()
        assert torch.equal(found.top_log_p > UNRECORDED, there)
        assert torch.equal(found.top_ids[there], row.top_ids[there])
    assert min(lengths) < max(lengths) == 5


def test_a_row_and_a_law_are_read_without_the_others(tmp_path: Path) -> None:
    """Other rows' bytes may be garbage."""
    write_shard(tmp_path / NAME, rows(300, 4), 300)
    file = ShardFile(tmp_path / NAME)
    whole = file.rows()
    assert len(file) == len(whole) == 3
    for place, row in enumerate(whole):
        assert_same(file.rows(place, place + 1), [row])
        for number in range(row.num_laws):
            ids_K, log_p_K = file.law(place, number)
            assert torch.equal(ids_K, row.top_ids[number])
            assert torch.equal(log_p_K, row.top_log_p[number])
    assert_same(file.rows(1), whole[1:])
    assert file.rows(2, 2) == []

    content = bytearray((tmp_path / NAME).read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    where = json.loads(content[8:header])
    for tensor in ("hidden", "second", "rest"):  # of the last law, and the hidden states before it
        start, end = (header + offset for offset in where[tensor]["data_offsets"])
        content[end - 1 if tensor != "hidden" else start] ^= 1
    (tmp_path / NAME).write_bytes(content)
    damaged = ShardFile(tmp_path / NAME)
    assert_same(damaged.rows(1, 2), whole[1:2])
    assert torch.equal(damaged.law(0, 2)[1], whole[0].top_log_p[2])
    with pytest.raises(ShardError, match=f"{NAME}: .*checksum"):
        damaged.check()


def test_a_shard_of_the_first_format_is_refused_in_a_sentence(tmp_path: Path) -> None:
    old = {"row": torch.arange(2), "top_ids": torch.zeros(3, 4, dtype=torch.uint16)}
    save_file(old, tmp_path / NAME, {"categories": '["chat"]'})
    with pytest.raises(ShardError, match=f"{NAME}: recorded in format 1, .* name= to record again"):
        read_shard(tmp_path / NAME)


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
        with pytest.raises(ShardError, match=f"{NAME}: .*Rerun stage=generate"):
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
    """Resumed generation reads shards that no manifest lists yet: cut ones, any byte changed."""
    written = rows(300, 4)
    write_shard(tmp_path / NAME, written, 300)
    path, content = tmp_path / NAME, (tmp_path / NAME).read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for length in (0, 5, header - 1, header, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ShardError, match=NAME):
            read_shard(path)
    rng = random.Random(0)
    for place in range(len(content)):
        garbled = bytearray(content)
        garbled[place] ^= 1 << rng.randrange(8)
        path.write_bytes(garbled)
        if content[place : place + 1] == b" " and place < header:  # fills up the header
            continue
        with pytest.raises(ShardError, match=NAME):
            read_shard(path)
    with pytest.raises(ShardError, match="absent"):
        read_shard(tmp_path / "absent")
    path.write_bytes(content)
    assert_same(read_shard(path), written)
