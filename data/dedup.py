"""Which prompts say the same: near duplicates among prompts, and prompts that an evaluation suite
holds.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from data.text import words

SHINGLE_WORDS = 3
SIMILARITY = 0.8  # Jaccard similarity of shingles from which two prompts count as one
OVERLAP_WORDS = 13  # as in the GPT-3 report (Brown et al. 2020, appendix C)
SHORTEST_RUN = (
    5  # a shorter run of words is everyday language; such texts are compared whole, line by line
)


class NearDuplicates:
    """Texts seen so far, by their sets of word shingles.

    `J(A, B) >= t` implies that, in any fixed order of all shingles, the first `|A| - ceil(t |A|) +
    1` shingles of A and those of B share one (prefix filtering: Chaudhuri et al. 2006; Xiao et al.
    2008). So no pair at or above the threshold is missed, and each candidate pair is decided by its
    exact similarity.
    """

    def __init__(self, similarity: float = SIMILARITY) -> None:
        self.similarity = similarity
        self._sets: list[frozenset[int]] = []
        self._by_shingle: dict[int, list[int]] = defaultdict(list)

    def add(self, text: str) -> bool:
        """Remember `text` unless a text like it is there already; whether it was new."""
        shingles = _shingles(text)
        size = len(shingles)
        # the order of checksums is as good as any and the same in every process
        prefix = sorted(shingles)[: size - math.ceil(self.similarity * size) + 1]
        candidates = {i for shingle in prefix for i in self._by_shingle[shingle]}
        for i in candidates:
            other = self._sets[i]
            if min(size, len(other)) < self.similarity * max(size, len(other)):
                continue
            shared = len(shingles & other)
            if shared >= self.similarity * (size + len(other) - shared):
                return False
        for shingle in prefix:
            self._by_shingle[shingle].append(len(self._sets))
        self._sets.append(shingles)
        return True


def _shingles(text: str) -> frozenset[int]:
    # case and single marks matter in a sum ("8 - 3" is not "8 + 3"), so these are not the words of
    # `words`
    tokens = text.split()
    last = max(1, len(tokens) - SHINGLE_WORDS + 1)
    return frozenset(
        zlib.crc32(" ".join(tokens[i : i + SHINGLE_WORDS]).encode()) for i in range(last)
    )


class SuiteOverlap:
    """Which evaluation suites hold a text.

    A suite holds it when they share 13 words in a row, or when a whole suite record of 5 to 12
    words occurs in it, or when one of its lines is a shorter suite record.
    """

    def __init__(self, suites: Mapping[str, Iterable[str]]) -> None:
        self._runs: dict[int, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._lines: dict[str, set[str]] = defaultdict(set)
        for suite, texts in suites.items():
            for text in texts:
                for part in (text, *text.split("\n")):
                    self._add(suite, words(part))

    def _add(self, suite: str, tokens: Sequence[str]) -> None:
        if not tokens:
            return
        if len(tokens) < SHORTEST_RUN:
            self._lines[" ".join(tokens)].add(suite)
            return
        length = min(OVERLAP_WORDS, len(tokens))
        for i in range(len(tokens) - length + 1):
            self._runs[length][" ".join(tokens[i : i + length])].add(suite)

    def holders(self, text: str) -> set[str]:
        """Names of the suites that hold `text`."""
        tokens = words(text)
        found: set[str] = set()
        for line in text.split("\n"):
            found |= self._lines.get(" ".join(words(line)), set())
        for length, runs in self._runs.items():
            for i in range(len(tokens) - length + 1):
                found |= runs.get(" ".join(tokens[i : i + length]), set())
        return found
