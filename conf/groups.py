"""The groups of settings: types, units, defaults and the ranges inside each group."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from omegaconf import MISSING

from conf.choices import (
    Device,
    Divergence,
    DraftInit,
    DraftVocab,
    Dtype,
    LayerRule,
    Optimizer,
    SourceKind,
    Supervision,
    TrackerKind,
    Verification,
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
    num_train: int = 1450
    num_validation: int = 96
    min_chars: int = 8
    max_chars: int = 700  # of a prompt, all its turns together
    mask_personal_details: bool = True

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


@dataclass
class TargetConfig:
    """The model whose decoding is to be made faster."""

    path: str = MISSING  # Hub id or local folder; with `package`: the file inside that distribution
    package: str = ""  # installed distribution that ships the weights
    gguf: bool = False  # the weights are one GGUF file, converted once into the cache folder
    revision: str = "main"
    # auto: weights rounded to bfloat16; a CPU that cannot multiply it computes in float32
    dtype: Dtype = Dtype.auto
    system_prompt: str = ""  # empty: what the chat template does by itself
    trust_remote_code: bool = False


@dataclass
class GenerateConfig:
    """The target answers the prompts; its distribution at each generated position is recorded."""

    # cycled over the answers
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.7, 1.0])
    answers_per_prompt: int = 1
    max_new_tokens: int = 192
    max_prompt_tokens: int = 224
    batch_size: int = 128  # rows decoded together
    # recorded of a position: its likeliest ids until they hold this probability, at most so many
    mass: float = 0.95
    top_k: int = 32
    # also record the laws of a training prompt's own tokens, which reading it computes: more to
    # learn from for little
    record_prompts: bool = True
    # at most so many training positions keep their final hidden state, for the warm start
    warm_start_tokens: int = 32768
    rows_per_shard: int = 256
    max_gib: float = 8.0  # refuse a recording larger than this

    def __post_init__(self) -> None:
        require(
            len(self.temperatures) > 0 and all(0 <= t < 100 for t in self.temperatures),
            "generate.temperatures",
            list(self.temperatures),
            "a temperature is a finite number of 0 (greedy) or more, and at least one is needed",
            "Use for example [0.0,1.0]",
        )
        for key in ("max_new_tokens", "max_prompt_tokens", "batch_size", "top_k", "rows_per_shard"):
            value = getattr(self, key)
            require(value >= 1, f"generate.{key}", value, "it must be positive", "Use 1 or more")
        require(
            0 < self.mass <= 1,
            "generate.mass",
            self.mass,
            "it is the probability that recorded ids are to hold",
            "Use more than 0 and up to 1; 1 records generate.top_k ids of every position",
        )
        require(
            self.answers_per_prompt >= 1,
            "generate.answers_per_prompt",
            self.answers_per_prompt,
            "no answers would be generated",
            "Use 1 or more",
        )


@dataclass
class DraftConfig:
    """The small model."""

    init: DraftInit = DraftInit.layers
    layer_rule: LayerRule = LayerRule.first
    num_layers: int = 4
    # explicit target layers; overrides layer_rule and num_layers
    layers: list[int] = field(default_factory=list)
    warm_start: bool = True  # closed-form head from hidden-state statistics (init=layers)
    ridge: float = 1e-3  # regularisation of the warm start, relative to the mean diagonal
    pretrained: str = ""  # Hub id or folder (init=pretrained)
    vocab: DraftVocab = DraftVocab.same  # whose tokens a pretrained draft reads
    train_embeddings: bool = False
    # ids the draft proposes in our decoder, by frequency in the target's answers; 0: all
    hot_vocab: int = 8192

    def __post_init__(self) -> None:
        require(
            self.num_layers >= 1 or bool(self.layers),
            "draft.num_layers",
            self.num_layers,
            "a draft needs a layer",
            "Use 1 or more",
        )
        require(
            self.init is not DraftInit.pretrained or bool(self.pretrained),
            "draft.pretrained",
            repr(self.pretrained),
            "draft.init=pretrained needs a model to start from",
            "Set draft.pretrained to a Hub id or a folder",
        )
        require(
            self.init is DraftInit.pretrained or self.vocab is DraftVocab.same,
            "draft.vocab",
            self.vocab,
            "the target's own layers read the target's tokens",
            "Leave it out, or name a draft of another tokenizer with draft=pretrained",
        )
        require(
            self.hot_vocab >= 0,
            "draft.hot_vocab",
            self.hot_vocab,
            "it counts vocabulary ids",
            "Use 0 for the whole vocabulary",
        )


@dataclass
class ObjectiveConfig:
    """What is minimised at each supervised position, and who teaches it; a second divergence can
    take over as a finishing phase.
    """

    source: Supervision = Supervision.recorded  # where the target's distributions come from
    divergence: Divergence = Divergence.forward_kl
    # weights, instead of one `divergence`: +objective.mixture={forward_kl:0.7,cross_entropy:0.3}
    mixture: dict[str, float] = field(default_factory=dict)
    beta: float = 0.5  # jsd: weight of the target in the mixture
    eta: float = 3.0  # lk_lambda: how fast weight moves from KL to TV as acceptance grows
    finish: Divergence | None = None  # divergence of the last phase
    finish_share: float = 0.0  # share of the steps that the last phase takes
    on_policy_share: float = 0.5  # on_policy: probability that the draft goes on in an answer
    rollout_tokens: int = 8  # on_policy: tokens it then writes, at most
    # another run of the same outputs folder and target, whose draft selects what is learned
    reference: str = ""
    # of each answer's positions, those the draft is furthest behind the reference at (AdaSPEC)
    select_share: float = 1.0

    def weights(self) -> dict[Divergence, float]:
        """The divergences of the first phase and their weights."""
        if not self.mixture:
            return {self.divergence: 1.0}
        return {Divergence(name): weight for name, weight in self.mixture.items()}

    @property
    def divergences(self) -> set[Divergence]:
        """Every divergence that is minimised at some time."""
        return {*self.weights(), *([] if self.finish is None else [self.finish])}

    @property
    def reads_tokens(self) -> bool:
        """Whether the target's tokens are learned from, which only its answers hold."""
        return Divergence.cross_entropy in self.divergences

    def __post_init__(self) -> None:
        for name, weight in self.mixture.items():
            require(
                name in list(Divergence) and 0 < weight < math.inf,
                f"objective.mixture.{name}",
                weight,
                "a mixture gives divergences positive weights",
                f"Name some of {', '.join(Divergence)}",
            )
        require(
            0 <= self.on_policy_share <= 1,
            "objective.on_policy_share",
            self.on_policy_share,
            "it is a probability",
            "Use a number between 0 and 1",
        )
        require(
            0 < self.select_share <= 1,
            "objective.select_share",
            self.select_share,
            "it is a share of the positions",
            "Use more than 0, up to 1",
        )
        require(
            (self.select_share < 1) == bool(self.reference),
            "objective.select_share",
            self.select_share,
            f"positions are selected by a reference, and objective.reference={self.reference!r}",
            "Name a run as the reference and a share below 1, or neither",
        )
        require(
            self.rollout_tokens >= 1,
            "objective.rollout_tokens",
            self.rollout_tokens,
            "the draft would write nothing",
            "Use 1 or more, for example as many tokens as it drafts",
        )
        require(
            0 < self.beta < 1,
            "objective.beta",
            self.beta,
            "the mixture needs both sides",
            "Use 0 < beta < 1",
        )
        require(
            0 <= self.finish_share <= 1,
            "objective.finish_share",
            self.finish_share,
            "it is a share of the steps",
            "Use a number between 0 and 1",
        )
        require(
            self.finish is not None or self.finish_share == 0,
            "objective.finish_share",
            self.finish_share,
            "no finishing divergence is named",
            "Set objective.finish, for example objective.finish=lk_lambda",
        )


@dataclass
class OptimConfig:
    """The optimizer. One epoch is one pass over the recorded training answers."""

    name: Optimizer = Optimizer.adamw
    lr: float = 1e-3  # of the matrices (muon) or of everything (adamw)
    adam_lr: float = 1e-3  # of what Muon does not take (norms, embeddings)
    newton_schulz_steps: int = 3  # of Muon, each as costly as the others; its authors take 5
    weight_decay: float = 0.0
    warmup_share: float = 0.02
    decay_share: float = 0.8  # share of the steps over which the rate falls linearly to zero
    num_epochs: float = 3.0
    max_steps: int = -1  # stop here, whatever num_epochs says; negative: no limit
    # supervised and prompt tokens in one optimizer step, over all processes
    tokens_per_step: int = 512
    grad_clip: float = 1.0
    evaluate_every: int = 750  # optimizer steps between validations (and checkpoints)

    def __post_init__(self) -> None:
        require(self.lr > 0, "optim.lr", self.lr, "nothing would be learned", "Use a positive rate")
        require(
            self.num_epochs > 0,
            "optim.num_epochs",
            self.num_epochs,
            "nothing would be learned",
            "Use more than 0",
        )
        require(
            1 <= self.newton_schulz_steps < 100,
            "optim.newton_schulz_steps",
            self.newton_schulz_steps,
            "an update of Muon takes 1 to 99 of them",
            "Use 3 to 5",
        )
        require(
            self.tokens_per_step >= 1,
            "optim.tokens_per_step",
            self.tokens_per_step,
            "a step needs tokens",
            "Use 256",
        )
        require(
            self.evaluate_every >= 1,
            "optim.evaluate_every",
            self.evaluate_every,
            "it counts steps",
            "Use 1 or more",
        )
        require(
            0 <= self.warmup_share + self.decay_share <= 1,
            "optim.decay_share",
            self.decay_share,
            "warm-up and decay together exceed the run",
            "Keep optim.warmup_share + optim.decay_share within 0 and 1",
        )


@dataclass
class RuntimeConfig:
    """The machine."""

    device: Device = Device.auto
    # compile decoding steps; without a C++ compiler they run eagerly, and one line says so
    compile: bool = True
    num_threads: int = 0  # CPU threads; 0: torch's own choice
    # our decoder reads a draft's weights as int8 on a CPU; the exported ones are not changed
    int8_draft: bool = True
    head_chunk: int = 256  # positions whose logits are alive at once in training
    # of matrix products in training; parameters and divergences stay float32
    train_dtype: Dtype = Dtype.auto

    def __post_init__(self) -> None:
        require(
            self.head_chunk >= 1,
            "runtime.head_chunk",
            self.head_chunk,
            "the head needs at least a position",
            "Use 256",
        )


@dataclass
class EvalConfig:
    """Measurement: suites never seen in training, decoded with and without the draft."""

    suites: dict[str, SourceConfig] = field(default_factory=dict)
    prompts_per_category: int = 2
    max_new_tokens: int = 192  # as many as the draft learned from
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    gammas: list[int] = field(default_factory=lambda: [1])
    # most tokens of a draft whose shape follows from measured costs and the draft's calibrated
    # confidence: greedy a tree, sampled a chain; 0: not measured. With 7 a target call reads 8
    # tokens, as many as our CPU kernels take at once
    by_cost: int = 7
    # a draft of gamma tokens ends once the product of their probabilities is below this; 0: never
    stop_below: float = 0.4
    # the draft is also measured beside prompt lookup, which drafts up to so many tokens; 0: not
    lookup_gamma: int = 4
    verification: Verification = Verification.block  # at temperature > 0
    repeats: int = 1  # timed passes over each prompt and setting
    confidence: float = 0.9

    def __post_init__(self) -> None:
        for gamma in self.gammas:
            require(
                gamma >= 1,
                "eval.gammas",
                list(self.gammas),
                "a draft of no tokens drafts nothing",
                "Use 1 or more",
            )
        require(
            0 <= self.stop_below < 1,
            "eval.stop_below",
            self.stop_below,
            "it is compared with a probability",
            "Use 0 (never stop) up to less than 1",
        )
        for key, what in (("lookup_gamma", "prompt lookup"), ("by_cost", "such drafts")):
            value = getattr(self, key)
            # a call of more tokens would need code of its own
            require(
                0 <= value <= 15,
                f"eval.{key}",
                value,
                "it counts tokens, of which one call verifies 15 at most",
                f"Use 0 to leave {what} out, or 1 to 15",
            )
        require(
            len(self.gammas) > 0,
            "eval.gammas",
            [],
            "nothing would be measured",
            "Use for example [1,2,4]",
        )
        require(
            len(self.temperatures) > 0 and all(0 <= t < 100 for t in self.temperatures),
            "eval.temperatures",
            list(self.temperatures),
            "a temperature is a finite number of 0 (greedy) or more, and at least one is needed",
            "Use for example [0.0,1.0]",
        )
        for key in ("prompts_per_category", "max_new_tokens", "repeats"):
            value = getattr(self, key)
            require(value >= 1, f"eval.{key}", value, "it must be positive", "Use 1 or more")
        require(
            0 < self.confidence < 1,
            "eval.confidence",
            self.confidence,
            "it is a probability",
            "Use for example 0.9",
        )


@dataclass
class TrackerConfig:
    """Dashboards. The console and events.jsonl always get every event."""

    kind: TrackerKind = TrackerKind.wandb
    project: str = "draftsmith"
    entity: str = ""
    tags: list[str] = field(default_factory=list)


@dataclass
class HubConfig:
    """Publishing. Nothing leaves this machine unless `push` is true and `repo_id` is given."""

    repo_id: str = ""
    push: bool = False
    private: bool = True
    revision: str = "main"
    license: str = "apache-2.0"
    base_model: str = ""  # Hub id of the target; empty: target.path where that is one
