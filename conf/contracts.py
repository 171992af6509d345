"""The manifests stages exchange. Each is a JSON file `manifest.json` beside the data it describes.

A stage reads the manifest of the stage before and writes its own last, atomically: a folder with a
manifest is complete, a folder without one is partial and is continued.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from conf.choices import Stage
from conf.errors import UserError

MANIFEST = "manifest.json"
FORMAT = 1  # raised when a manifest or a data file changes so that older ones cannot be read


class ContractError(UserError, ValueError):
    """A manifest that is missing, broken or of another format version."""


@dataclass(kw_only=True)
class Provenance:
    """Where an artefact comes from."""

    git_commit: str
    command: str
    seed: int
    device: str
    created: str  # ISO 8601, UTC
    packages: dict[str, str]
    seconds: float = 0.0
    peak_memory_gib: float = 0.0  # largest resident memory of the process that made it, until then


@dataclass(kw_only=True)
class Manifest:
    """`determined_by` is the part of the configuration that determines the artefact; `fingerprint`
    its digest.
    """

    fingerprint: str
    determined_by: dict[str, Any]
    provenance: Provenance
    format: int = FORMAT

    stage: ClassVar[Stage]  # that writes it

    def write(self, folder: Path) -> None:
        """Write `manifest.json` in `folder`, atomically."""
        from conf.run import write_atomically

        write_atomically(
            folder / MANIFEST,
            json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n",
        )

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read `manifest.json` of `folder`; raises ContractError naming the file and what is wrong
        with it.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise ContractError(
                f"{path}: not there. Run the stage that writes it (stage={cls.stage}), or choose a"
                " run that has it with name=."
            )
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            if tree.get("format") != FORMAT:
                raise ContractError(
                    f"{path}: format {tree.get('format')}, this version reads {FORMAT}. Use another"
                    " name= to start afresh."
                )
            return _build(cls, tree)
        except (json.JSONDecodeError, TypeError, KeyError) as broken:
            raise ContractError(
                f"{path}: not a {cls.__name__} manifest ({broken}). Remove its folder and rerun."
            ) from None


def _build(cls: type, tree: Any) -> Any:
    """Rebuild nested dataclasses from JSON by their type hints; unknown keys raise TypeError."""
    if dataclasses.is_dataclass(cls):
        hints = typing.get_type_hints(cls)
        return cls(**{key: _build(hints[key], value) for key, value in tree.items()})
    origin, args = typing.get_origin(cls), typing.get_args(cls)
    if origin is list:
        return [_build(args[0], item) for item in tree]
    if origin is dict:
        return {key: _build(args[1], value) for key, value in tree.items()}
    if origin in (typing.Union, types.UnionType):
        return None if tree is None else _build(next(a for a in args if a is not type(None)), tree)
    return tree


# ---------------------------------------------------------------- prepare


@dataclass(kw_only=True)
class Prompt:
    """One line of corpus/train.jsonl, corpus/validation.jsonl and of an evaluation suite."""

    id: str  # stable: source name and record number
    source: str
    category: str
    messages: list[dict[str, str]]  # OpenAI style; ends with the user turn that is answered first
    # what is said after each answer, turn by turn; each ends with a user turn
    follow_ups: list[list[dict[str, str]]] = field(default_factory=list)

    @property
    def all_messages(self) -> list[dict[str, str]]:
        """Of every turn, without the answers."""
        return [*self.messages, *(message for turn in self.follow_ups for message in turn)]


@dataclass(kw_only=True)
class Corpus(Manifest):
    stage = Stage.prepare
    num_prompts: dict[str, dict[str, int]]  # split -> category -> prompts
    num_by_source: dict[str, int]
    # reason -> prompts: empty, too_short, too_long, other_language, duplicate, contaminated,
    # over_quota
    dropped: dict[str, int]
    # suite -> prompts removed from the corpus because the suite holds them
    overlap_with_suites: dict[str, int]
    num_masked: int  # prompts in which personal details were masked
    suites: dict[str, int]  # suite -> prompts in it


# ---------------------------------------------------------------- generate


@dataclass(kw_only=True)
class Shard:
    """One safetensors file of rows; see data.shards for its tensors."""

    file: str
    sha256: str
    num_rows: int
    num_tokens: int  # generated (supervised) tokens
    num_bytes: int
    num_hidden_bytes: int = 0  # of these: hidden states for the warm start


@dataclass(kw_only=True)
class SplitLessons:
    shards: list[Shard]
    num_rows: int
    num_tokens: int
    num_prompt_tokens: int
    num_laws: int  # recorded distributions: of generated tokens and, in training, of prompts'
    num_truncated: int  # not ended by EOS: by the length limit, or cut where a server's ids end
    num_empty: int  # EOS at once
    num_looping: int  # the last 32 tokens repeat a pattern of 8 tokens or fewer
    num_duplicates: int  # same category and same ids as an earlier answer
    rows_by_category: dict[str, int]
    tokens_by_temperature: dict[str, int]


@dataclass(kw_only=True)
class Lessons(Manifest):
    stage = Stage.generate
    target: dict[str, Any]  # name, vocab_size, num_layers, hidden_size, parameters, dtype
    splits: dict[str, SplitLessons]  # train, validation
    num_skipped_prompts: int  # longer than generate.max_prompt_tokens
    # answers that were planned and are not there: later turns whose conversation grew longer than
    # that, and what a server said in no readable token
    num_unanswered: int = 0
    # who answered; of servers, what they gave (models.remote)
    engine: dict[str, Any] = field(default_factory=lambda: {"kind": "builtin"})
    top_k: int  # recorded ids of a position, at most
    mean_recorded_mass: float  # probability the recorded ids cover, averaged over positions
    bytes_per_token: float  # all bytes but those of hidden states, for each recorded distribution
    tokens_per_second: float
    seconds: float


# ---------------------------------------------------------------- distill


@dataclass(kw_only=True)
class Acceptance:
    """A mean with its sums: `expected_acceptance = total / count`, and a bootstrap interval over
    answers.
    """

    value: float
    low: float
    high: float
    count: int


@dataclass(kw_only=True)
class BeforeAfter:
    before: Acceptance
    after: Acceptance


@dataclass(kw_only=True)
class Depth:
    """What was known before training of a draft of the target's first layers; see train.depth."""

    num_layers: int
    expected_acceptance: float  # after the warm start, on recorded validation answers
    step_ms: float
    c: float  # a draft step over a target step
    gamma: int  # draft length of the largest speedup
    predicted_speedup: float


@dataclass(kw_only=True)
class Draft(Manifest):
    """`draft/model` is a plain transformers folder; `draft/initial` the same draft before its first
    step.
    """

    stage = Stage.distill

    parameters: int
    num_layers: int
    layers: list[int]  # of the target, in order; empty for a pretrained draft
    depths: list[Depth] = field(default_factory=list)  # compared by draft.num_layers=0
    num_bytes: int
    hot_vocab: int  # ids the draft proposes; 0: all
    shared_vocab: int = 0  # tokens that a draft with another tokenizer proposes; 0: it has the same
    # on recorded validation answers, a lower bound (see train.objectives)
    expected_acceptance: BeforeAfter
    best_step: int
    num_steps: int
    num_tokens_seen: int  # supervised
    tokens_per_second: float
    seconds: float


# ---------------------------------------------------------------- evaluate


@dataclass(kw_only=True)
class Interval:
    median: float
    low: float
    high: float


@dataclass(kw_only=True)
class Rates:
    autoregressive: float
    speculative: float


@dataclass(kw_only=True)
class Cost:
    """Step times in milliseconds. `v[k]` = time of a target call over k tokens / over 1; c = draft
    / target step.
    """

    draft_step_ms: float
    target_step_ms: float
    c: float
    v: dict[str, float]
    compile_seconds: float
    target_bytes: int
    draft_bytes: int
    memory_gb_per_s: float  # measured read bandwidth, for the physical limit of a step


def drafting(gamma: int, *, by_cost: bool) -> str:
    """How long drafts are, in words."""
    return f"up to {gamma}, by cost" if by_cost else str(gamma)


@dataclass(kw_only=True)
class Difference:
    """A prompt whose greedy output with a draft is another than without, from `position` on.

    `gap` is between the target's logits of the two tokens there, both from one call; `spacing` is
    what neighbouring numbers of their kind differ by, of which rounding moves a logit by a few.
    """

    category: str
    prompt: str
    position: int  # tokens before it in the output
    autoregressive: str
    speculative: str
    gap: float
    spacing: float


@dataclass(kw_only=True)
class Result:
    """One row: a category (or "all"), a temperature and a way of drafting. Definitions: README,
    section Metrics.
    """

    category: str
    temperature: float
    gamma: int
    acceptance_rate: float
    acceptance_length: float
    acceptance_length_histogram: list[int]  # target calls that committed 1, 2, ... tokens
    position_acceptance: list[float]  # unconditional: rounds accepting >= i / rounds drafting >= i
    conditional_acceptance: list[float]  # given that position i was tested
    draft_utilisation: float
    num_prompts: int
    num_tokens: int
    num_target_calls: int
    target_call_widths: list[int]  # target calls that read 1, 2, ... tokens
    num_draft_steps: int  # of the draft model; a lookup takes none
    num_drafted: int
    num_tested: int
    num_accepted: int
    tokens_per_second: Rates
    speedup: Interval
    predicted_speedup: float
    efficiency: float
    identical_outputs: float | None  # greedy only
    by_cost: bool = False  # drafts of the shape that pays, of at most gamma tokens
    differences: list[Difference] = field(default_factory=list)  # of outputs, greedy only

    @property
    def drafting(self) -> str:
        """How long drafts are, in words."""
        return drafting(self.gamma, by_cost=self.by_cost)

    def drafts_like(self, other: Result) -> bool:
        """Whether both rows drafted in the same way."""
        return (self.gamma, self.by_cost) == (other.gamma, other.by_cost)

    @property
    def usual_length(self) -> int:
        """Drafted tokens of the average call, rounded, at least 1: what to tell an engine whose
        drafts all have one length.
        """
        return max(1, round(self.num_drafted / max(self.num_target_calls, 1)))


@dataclass(kw_only=True)
class ExpectedAcceptance:
    """Teacher-forced, exact over all ids, at temperature 1, on the validation answers."""

    before: Acceptance
    after: Acceptance
    after_by_category: dict[str, Acceptance] = field(default_factory=dict)
    # of the answer's sampling
    after_by_temperature: dict[str, Acceptance] = field(default_factory=dict)


@dataclass(kw_only=True)
class Report(Manifest):
    stage = Stage.evaluate
    name: str
    target: dict[str, Any]
    draft: dict[str, Any]  # parameters, layers, bytes, hot_vocab
    machine: dict[str, Any]  # device, cores, dtype, compiled
    cost: Cost
    expected_acceptance: ExpectedAcceptance
    results: list[Result]
    with_lookup: list[Result]  # the draft beside prompt lookup; gamma is how far a lookup drafts
    best: Result  # greedy, category "all", highest median speedup
    verdict: str  # one sentence: the speedup, or why there is none
    warnings: list[str]
    samples: list[dict[str, Any]]  # prompt, answer, per-token provenance (draft, correction, bonus)
    seconds_by_stage: dict[str, float]
    peak_memory_gib: float
    training_curve: list[dict[str, float]]  # step, tokens, expected_acceptance, loss
