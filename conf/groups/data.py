"""Where prompts come from."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from conf.choices import (
    SourceKind,
    Turns,
)
from conf.errors import require


@dataclass
class SourceConfig:
    """Where prompts come from, and how a record becomes one.

    A record is a row of named columns. In this order: `start`/`stop` select records, `exclude`
    drops held-out ones, `match` filters and takes columns apart, `max_words` shortens, `group` puts
    several together, and `template` (or one of `templates`), a format string over the columns,
    gives the user's turn.
    """

    kind: SourceKind = SourceKind.file
    category: str = "chat"
    # package, file: the file, or a folder of them; hub: dataset id; reasoning: generators, by
    # commas; stdlib: which
    path: str = ""
    package: str = ""  # distribution that ships `path`; for reasoning: reasoning-gym
    records: str = ""  # inside a .json file, as `data.*.question`; `*` is every item or value
    template: str = "{prompt}"
    templates: list[str] = field(default_factory=list)  # instead: each record takes one of them
    # OpenAI-style messages (or MT-bench style turns) instead of `template`
    messages_column: str = ""
    # which of their user turns are answered. `every`: one after another, each behind the target's
    # own answers to those before, which take the place of the conversation's. `last`: the last
    # alone, behind the conversation as it is. Empty: every; of a suite, last
    turns: Turns | None = None
    config: str = ""  # hub: configuration name
    split: str = "train"  # hub
    revision: str = "main"  # hub
    start: int = 0  # first record used
    stop: int = -1  # one past the last record used; negative: to the end
    exclude: dict[str, str] = field(default_factory=dict)  # held-out file: column that identifies
    match: dict[str, str] = field(default_factory=dict)  # column: pattern; its groups are columns
    max_words: int = 0  # longer columns are cut, after a sentence where one ends; 0: no limit
    group: int = 1  # records put into one prompt, their columns joined by line breaks
    weight: float = 1.0  # share of the mixture, relative to the other sources

    def __post_init__(self) -> None:
        for key, least in (("group", 1), ("max_words", 0), ("start", 0)):
            value = getattr(self, key)
            way_out = f"Use {least} or more"
            require(value >= least, key, value, "it counts, in a source of prompts", way_out)
        for column, pattern in self.match.items():
            try:
                re.compile(pattern)
            except re.error as broken:
                reason = f"not a regular expression ({broken})"
                require(False, f"match.{column}", repr(pattern), reason, "Correct it")


@dataclass
class DataConfig:
    """Prompts. A mixture of `sources`, `num_train` + `num_validation` prompts in all."""

    sources: dict[str, SourceConfig] = field(default_factory=dict)
    num_train: int = 1650
    num_validation: int = 96
    min_chars: int = 8
    max_chars: int = 700  # of a prompt, all its turns together
    mask_personal_details: bool = True
    # keep prompts of these languages, as [en,de], and those whose language cannot be told (a sum,
    # code, two words). Needs the extra `languages`. Empty: all
    languages: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        require(
            self.num_train >= 1,
            "data.num_train",
            self.num_train,
            "there is nothing to train on",
            "Use 1 or more",
        )
        require(
            self.num_validation >= 1,
            "data.num_validation",
            self.num_validation,
            "checkpoints are selected on validation prompts",
            "Use 1 or more",
        )
        require(
            0 <= self.min_chars < self.max_chars,
            "data.max_chars",
            self.max_chars,
            f"no prompt has between {self.min_chars} and {self.max_chars} characters",
            "Raise data.max_chars above data.min_chars",
        )
