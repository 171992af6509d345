"""A terminal chat with target and draft that shows where each token came from."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from conf.choices import Dtype
from conf.contracts import MANIFEST, Cost, Lessons, Report, drafting
from conf.groups import RuntimeConfig, TargetConfig
from conf.schema import Config
from conf.validate import require_package
from data.chat import render_prompt
from eval.pair import ModelPair, Pieces
from models.decoding.compiled import has_compiler
from models.decoding.counts import Counts
from models.decoding.sampling import Sampling
from models.decoding.stops import StopStrings

# told apart without colour too: a correction is underlined and a bonus token bold
STYLES = {"draft": "green", "correction": "yellow underline", "bonus": "bold cyan"}
MEANING = {
    "draft": "accepted draft tokens",
    "correction": "the target's correction of a rejected one",
    "bonus": "its bonus token after a whole accepted draft",
}
COMMANDS = "/reset forgets the conversation, /quit (or Ctrl-D) leaves."
WARM_UP_TOKENS = 12
# a model may write any byte; in a terminal control characters are commands
HARMLESS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """How answers are decoded.

    `context` limits what is remembered, in tokens; gamma 0 is the target alone; `by_cost` drafts
    at most gamma tokens, as many as pay by the step times of the run's report. `lookup` is how
    far prompt lookup drafts beside the draft model, 0 for not at all. An answer ends with the token
    that completes one of the strings in `stop`.
    """

    gamma: int
    by_cost: bool = False
    lookup: int = 0
    temperature: float
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    max_new_tokens: int
    context: int
    seed: int = 0
    compiled: bool = True


def load_pair(folder: Path, settings: ChatSettings) -> tuple[ModelPair, str]:
    """The pair of a finished run and the system prompt it was made with."""
    target = target_of(folder)
    if target.package:
        require_package("target", target.package)
    runtime = RuntimeConfig(compile=settings.compiled)
    config = Config(target=target, runtime=runtime)
    return ModelPair.load(
        config, folder / "draft" / "model", settings.context
    ), target.system_prompt


def target_of(folder: Path) -> TargetConfig:
    """The target that a run's draft was made for."""
    tree = Lessons.read(folder / "lessons").determined_by["target"]
    return TargetConfig(**{**tree, "dtype": Dtype(tree["dtype"])})


def read_report(folder: Path) -> Report | None:
    """Of a run, None where it has none yet."""
    report = folder / "report"
    return Report.read(report) if (report / MANIFEST).is_file() else None


@dataclass
class Chat:
    """A conversation. Answers go to `out`; what is said about them goes to `notes`."""

    pair: ModelPair
    settings: ChatSettings
    system_prompt: str
    out: Console
    notes: Console
    cost: Cost | None = None  # of the pair's steps, for drafts by cost
    history: list[dict[str, str]] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.capacity = self.pair.decoder.target.capacity
        self._rng = torch.Generator().manual_seed(self.settings.seed)
        self._decoder, self._gamma = self.pair.decoder, self.settings.gamma
        if self.settings.by_cost and self.cost is not None:
            v = {int(width): value for width, value in self.cost.v.items()}
            by_cost = self.pair.by_cost(self.cost.c, v, self._gamma)
            self._decoder = by_cost or self._decoder
        if self.settings.gamma and self.settings.lookup:
            self._decoder = self.pair.beside_lookup(
                self._decoder, self.settings.gamma, self.settings.lookup
            )
            self._gamma = max(self.settings.gamma, self.settings.lookup)
        stops = StopStrings(self.pair.target.tokenizer, self.settings.stop)
        self._decoder = replace(self._decoder, stop_strings=stops if stops.strings else None)
        self._sampling = Sampling(
            self.settings.temperature, repetition_penalty=self.settings.repetition_penalty
        )

    def warm_up(self) -> None:
        """Compile the decoding steps before the first question."""
        if self.pair.decoder.target.compiled:
            self.note(
                "Compiling the decoding steps; the first answers may still halt for a moment."
            )
        elif self.settings.compiled and not has_compiler():
            self.note("No C++ compiler was found, so decoding runs uncompiled.")
        prompt = self._render([{"role": "user", "content": "Hello"}])
        num_tokens = min(WARM_UP_TOKENS, self.capacity - len(prompt))
        for _ in range(2):
            self._decoder.decode(
                prompt,
                gamma=self._gamma,
                max_new_tokens=max(num_tokens, 1),
                sampling=self._sampling,
                rng=torch.Generator().manual_seed(0),
            )

    def legend(self) -> None:
        """What the colours mean."""
        line = Text("Colours: ")
        for number, (kind, meaning) in enumerate(MEANING.items()):
            line.append(", " if number else "").append(meaning, STYLES[kind])
        self.notes.print(line.append("."))

    def note(self, text: str) -> None:
        self.notes.print(Text(text, "dim"), soft_wrap=True)

    def reset(self) -> None:
        """Forget the conversation; the figures go on."""
        self.history.clear()

    def ask(self, question: str) -> None:
        """Answer one message, as it is decoded, and show the figures."""
        self.history.append({"role": "user", "content": question})
        prompt = self._fitting()
        if prompt is None:
            self.history.pop()
            return
        counts, answer = Counts(), ""
        start = time.perf_counter()
        for text, kind in self._stream(prompt, counts):
            answer += text
            shown = Text(text.translate(HARMLESS), STYLES[kind])
            self.out.print(shown, end="", soft_wrap=True)
        seconds = time.perf_counter() - start
        self.out.print()
        self.history.append({"role": "assistant", "content": answer})
        self.counts, self.seconds = self.counts + counts, self.seconds + seconds
        self.note(
            f"{figures(counts, seconds)}  |  so far: {figures(self.counts, self.seconds)}"
            if len(self.history) > 2 or self.counts.num_tokens > counts.num_tokens
            else figures(counts, seconds)
        )

    def _stream(self, prompt: list[int], counts: Counts) -> Iterator[tuple[str, str]]:
        pieces = Pieces(self.pair.target.tokenizer, skip_special_tokens=True)
        for step in self._decoder.stream(
            prompt,
            gamma=self._gamma,
            max_new_tokens=self.settings.max_new_tokens,
            sampling=self._sampling,
            rng=self._rng,
            counts=counts,
        ):
            for piece in pieces.of_round(step):
                yield piece.text, piece.kind
        for piece in pieces.rest():
            yield piece.text, piece.kind

    def _fitting(self) -> list[int] | None:
        """The conversation as ids, without its oldest turns where it is too long; None if even the
        last does not fit.
        """
        room = self.capacity - self.settings.max_new_tokens
        start = 0
        while len(prompt := self._render(self.history[start:])) > room:
            if start == len(self.history) - 1:
                break
            start += 2  # a question and its answer
        if len(prompt) > room:
            self.note(
                f"This message has {len(prompt)} tokens, and {max(room, 0)} fit beside an answer "
                f"of {self.settings.max_new_tokens} in a context of {self.capacity}. Shorten it, "
                "or change --max-new-tokens or --context."
            )
            return None
        if start:
            del self.history[:start]
            self.note(f"(The oldest {start // 2} of the questions no longer fit: forgotten.)")
        return prompt

    def _render(self, messages: list[dict[str, str]]) -> list[int]:
        return render_prompt(self.pair.target.tokenizer, messages, self.system_prompt)


def figures(counts: Counts, seconds: float) -> str:
    """Acceptance and rate, by the names of the report."""
    return (
        f"acceptance_rate {counts.acceptance_rate:.2f}, acceptance_length "
        f"{counts.acceptance_length:.2f}, {counts.num_tokens / max(seconds, 1e-9):.1f} tokens/s"
    )


def read_line() -> str:
    """One line, with a prompt when a person types it; raises EOFError at the end."""
    return input("> " if sys.stdin.isatty() else "").strip()


def converse(chat: Chat) -> None:
    """Read messages until the end of the input, /quit or Ctrl-C."""
    chat.legend()
    chat.note(COMMANDS)
    while True:
        question = read_line()
        if question == "/quit":
            return
        if question == "/reset":
            chat.reset()
            chat.note("Forgotten.")
        elif question.startswith("/"):
            chat.note(f"There is no command {question.split()[0]}. {COMMANDS}")
        elif question:
            chat.ask(question)


def run_chat(folder: Path, settings: ChatSettings, once: str | None = None) -> None:
    """Chat with the pair of a run in this terminal, or answer `once` and return."""
    out, notes = Console(highlight=False), Console(stderr=True, highlight=False)
    with contextlib.suppress(ImportError):  # where there is one, lines can be edited and recalled
        import readline  # noqa: F401
    said = (
        f"{target_of(folder).path} with the draft of {folder}: drafting "
        f"{drafting(settings.gamma, by_cost=settings.by_cost)}, "
        f"temperature {settings.temperature:g}."
    )
    notes.print(Text(said, "dim"), soft_wrap=True)
    try:
        pair, system_prompt = load_pair(folder, settings)
        report = read_report(folder)
        cost = None if report is None else report.cost
        chat = Chat(pair, settings, system_prompt, out, notes, cost)
        chat.warm_up()
        if once is None:
            converse(chat)
        else:
            chat.legend()
            chat.ask(once)
    except (EOFError, KeyboardInterrupt):
        notes.print()  # the shell's prompt starts on a line of its own
