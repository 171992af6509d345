"""The prompts that evaluation measures on and that training never sees."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, islice, zip_longest

from conf.choices import Turns
from conf.contracts import Prompt
from conf.errors import require
from conf.groups import EvalConfig
from data.prompts import Candidate, Source
from data.sources import count_known

SUITE_SEED = 0  # which prompts are measured is the same in every run, so that reports compare
STREAMED = 1000  # records read of a suite that has no end of its own


def suite_candidates(config: EvalConfig) -> dict[str, list[Candidate]]:
    """Suite -> all its prompts. Raises ConfigError for a suite that cannot be read or holds
    nothing.
    """
    suites = {}
    for name, source in sorted(config.suites.items()):
        key = f"eval.suites.{name}"
        limit = None if count_known(source) or source.stop >= 0 else STREAMED
        suites[name] = list(
            islice(Source(name, key, source, SUITE_SEED, default_turns=Turns.last), limit)
        )
        require(
            bool(suites[name]),
            key,
            source.path,
            "no record of it becomes a prompt",
            "Widen start, stop or match",
        )
    return suites


def suite_prompts(config: EvalConfig) -> dict[str, list[Prompt]]:
    """Category -> `eval.prompts_per_category` prompts, taken in turn from the suites of that
    category.

    Deterministic, and the same whatever the run's seed. A suite that is short gives what it has.
    """
    by_category: dict[str, list[list[Prompt]]] = defaultdict(list)
    for name, candidates in suite_candidates(config).items():
        by_category[config.suites[name].category].append([c.prompt for c in candidates])
    return {
        category: [p for p in chain.from_iterable(zip_longest(*suites)) if p is not None][
            : config.prompts_per_category
        ]
        for category, suites in sorted(by_category.items())
    }
