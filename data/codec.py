"""Recorded laws in few bytes: the likeliest ids of a position, their log-probabilities, and what
they leave over.

Format 2, of M laws with K_m ids each over V ids (format 1 held K ids and float16 values of every
law):
    counts   uint8 or int16 M      K_m
    rest     float16 M             probability of all other ids in units of 2**-16; where it is more
                                   than one half, minus the probability of the recorded ones
    ids      packed, sum of K_m    the ids, in falling order of probability
    second   uint8 M               step of SECOND: how far the second id is below the first
    further  packed                steps of FURTHER: each further id below the one before
Packed whole numbers take the fewest bits that V - 1, or a step, needs; see `pack`.

A log-probability is stored as its distance from the decoded one before, so that roundings do not
add up, and all of a law are shifted together until they and the rest make 1. The rest is kept and
not the first log-probability, because divergences weigh the rest as an outcome of its own, and
because so the recorded mass never exceeds 1. The smaller of rest and recorded mass is exact to
2**-11 of its value (a rest below 2**-20 becomes that). A distance is rounded to the nearest step:
by up to half of what lies between the two steps around it. A log-probability is then off by at most
twice the largest such half in its law, and 2**-10 for the mass.
"""

# M laws, K ids of the longest one, L values in a row, G groups of eight, W bits

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

VERSION = 2
LARGEST_DROP = 16.0  # nats; an id further below the one before, and all after it, count as rest
FURTHER_BITS = 6
# finer where a drop is small: there both probabilities count
SECOND = LARGEST_DROP * torch.linspace(0, 1, 2**8) ** 2
FURTHER = LARGEST_DROP * torch.linspace(0, 1, 2**FURTHER_BITS) ** 3
REST_UNITS = 2.0**16  # the whole range is one in which float16 has 11 bits
SMALLEST_REST = 2.0**-20  # keeps float32 sums of the recorded mass below 1
UNRECORDED = -math.inf  # log-probability of the ids that fill up a shorter law

Read = Callable[[str, int, int], Tensor]


def cut_at_mass(log_p_MK: Tensor, mass: float) -> Tensor:
    """Log-probabilities in falling order, UNRECORDED from where those before hold `mass` in all."""
    if not log_p_MK.shape[1]:
        return log_p_MK
    before_MK = log_p_MK.exp().cumsum(-1).roll(1, -1)
    before_MK[:, 0] = 0
    drop_MK = -log_p_MK.diff(dim=-1, prepend=log_p_MK[:, :1])
    past_MK = ((before_MK >= mass) | (drop_MK > LARGEST_DROP)).cummax(-1).values
    past_MK[:, 0] = False
    return log_p_MK.masked_fill(past_MK, UNRECORDED)


def encode(ids_MK: Tensor, log_p_MK: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """The tensors of the format. Log-probabilities fall, and end in UNRECORDED ones."""
    there_MK = log_p_MK != UNRECORDED  # also NaN
    counts_M = there_MK.sum(-1)
    log_p_MK = log_p_MK.float()
    codes_MK = torch.zeros_like(ids_MK, dtype=torch.uint8)
    below_M = torch.zeros(len(counts_M))  # the first, as far as it is decoded
    for place in range(1, log_p_MK.shape[1]):
        steps = SECOND if place == 1 else FURTHER
        drop_M = log_p_MK[:, 0] - log_p_MK[:, place] - below_M
        codes_MK[:, place] = torch.bucketize(drop_M, (steps[1:] + steps[:-1]) / 2)
        below_M += steps[codes_MK[:, place].long()]
    codes_MK *= there_MK
    mass_M = log_p_MK.double().exp().sum(-1)
    rest_M = (1 - mass_M).clamp(min=SMALLEST_REST)
    longest = int(counts_M.max()) if len(counts_M) else 0
    return {
        "counts": counts_M.to(torch.uint8 if longest < 2**8 else torch.int16),
        "rest": (rest_M.where(~(rest_M > 0.5), -mass_M) * REST_UNITS).half(),
        "ids": pack(ids_MK[there_MK], width(vocab_size)),
        "second": pad(codes_MK, (0, 2))[:, 1].contiguous(),
        "further": pack(codes_MK[:, 2:][there_MK[:, 2:]], FURTHER_BITS),
    }


@dataclass(frozen=True)
class Laws:
    """Encoded laws of one file; `read(name, start, stop)` gives a part of one of its tensors."""

    counts_M: Tensor
    vocab_size: int
    read: Read

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], vocab_size: int) -> Laws:
        """Laws in memory."""
        return cls(tensors["counts"], vocab_size, lambda name, a, b: tensors[name][a:b])

    def decode(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Ids (int64) and log-probabilities (float32) of laws start to stop, MK, filled up with id
        0 and UNRECORDED. Reads the counts of the laws before them, and nothing else of these.
        """
        counts_M = self.counts_M[start:stop].long()
        before_M = self.counts_M[:start].long()
        longest = int(counts_M.max()) if len(counts_M) else 0
        there_MK = torch.arange(longest) < counts_M.unsqueeze(-1)
        ids_MK = torch.zeros(there_MK.shape, dtype=torch.long)
        bits, first, num = width(self.vocab_size), int(before_M.sum()), int(counts_M.sum())
        ids_MK[there_MK] = read_packed(self.read, "ids", bits, first, first + num).long()
        drop_MK = torch.zeros(there_MK.shape)
        if longest > 1:
            drop_MK[:, 1] = SECOND[self.read("second", start, stop).long()]
        if longest > 2:
            first = int((before_M - 2).clamp(min=0).sum())
            num = int((counts_M - 2).clamp(min=0).sum())
            codes = read_packed(self.read, "further", FURTHER_BITS, first, first + num)
            drop_MK[:, 2:][there_MK[:, 2:]] = FURTHER[codes.long()]
        shape_MK = (-drop_MK.cumsum(-1)).masked_fill(~there_MK, UNRECORDED)
        rest_M1 = self.read("rest", start, stop).float().unsqueeze(-1) / REST_UNITS
        log_mass_M1 = torch.where(rest_M1 < 0, (-rest_M1).log(), (-rest_M1).log1p())
        log_p_MK = shape_MK + (log_mass_M1 - shape_MK.logsumexp(-1, keepdim=True))
        return ids_MK, log_p_MK.masked_fill(~there_MK, UNRECORDED)  # a law may have no id at all


def law_bytes(num_ids: int, vocab_size: int) -> float:
    """Bytes of a law of so many ids."""
    packed = num_ids * width(vocab_size) + max(num_ids - 2, 0) * FURTHER_BITS
    return (1 if num_ids < 2**8 else 2) + 2 + 1 + packed / 8


def width(vocab_size: int) -> int:
    """Bits of an id."""
    return max(1, (vocab_size - 1).bit_length())


def pack(values_L: Tensor, bits: int) -> Tensor:
    """Whole numbers below 2**bits (at most 24) as uint8, lowest bit first: eight take `bits` bytes,
    and the last group is filled up with zeros.
    """
    values_8G = pad(values_L.int(), (0, -len(values_L) % 8)).view(-1, 8).T.contiguous()
    bytes_WG = torch.zeros(bits, values_8G.shape[1], dtype=torch.int32)
    for lane, values_G in enumerate(values_8G):
        byte, shift = divmod(lane * bits, 8)
        shifted_G = values_G << shift
        for place in range(-(-(shift + bits) // 8)):
            bytes_WG[byte + place] |= (shifted_G >> 8 * place) & 255
    return bytes_WG.to(torch.uint8).T.flatten()


def unpack(bytes_L: Tensor, bits: int) -> Tensor:
    """What `pack` packed, int32, a multiple of eight numbers."""
    bytes_WG = bytes_L.view(-1, bits).T.int().contiguous()
    values_8G = torch.empty(8, bytes_WG.shape[1], dtype=torch.int32)
    for lane in range(8):
        byte, shift = divmod(lane * bits, 8)
        joined_G = bytes_WG[byte].clone()
        for place in range(1, -(-(shift + bits) // 8)):
            joined_G |= bytes_WG[byte + place] << 8 * place
        values_8G[lane] = (joined_G >> shift) & (2**bits - 1)
    return values_8G.T.flatten()


def read_packed(read: Read, name: str, bits: int, start: int, stop: int) -> Tensor:
    """Numbers start to stop of a packed tensor; no others are read, but for up to seven on either
    side.
    """
    group, skipped = divmod(start, 8)
    end = -(-stop // 8)
    return unpack(read(name, group * bits, end * bits), bits)[skipped : skipped + stop - start]


def join(laws: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities, MK of different K, one after another; the shorter ones end in id 0
    and UNRECORDED.
    """
    longest = max(ids_MK.shape[1] for ids_MK, _ in laws)
    ids = [pad(ids_MK, (0, longest - ids_MK.shape[1])) for ids_MK, _ in laws]
    log_p = [
        pad(log_p_MK, (0, longest - log_p_MK.shape[1]), value=UNRECORDED) for _, log_p_MK in laws
    ]
    return torch.cat(ids), torch.cat(log_p)
