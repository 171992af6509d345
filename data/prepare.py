"""Stage prepare: a mixture of prompts from the configured sources, clean, distinct and unknown to
every suite.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from conf.contracts import Corpus, Prompt
from conf.errors import require
from conf.groups import DataConfig, SourceConfig
from conf.run import Resume, Run, determined, fingerprint, provenance
from conf.schema import Config, as_tree
from data.dedup import NearDuplicates, SuiteOverlap
from data.language import Languages
from data.mixture import apportion, split
from data.order import HELD
from data.prompts import Candidate, Source, read_prompts, write_prompts
from data.sources import count_known, digest
from data.suites import suite_candidates
from data.text import mask_personal_details

if TYPE_CHECKING:
    from conf.tracking import Tracker

__all__ = ["prepare", "read_prompts"]

BARREN = (
    2000  # candidates in a row that a stream may lose to the filters before it counts as exhausted
)


def prepare(config: Config, run: Run, tracker: Tracker) -> Corpus:
    """Write corpus/train.jsonl, corpus/validation.jsonl and the manifest, unless they are there
    already.

    Raises ConfigError for sources that cannot be read, hold nothing, or leave nothing after
    filtering.
    """
    determined_by = corpus_determined_by(config)
    folder = run.shared("corpus", determined_by)
    if run.resume(folder, Corpus, determined_by) is Resume.complete:
        corpus = Corpus.read(folder)
        tracker.message(
            f"prepare: {folder} is complete, {sum(corpus.num_by_source.values())} prompts"
        )
        tracker.artifact("corpus", folder)  # another run may have made it: this one used it
        return corpus
    began = time.monotonic()
    suites = suite_candidates(config.eval)
    overlap = SuiteOverlap({name: [c.content for c in found] for name, found in suites.items()})
    mixture = Mixture(config.data, config.seed, overlap)
    mixture.fill(tracker)
    train, validation = split(
        mixture.prompts,
        num_train=config.data.num_train,
        num_validation=config.data.num_validation,
        rng=Random(f"{config.seed}:split"),
    )
    write_prompts(folder, "train", train)
    write_prompts(folder, "validation", validation)
    corpus = Corpus(
        fingerprint=fingerprint(determined_by),
        determined_by=determined_by,
        provenance=provenance(config.seed, "cpu", time.monotonic() - began),
        num_prompts={
            name: dict(sorted(Counter(p.category for p in prompts).items()))
            for name, prompts in (("train", train), ("validation", validation))
        },
        num_by_source=dict(mixture.num_by_source),
        dropped=mixture.dropped(),
        overlap_with_suites={name: mixture.overlaps[name] for name in suites},
        num_masked=mixture.num_masked,
        suites={name: len(found) for name, found in suites.items()},
    )
    corpus.write(folder)
    _tell(corpus, mixture, validation, tracker)
    tracker.artifact("corpus", folder)
    return corpus


def corpus_determined_by(config: Config) -> dict[str, Any]:
    """What the corpus depends on: the data group, the suites, the seed, and the versions of what is
    read.
    """
    contents = {
        f"{group}.{name}": digest(f"{group}.{name}", source)
        for group, sources in (
            ("data.sources", config.data.sources),
            ("eval.suites", config.eval.suites),
        )
        for name, source in sorted(sources.items())
        if source.weight > 0 or group == "eval.suites"
    }
    return determined(config, "data", suites=as_tree(config.eval.suites), contents=contents)


@dataclass
class Mixture:
    """Prompts taken from the sources by weight. What a source cannot give, the others give."""

    config: DataConfig
    seed: int
    overlap: SuiteOverlap
    prompts: list[Prompt] = field(default_factory=list)
    num_by_source: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)  # reason -> prompts
    lost_by_source: Counter[str] = field(default_factory=Counter)
    overlaps: Counter[str] = field(default_factory=Counter)  # suite -> prompts
    num_masked: int = 0

    def __post_init__(self) -> None:
        # in the order of names, for the order in a YAML file is no part of what determines a corpus
        self.sources = [
            Source(name, f"data.sources.{name}", source, self.seed, self._held(source))
            for name, source in sorted(self.config.sources.items())
            if source.weight > 0
        ]
        require(
            bool(self.sources),
            "data.sources",
            "{}",
            "no source has a weight above 0",
            "Choose data=mix",
        )
        self._open = {source.name: iter(source) for source in self.sources}
        self._languages = Languages(self.config.languages) if self.config.languages else None
        self._exact: set[str] = set()
        self._near = NearDuplicates()

    def _held(self, source: SourceConfig) -> int:
        """Records of a source in memory at a time: twice as many as could be wanted of it, for some
        will be dropped.
        """
        return max(HELD, 2 * (self.config.num_train + self.config.num_validation) * source.group)

    def fill(self, tracker: Tracker) -> None:
        """Take as many prompts as are wanted, or all there are."""
        wanted = self.config.num_train + self.config.num_validation
        quotas = apportion(wanted, {s.name: s.config.weight for s in self.sources})
        with tracker.progress("prepare: prompts", wanted, "prompts") as progress:
            while any(quotas.values()):
                for name, quota in quotas.items():
                    for prompt in self._take(name, quota):
                        self.prompts.append(prompt)
                        self.num_by_source[name] += 1
                        progress.advance()
                weights = {s.name: s.config.weight for s in self.sources if s.name in self._open}
                quotas = apportion(wanted - len(self.prompts), weights)
        self._tell_short(wanted, tracker)
        require(
            len(self.prompts) >= 2,
            "data.sources",
            [source.name for source in self.sources],
            f"{len(self.prompts)} prompts remain (dropped: {dict(self.lost)}), "
            "and training and validation need one each",
            "Add sources, or widen data.min_chars and data.max_chars",
        )

    def dropped(self) -> dict[str, int]:
        """Reason -> prompts that did not enter the corpus, records left over in sources with an end
        included.
        """
        over_quota = sum(s.count_rest() for s in self.sources if count_known(s.config))
        total = self.lost + Counter(over_quota=over_quota)
        for source in self.sources:  # after the rest was counted, for that reads all of it
            total.update(source.left_out)
        return {reason: number for reason, number in sorted(total.items()) if number}

    def _tell_short(self, wanted: int, tracker: Tracker) -> None:
        shares = apportion(wanted, {s.name: s.config.weight for s in self.sources})
        short = [
            f"{n} {self.num_by_source[n]} of {shares[n]}"
            for n in shares
            if self.num_by_source[n] < shares[n]
        ]
        if short:
            rest = (
                "the other sources gave the rest"
                if len(self.prompts) == wanted
                else f"{len(self.prompts)} prompts in all, not {wanted}"
            )
            tracker.message(f"prepare: sources ran short ({', '.join(short)}): {rest}")

    def _take(self, name: str, quota: int) -> Iterator[Prompt]:
        """Up to `quota` prompts that pass every filter; a source that ends is closed."""
        barren = 0
        while quota > 0 and barren < BARREN:
            candidate = next(self._open[name], None)
            if candidate is None:
                break
            prompt = self._accept(candidate)
            barren = 0 if prompt else barren + 1
            if prompt:
                quota -= 1
                yield prompt
        if quota > 0:
            del self._open[name]

    def _accept(self, candidate: Candidate) -> Prompt | None:
        prompt = candidate.prompt
        masked = 0
        if self.config.mask_personal_details:
            masked = _mask(prompt)
        reason = self._reason_against(candidate)
        if reason:
            self.lost[reason] += 1
            self.lost_by_source[prompt.source] += 1
            return None
        self.num_masked += masked > 0
        return prompt

    def _reason_against(self, candidate: Candidate) -> str:
        text = "\n".join(message["content"] for message in candidate.prompt.all_messages)
        if not candidate.content.strip() or not text.strip():
            return "empty"
        if len(text) < self.config.min_chars:
            return "too_short"
        if len(text) > self.config.max_chars:
            return "too_long"
        if self._languages is not None and not self._languages.allows(candidate.content):
            return "other_language"
        exact = " ".join(text.casefold().split())
        if exact in self._exact:
            return "duplicate"
        holders = self.overlap.holders(f"{candidate.content}\n{text}")
        if holders:
            self.overlaps.update(holders)
            return "contaminated"
        if not self._near.add(exact):
            return "near_duplicate"
        self._exact.add(exact)
        return ""


def _mask(prompt: Prompt) -> int:
    """Mask personal details in every turn; how many there were."""
    total = 0
    for message in prompt.all_messages:
        message["content"], count = mask_personal_details(message["content"])
        total += count
    return total


def _tell(corpus: Corpus, mixture: Mixture, samples: list[Prompt], tracker: Tracker) -> None:
    columns = ["category", "source", "prompts", "dropped"]
    rows: list[list[str | int]] = [
        [s.config.category, s.name, mixture.num_by_source[s.name], mixture.lost_by_source[s.name]]
        for s in sorted(mixture.sources, key=lambda s: (s.config.category, s.name))
    ]
    tracker.table("prepare/sources", columns, rows)
    tracker.event(
        "prepare",
        {
            "train": sum(corpus.num_prompts["train"].values()),
            "validation": sum(corpus.num_prompts["validation"].values()),
            "masked": corpus.num_masked,
            **{f"dropped/{reason}": number for reason, number in corpus.dropped.items()},
        },
    )
    shown = {prompt.category: prompt for prompt in reversed(samples)}
    for category, prompt in sorted(shown.items()):
        tracker.message(f"prepare: a {category} prompt: {prompt.messages[-1]['content']!r}")
