"""Laws of the order in which records are drawn."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import order
from data.order import Drawn, Numbered


def drawn(
    num_records: int, *, held: int, seed: str = "0:s", dropped: frozenset[int] = frozenset()
) -> tuple[Drawn, list[int]]:
    """The order of so many records, and a list that grows by one whenever they are read."""
    readings: list[int] = []

    def read() -> Iterator[Numbered | None]:
        readings.append(len(readings))
        return (None if n in dropped else (n, {"n": n}) for n in range(num_records))

    return Drawn(read, num_records, seed, held), readings


def numbers(found: Drawn) -> list[int]:
    assert all(record == {"n": number} for number, record in found)
    return [number for number, _ in found]


@pytest.fixture(params=["shuffled", "drawn"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of drawing keys, on sources that are small enough for a test."""
    if request.param == "drawn":
        monkeypatch.setattr(order, "SHUFFLED", 0)
    return str(request.param)


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("num_records", [0, 1, 7, 40])
@pytest.mark.parametrize("held", [1, 3, 7, 100])
def test_every_record_comes_once_and_in_the_same_order_however_many_are_held(
    num_records: int, held: int
) -> None:
    dropped = frozenset(range(2, num_records, 5))
    whole, _ = drawn(num_records, held=1000)
    some, _ = drawn(num_records, held=held, dropped=dropped)
    assert sorted(numbers(whole)) == list(range(num_records))
    assert numbers(some) == [n for n in numbers(whole) if n not in dropped]
    assert some.count() == num_records - len(dropped)


@pytest.mark.usefixtures("kind")
def test_the_source_is_read_only_as_often_as_records_are_asked_for() -> None:
    found, readings = drawn(50, held=20)
    assert len(list(islice(found, 20))) == 20
    assert found.count() == 50
    assert len(readings) == 1
    assert len(list(islice(found, 21))) == 21  # from its start again: two more
    assert len(readings) == 3


def test_counting_needs_no_record_to_be_asked_for() -> None:
    found, readings = drawn(9, held=2, dropped=frozenset({4}))
    assert (found.count(), found.count(), len(readings)) == (8, 8, 1)


@given(st.integers(0, 60), st.text(max_size=5))
def test_a_source_of_usual_size_is_shuffled_whole(num_records: int, seed: str) -> None:
    expected = list(range(num_records))
    random.Random(seed).shuffle(expected)
    assert numbers(drawn(num_records, held=7, seed=seed)[0]) == expected


@pytest.mark.usefixtures("kind")
def test_every_order_is_as_likely_as_another() -> None:
    orders = Counter(tuple(numbers(drawn(3, held=2, seed=f"{i}:s")[0])) for i in range(3000))
    assert len(orders) == 6
    # chi-square of five degrees of freedom: 30 has a probability of 1.5e-5
    assert sum((count - 500) ** 2 / 500 for count in orders.values()) < 30


def test_equal_keys_lose_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one reading ends between them."""
    monkeypatch.setattr(order, "SHUFFLED", 0)
    monkeypatch.setattr(random.Random, "random", lambda _: 0.5)
    assert numbers(drawn(10, held=3)[0]) == list(range(10))
