"""The order in which the records of a source are drawn, in memory that does not grow with it."""

from __future__ import annotations

import heapq
import random
from array import array
from collections.abc import Callable, Iterator

from data.files import Record

# a record and its number in the source, which stays its own whatever the order
Numbered = tuple[int, Record]
# what a source is read as: each record as its filters leave it, None where they drop it
Reading = Iterator[Numbered | None]

HELD = 8192  # records in memory at a time, unless more prompts are wanted
SHUFFLED = 2**18  # records of a source whose order is a shuffle of their numbers


class Drawn:
    """The records that a source's filters leave, in an order drawn from `seed`: a permutation in
    which every order is equally likely.

    Every record draws a key, and the records come by key. `read` reads the source from its start;
    each reading holds the `held` records of the least keys above those that came before, so the
    order does not depend on `held`, which only sets how often the source is read: once for the
    first `held` records.
    """

    def __init__(
        self, read: Callable[[], Reading], num_records: int, seed: str, held: int = HELD
    ) -> None:
        self._read = read
        self._num_records = num_records  # dropped ones included; of more than SHUFFLED, any more
        self._seed = seed
        self._held = held
        self._num_usable: int | None = None

    def __iter__(self) -> Iterator[Numbered]:
        last = (-1.0, -1)
        while True:
            least = self._least_above(last)
            for _, number, record in least:
                yield number, record
            if len(least) < self._held:
                return
            last = least[-1][:2]

    def count(self) -> int:
        """How many records the filters leave; it reads the source when nothing has yet."""
        if self._num_usable is None:
            self._least_above((-1.0, -1))
        assert self._num_usable is not None
        return self._num_usable

    def _least_above(self, last: tuple[float, int]) -> list[tuple[float, int, Record]]:
        num_usable = 0

        def above() -> Iterator[tuple[float, int, Record]]:
            nonlocal num_usable
            for key, found in zip(self._keys(), self._read(), strict=False):
                if found is None:
                    continue
                num_usable += 1
                number, record = found
                if (key, number) > last:
                    yield key, number, record

        # equal keys are told apart by the number, so records are never compared
        least = heapq.nsmallest(self._held, above())
        self._num_usable = num_usable
        return least

    def _keys(self) -> Iterator[float]:
        """A key for each record, dropped ones included, by place in the source; the same each
        time.
        """
        rng = random.Random(self._seed)
        if self._num_records > SHUFFLED:
            return iter(rng.random, None)  # without end: no float is None
        # the order that a shuffle of the whole gives, at four bytes a record
        order = list(range(self._num_records))
        rng.shuffle(order)
        ranks = array("I", bytes(4 * len(order)))
        for rank, place in enumerate(order):
            ranks[place] = rank
        return iter(ranks)
