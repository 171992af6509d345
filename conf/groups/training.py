"""What a draft learns and how."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from conf.choices import (
    Divergence,
    Optimizer,
    Supervision,
)
from conf.errors import require


@dataclass
class ObjectiveConfig:
    """What is minimised at each supervised position, and who teaches it; a second divergence and
    another teacher can take over as finishing phases.
    """

    source: Supervision = Supervision.recorded  # where the target's distributions come from
    divergence: Divergence = Divergence.forward_kl
    # weights, instead of one `divergence`: +objective.mixture={forward_kl:0.7,cross_entropy:0.3}
    mixture: dict[str, float] = field(default_factory=dict)
    beta: float = 0.5  # jsd: weight of the target in the mixture
    eta: float = 3.0  # lk_lambda: how fast weight moves from KL to TV as acceptance grows
    finish: Divergence | None = None  # divergence of the last phase
    finish_share: float = 0.0  # share of the steps that the last phase takes
    # who teaches in the last steps, from where the target, if it takes one, is in memory
    finish_source: Supervision | None = None
    finish_source_share: float = 0.0  # share of the steps, whatever finish_share says
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

    def taught(self) -> set[tuple[Supervision, Divergence]]:
        """Every teacher with every divergence that is minimised while it teaches."""
        first, last = set(self.weights()), set(self.weights())
        if self.finish is not None:
            if self.finish_share > self.finish_source_share:
                first.add(self.finish)
            last = {self.finish} | (last if self.finish_share < self.finish_source_share else set())
        pairs = {(self.source, each) for each in first}
        if self.finish_source is not None:
            pairs |= {(self.finish_source, each) for each in last}
        return pairs

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
            0 <= self.finish_source_share < 1,
            "objective.finish_source_share",
            self.finish_source_share,
            "it is a share of the steps, which begin with objective.source",
            "Use 0 up to less than 1",
        )
        require(
            (self.finish_source is None) == (self.finish_source_share == 0),
            "objective.finish_source_share",
            self.finish_source_share,
            f"the last steps are taught by objective.finish_source={self.finish_source}",
            "Set both, for example on_policy and 0.1, or neither",
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
    num_epochs: float = 2.75
    max_steps: int = -1  # stop here, whatever num_epochs says; negative: no limit
    # as many steps as a rehearsal says fit into so many seconds, without validations; 0: no limit
    max_seconds: float = 0.0
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
            0 <= self.max_seconds < math.inf,
            "optim.max_seconds",
            self.max_seconds,
            "it is a length of time",
            "Use 0 for no limit, or for example 60",
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
