"""Laws of the text functions, of duplicate detection and of the mixture's arithmetic."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from conf.contracts import Prompt
from data.dedup import OVERLAP_WORDS, SHORTEST_RUN, NearDuplicates, SuiteOverlap, _shingles
from data.mixture import apportion, split
from data.text import mask_personal_details, normalise, shorten, words

WORDS = st.lists(st.sampled_from(list("abcdefgh")), min_size=1, max_size=14)
WEIGHTS = st.dictionaries(st.text(max_size=3), st.floats(0, 100), min_size=1, max_size=8)


@given(st.text())
def test_normalise_is_idempotent_and_keeps_the_words(text: str) -> None:
    once = normalise(text)
    assert normalise(once) == once
    assert not any(line != line.rstrip() for line in once.split("\n"))


@given(st.text(alphabet="ab .!?\n", max_size=80), st.integers(1, 12))
def test_shorten_gives_a_start_of_the_text_within_the_limit(text: str, limit: int) -> None:
    short = shorten(text, limit)
    assert text.startswith(short.removesuffix(" ..."))
    assert len(short.removesuffix(" ...").split()) <= max(limit, 0)
    if len(text.split()) <= limit:
        assert short == text


@given(st.text(alphabet="ab@.+- 0123456789()key=?&/:", max_size=60))
def test_masking_is_idempotent(text: str) -> None:
    masked, _ = mask_personal_details(text)
    assert mask_personal_details(masked) == (masked, 0)


@given(st.lists(WORDS, max_size=12))
def test_near_duplicates_are_exactly_the_pairs_at_the_threshold(texts: list[list[str]]) -> None:
    index = NearDuplicates(0.6)
    kept: list[frozenset[int]] = []
    for tokens in texts:
        text = " ".join(tokens)
        mine = _shingles(text)
        new = all(len(mine & other) < 0.6 * len(mine | other) for other in kept)
        assert index.add(text) == new
        if new:
            kept.append(mine)


@given(WORDS, WORDS, WORDS)
def test_a_suite_record_is_found_inside_any_text(
    before: list[str], record: list[str], after: list[str]
) -> None:
    overlap = SuiteOverlap({"suite": [" ".join(record)]})
    inside = " ".join([*before, *record, *after])
    if len(record) >= SHORTEST_RUN:
        assert overlap.holders(inside.upper() + "!") == {"suite"}
    assert overlap.holders("first line\n" + " ".join(record)) == {"suite"}


@given(st.integers(OVERLAP_WORDS + 1, 40), st.data())
def test_thirteen_shared_words_are_overlap_and_twelve_are_not(
    size: int, data: st.DataObject
) -> None:
    record = [f"w{i}" for i in range(size)]
    overlap = SuiteOverlap({"suite": [" ".join(record)]})
    start = data.draw(st.integers(0, size - OVERLAP_WORDS))
    part = record[start : start + OVERLAP_WORDS]
    assert overlap.holders("x " + " ".join(part)) == {"suite"}
    assert overlap.holders("x " + " ".join(part[:-1])) == set()


@given(st.integers(0, 500), WEIGHTS)
def test_shares_add_up_and_are_within_one_of_the_exact_ones(
    total: int, weights: dict[str, float]
) -> None:
    shares = apportion(total, weights)
    whole = sum(weights.values())
    assert list(shares) == list(weights)
    assert sum(shares.values()) == (total if whole > 0 else 0)
    for key, share in shares.items():
        if whole > 0:
            assert abs(share - total * weights[key] / whole) < 1 + 1e-6


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 60), min_size=1),
    st.integers(1, 60),
    st.integers(1, 30),
)
def test_the_split_is_disjoint_complete_and_stratified(
    sizes: dict[str, int], num_train: int, num_validation: int
) -> None:
    prompts = [
        Prompt(id=f"{c}-{i}", source=c, category=c, messages=[])
        for c, n in sizes.items()
        for i in range(n)
    ]
    num_validation = min(num_validation, len(prompts))
    train, validation = split(
        prompts, num_train=num_train, num_validation=num_validation, rng=random.Random(0)
    )
    assert sorted(p.id for p in train + validation) == sorted(p.id for p in prompts)
    counts = Counter(p.category for p in validation)
    for category, size in sizes.items():
        assert abs(counts[category] - len(validation) * size / len(prompts)) < 1 + 1e-6


@given(st.text())
def test_words_ignore_case_and_marks(text: str) -> None:
    assert words(f"«{text}»!") == words(text.casefold())
