"""How a record becomes a prompt, and prompts on disk."""

from __future__ import annotations

import itertools
import json
import re
import string
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from conf.choices import Turns
from conf.contracts import ContractError, Prompt
from conf.errors import ConfigError, require
from conf.groups import SourceConfig
from conf.run import write_atomically
from data.files import Record, missing_column
from data.order import HELD, SHUFFLED, Drawn, Numbered, Reading
from data.sources import count_known, held_out, read_records
from data.text import normalise, shorten

Messages = list[dict[str, str]]
ROLES = {"human": "user", "gpt": "assistant"}  # names that ShareGPT files use


@dataclass(frozen=True)
class Candidate:
    """A prompt, and the record's own text in it without the words of the template."""

    prompt: Prompt
    content: str


@dataclass
class Source:
    """One source of prompts, read once. `left_out` counts the records that exclude and match
    dropped so far.
    """

    name: str
    key: str  # in error messages, for example data.sources.boolq
    config: SourceConfig
    seed: int
    held: int = HELD  # records in memory at a time
    default_turns: Turns = Turns.every
    left_out: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._groups = self._grouped()
        self._num_taken = 0

    def __iter__(self) -> Iterator[Candidate]:
        """What is left of the source's prompts, in an order drawn from the seed.

        Raises ConfigError for a source that cannot be read or holds nothing, and for a column that
        is missing.
        """
        return (self._render(group) for group in self._groups)

    def count_rest(self) -> int:
        """How many prompts are left of a source that ends."""
        return self._drawn.count() // self.config.group - self._num_taken

    def _grouped(self) -> Iterator[list[Numbered]]:
        usable = iter(self._drawn) if count_known(self.config) else filter(None, self._read())
        while len(group := list(itertools.islice(usable, self.config.group))) == self.config.group:
            self._num_taken += 1
            yield group

    @cached_property
    def _drawn(self) -> Drawn:
        records = read_records(self.key, self.config, seed=self.seed)
        # no more are counted than decide how the order is drawn
        num_records = sum(1 for _ in itertools.islice(records, SHUFFLED + 1))
        start, stop = self.config.start, self.config.stop
        require(
            num_records > 0,
            self.key,
            self.config.path,
            f"{f'records {start} to {stop}' if start or stop >= 0 else 'it'} holds no record",
            "Name a file and a range with records in it",
        )
        return Drawn(self._read, num_records, f"{self.seed}:{self.key}", self.held)

    @cached_property
    def _excluded(self) -> dict[str, set[Any]]:
        return held_out(self.key, self.config)

    def _read(self) -> Reading:
        """The source from its start; what is left out is counted anew each time."""
        self.left_out = {"held_out": 0, "no_match": 0}
        excluded = self._excluded
        for number, record in read_records(self.key, self.config, seed=self.seed):
            if any(record.get(column) in values for column, values in excluded.items()):
                self.left_out["held_out"] += 1
                yield None
                continue
            matched = self._match(record)
            if matched is None:
                self.left_out["no_match"] += 1
                yield None
                continue
            yield number, matched

    def _match(self, record: Record) -> Record | None:
        for column, pattern in self.config.match.items():
            if column not in record:
                raise ConfigError(missing_column(f"{self.key}.match", column, record))
            found = re.search(pattern, str(record[column]))
            if found is None:
                return None
            record = record | {name: text or "" for name, text in found.groupdict().items()}
        return record

    def _render(self, group: list[Numbered]) -> Candidate:
        number, first = group[0]
        turns: list[Messages] = []
        if self.config.messages_column:
            turns = self._turns(first)
            content = "\n".join(message["content"] for turn in turns for message in turn)
        else:
            text, content = self._fill(number, [record for _, record in group])
            turns = [[{"role": "user", "content": text}]]
        prompt = Prompt(
            id=f"{self.name}-{number}",
            source=self.name,
            category=self.config.category,
            messages=turns[0] if turns else [],
            follow_ups=turns[1:],
        )
        return Candidate(prompt, content)

    def _fill(self, number: int, records: list[Record]) -> tuple[str, str]:
        templates = self.config.templates or [self.config.template]
        # by a checksum and not in turn: a source may itself alternate between kinds of records
        template = templates[zlib.crc32(f"{self.name}-{number}".encode()) % len(templates)]
        columns: dict[str, str] = {}
        for column in _columns(f"{self.key}.template", template):
            for record in records:
                if column not in record:
                    raise ConfigError(missing_column(f"{self.key}.template", column, record))
            columns[column] = "\n".join(self._cut(record[column]) for record in records)
        return normalise(template.format(**columns)), normalise("\n".join(columns.values()))

    def _cut(self, value: Any) -> str:
        text = "" if value is None else str(value)
        return normalise(shorten(text, self.config.max_words) if self.config.max_words else text)

    def _turns(self, record: Record) -> list[Messages]:
        """What is said before each answer of the target, as `turns` in the settings says."""
        column = self.config.messages_column
        key = f"{self.key}.messages_column"
        if column not in record:
            raise ConfigError(missing_column(key, column, record))
        said = record[column]
        if not isinstance(said, list) or not said:
            raise ConfigError(
                f"{key}={column}: it holds {type(said).__name__}, not a list of turns. "
                "Use `template` instead."
            )
        every = (self.config.turns or self.default_turns) is Turns.every
        if isinstance(said[0], str):
            said = [{"role": "user", "content": text} for text in (said if every else said[:1])]
        messages = [_message(key, turn) for turn in said]
        messages = [{**message, "content": self._cut(message["content"])} for message in messages]
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        return split_turns(messages) if every else [messages] if messages else []


def split_turns(messages: Messages) -> list[Messages]:
    """A conversation cut behind each of its user turns, without what assistants say in it."""
    turns: list[Messages] = [[]]
    for message in messages:
        if message["role"] == "assistant":
            continue
        turns[-1].append(message)
        if message["role"] == "user":
            turns.append([])
    return [turn for turn in turns if turn and turn[-1]["role"] == "user"]


def _message(key: str, turn: Any) -> dict[str, str]:
    role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    content = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
    role = ROLES.get(str(role), role)
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        raise ConfigError(
            f"{key}: a turn is {str(turn)[:60]!r}, where a role (system, user or assistant) "
            "and a text `content` are needed. Use another column or `template`."
        )
    return {"role": role, "content": content}


def _columns(key: str, template: str) -> list[str]:
    """Names between braces in a template, each once, in order."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as broken:
        raise ConfigError(
            f"{key}={template!r}: not a format string ({broken}). Write a brace that is text twice."
        ) from None
    for name in names:
        if not name.isidentifier():
            raise ConfigError(
                f"{key}={template!r}: {{{name}}} names no column. "
                "Write the name of a column between braces."
            )
    return list(dict.fromkeys(names))


# ---------------------------------------------------------------- on disk


def write_prompts(folder: Path, split: str, prompts: list[Prompt]) -> None:
    """Write `<split>.jsonl`, one prompt per line, atomically."""
    lines = (json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts)
    write_atomically(folder / f"{split}.jsonl", "".join(lines))


def read_prompts(folder: Path, split: str) -> list[Prompt]:
    """Prompts of a corpus folder, `split` being train or validation; raises ContractError when the
    file is broken.
    """
    path = folder / f"{split}.jsonl"
    if not path.is_file():
        raise ContractError(f"{path}: not there. Run stage=prepare, or name= of a run that has it.")
    prompts = []
    # not str.splitlines: it also splits at characters that JSON leaves as they are inside a text
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line:
            continue
        try:
            prompts.append(Prompt(**json.loads(line)))
        except (json.JSONDecodeError, TypeError) as broken:
            raise ContractError(
                f"{path}: line {number} is no prompt ({broken}). Remove the folder and rerun."
            ) from None
    return prompts
