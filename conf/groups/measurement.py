"""The machine, and what is measured on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from conf.choices import (
    Device,
    Dtype,
    Verification,
)
from conf.errors import require
from conf.groups.data import SourceConfig


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
    # in training on a GPU, layers' norms, rotations and gates by Liger's kernels, where it is
    # installed; head and loss are ours in any case
    liger: bool = False

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
