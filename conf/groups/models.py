"""The target, its recorded answers, and the draft."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from conf.choices import (
    DraftInit,
    DraftVocab,
    Dtype,
    Engine,
    LayerRule,
)
from conf.errors import require
from conf.server import ServerConfig
from conf.vllm import VllmConfig


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

    engine: Engine = Engine.builtin
    server: ServerConfig = field(default_factory=ServerConfig)  # of engine=server
    vllm: VllmConfig = field(default_factory=VllmConfig)  # of engine=vllm
    # cycled over the answers
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.7, 1.0])
    # of validation answers; empty: the same. To compare mixes they have to stay what they are
    validation_temperatures: list[float] = field(default_factory=list)
    answers_per_prompt: int = 1
    max_new_tokens: int = 192
    max_prompt_tokens: int = 224  # of a later turn, of the conversation until there
    batch_size: int = 128  # rows decoded together (engine=builtin)
    # recorded of a position: its likeliest ids until they hold this probability, at most so many
    mass: float = 0.95
    top_k: int = 32
    # also record the laws of a training prompt's own tokens, which reading it computes: more to
    # learn from for little (not engine=server)
    record_prompts: bool = True
    # at most so many training positions keep their final hidden state, for the warm start; of what
    # other engines than our own answer, the distil stage computes it
    warm_start_tokens: int = 32768
    rows_per_shard: int = 256
    max_gib: float = 8.0  # refuse a recording larger than this

    def __post_init__(self) -> None:
        for key in ("temperatures", "validation_temperatures"):
            values = list(getattr(self, key))
            require(
                bool(values or self.temperatures) and all(0 <= t < 100 for t in values),
                f"generate.{key}",
                values,
                "temperatures are finite numbers of 0 (greedy) or more, and one at least is needed",
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

    def temperatures_of(self, split: str) -> list[float]:
        """Cycled over the answers of a split."""
        own = self.validation_temperatures if split == "validation" else []
        return own or self.temperatures

    @property
    def all_temperatures(self) -> list[float]:
        """Of every answer, in order."""
        return sorted({*self.temperatures, *self.validation_temperatures})

    @property
    def sees_inside(self) -> bool:
        """Whether our own engine answers, so that positions have hidden states."""
        return self.engine is Engine.builtin

    @property
    def reads_prompts(self) -> bool:
        """Whether training prompts' own tokens have laws."""
        return self.record_prompts and self.engine is not Engine.server

    @property
    def has_laws(self) -> bool:
        """Whether answers have."""
        return self.engine is not Engine.server or self.server.laws

    def what_determines(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Of this group's JSON, what a recording depends on: not which servers there are, nor what
        vLLM may use.
        """
        shared = {key: tree[key] for key in tree if key not in ("engine", "server", "vllm")}
        if not self.validation_temperatures:
            del shared["validation_temperatures"]
        if self.engine is Engine.builtin:
            return shared
        if self.engine is Engine.vllm:
            return {**shared, "engine": tree["engine"]}
        server = {key: tree["server"][key] for key in ("model", "api", "laws")}
        return {**shared, "engine": tree["engine"], "server": server}


@dataclass
class DraftConfig:
    """The small model."""

    init: DraftInit = DraftInit.layers
    layer_rule: LayerRule = LayerRule.first
    # 0: chosen before training, of 1 to most_layers the one of the largest predicted speedup, by
    # measured step costs and the acceptance after the warm start (train/depth.py). What depth gains
    # by training is not known then: a draft trained for long pays with more layers than are chosen
    num_layers: int = 4
    most_layers: int = 6  # that num_layers=0 considers, fewer than the target's
    # explicit target layers; overrides layer_rule and num_layers
    layers: list[int] = field(default_factory=list)
    warm_start: bool = True  # a head that makes up for the missing layers (init=layers)
    ridge: float = 1e-3  # regularisation of the warm start, relative to the mean diagonal
    # steps of 512 positions that then fit its map to the recorded laws, the layers left alone, for
    # a draft that is trained little or not at all: at optim.lr=1e-3 training undoes the gain
    fit_steps: int = 0
    pretrained: str = ""  # Hub id or folder (init=pretrained)
    vocab: DraftVocab = DraftVocab.same  # whose tokens a pretrained draft reads
    train_embeddings: bool = False
    # rank of adapters (LoRA) that are trained instead of the layers' own weights and merged on
    # export; 0: the layers themselves are trained
    lora_rank: int = 0
    # ids the draft proposes in our decoder, by frequency in the target's answers; 0: all. Fewer
    # cost less and can be accepted more often, as rare ids get more of a small draft's mass than of
    # the target's: one of the default recipe had an expected acceptance of 0.385 with 4096, 0.383
    # with 8192 and 0.380 with all 49152
    hot_vocab: int = 4096

    def __post_init__(self) -> None:
        require(
            self.lora_rank >= 0,
            "draft.lora_rank",
            self.lora_rank,
            "a rank is a number of rows",
            "Use for example 16, or 0 to train the layers themselves",
        )
        require(
            not (self.lora_rank and self.train_embeddings),
            "draft.train_embeddings",
            self.train_embeddings,
            "with draft.lora_rank nothing but adapters and the map is trained",
            "Set one of the two",
        )
        require(
            self.num_layers >= 0 or bool(self.layers),
            "draft.num_layers",
            self.num_layers,
            "a draft needs a layer",
            "Use 1 or more, or 0 to have the number chosen",
        )
        require(
            self.most_layers >= 1,
            "draft.most_layers",
            self.most_layers,
            "there would be no draft to choose",
            "Use 1 or more",
        )
        if self.chooses_depth:
            self._require_comparable()
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
            self.fit_steps >= 0,
            "draft.fit_steps",
            self.fit_steps,
            "it counts steps",
            "Use 0 for the ridge regression alone",
        )
        require(
            self.hot_vocab >= 0,
            "draft.hot_vocab",
            self.hot_vocab,
            "it counts vocabulary ids",
            "Use 0 for the whole vocabulary",
        )

    @property
    def chooses_depth(self) -> bool:
        """Whether the number of layers is to be chosen before training."""
        return self.num_layers == 0 and not self.layers

    def _require_comparable(self) -> None:
        """Raise ConfigError unless drafts of several depths can be compared."""
        require(
            self.init is DraftInit.layers,
            "draft.num_layers",
            self.num_layers,
            "a pretrained draft brings its own layers, so there is no number to choose",
            "Leave it out, or use draft.init=layers",
        )
        require(
            self.layer_rule is LayerRule.first,
            "draft.layer_rule",
            self.layer_rule,
            "draft.num_layers=0 compares drafts that share their first layers",
            "Use first, or say how many layers",
        )
        require(
            self.warm_start,
            "draft.warm_start",
            self.warm_start,
            "draft.num_layers=0 compares drafts by their acceptance after the warm start",
            "Use true, or say how many layers",
        )
