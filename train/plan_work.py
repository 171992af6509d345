"""What target and draft do in a run, in tokens, seconds, disk and memory: by the settings and a
device's rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from conf.choices import DraftInit, Dtype, Optimizer, Stage, Supervision
from conf.schema import Config
from data.batches import plan_batches
from data.shards import Row
from models.anatomy import Anatomy
from models.decoding.engine import PREFILL_TOKENS
from models.draft import choose_layers
from models.jobs import USUAL_IDS, USUAL_LENGTH, Job
from train.estimate import COPIES_OF_LOGITS, GIB
from train.loop import NUM_COLD
from train.plan_stages import Place, StagePlan
from train.rates import Draft, Rates, Training

# Seconds of a stage beside its calls, with and without compiling, as measured in the default run,
# and bytes loaded in one
START = {
    Stage.generate: (60.0, 3.0),
    Stage.distill: (30.0, 5.0),
    Stage.evaluate: (30.0, 5.0),
}
LOADED_BYTES = 1e9
FORWARD_SHARE = 0.95  # of a recording's time, that is calls of the model
# numbers that autograd keeps of a position, for each of the hidden dimension; the rest are as many
# as the layer has weights for each
KEPT = 13.5
# of an exported draft beside its weights: its tokenizer's for each id, and its calibration
ID_BYTES, CALIBRATION_BYTES = 70, 40_000
REPORT_BYTES = 950_000
MEASURING_BYTES = 0.3 * GIB  # a buffer whose reading is timed, and the plots


@dataclass
class Work:
    """What target and draft do, in tokens."""

    config: Config
    place: Place
    target: Anatomy
    jobs: Sequence[Job]
    longest_prompt: int

    def __post_init__(self) -> None:
        settings = self.config.generate
        self.num_prompt = sum(len(job.prompt) for job in self.jobs)
        self.mean_prompt = self.num_prompt / len(self.jobs)
        self.length = USUAL_LENGTH * settings.max_new_tokens
        self.num_rows = min(settings.batch_size, len(self.jobs))
        # of the rows answered together, prompts of like lengths, one is about to end
        self.longest = _rounded(self.mean_prompt + settings.max_new_tokens)

    def generate(self, rates: Rates, disk: float, most_disk: float) -> StagePlan:
        """The target's answers and their recording."""
        settings, target = self.config.generate, self.target
        num_tokens = len(self.jobs) * self.length
        context = round(self.mean_prompt + self.length / 2)
        step = rates.step(self.num_rows, context, self.longest)
        calls = num_tokens / self.num_rows * step
        calls += self.num_prompt * rates.reading(settings.record_prompts)
        longest = self.longest_prompt + settings.max_new_tokens
        cache = float(self.num_rows * _rounded(longest) * target.cache_per_token)
        logits = max(self.num_rows, PREFILL_TOKENS if settings.record_prompts else 1)
        return StagePlan(
            stage=Stage.generate,
            tokens=self.num_prompt + num_tokens,
            most_tokens=self.num_prompt + len(self.jobs) * settings.max_new_tokens,
            seconds=self._start(Stage.generate)
            + calls / FORWARD_SHARE / self.config.plan.num_devices,
            disk=disk,
            most_disk=most_disk,
            memory={
                "program": self.place.program,
                "weights": float(target.weights * self.place.itemsize),
                "cache": cache * self.place.itemsize,
                "logits": 4.0 * COPIES_OF_LOGITS * logits * target.vocab_size,
            },
        )

    def _start(self, stage: Stage) -> float:
        compiled, plain = START[stage]
        loading = self.target.weights * 2 / LOADED_BYTES
        return loading + (compiled if self.config.runtime.compile else plain)

    def distill_and_evaluate(self, rates: Rates) -> list[StagePlan]:
        """Training the draft, and measuring it."""
        draft = self.draft()
        training = rates.training(draft, self._rows())
        return [self._distill(rates, draft, training), self._evaluate(rates, draft, training)]

    def draft(self) -> Draft:
        """What is trained, by the configuration. A pretrained draft is taken to be as large as one
        of draft.num_layers layers, and adapters to take as much as what they adapt.
        """
        settings, target = self.config.draft, self.target
        layers = (
            choose_layers(settings, len(target.layers))
            if settings.init is DraftInit.layers
            else list(range(min(settings.num_layers, len(target.layers))))
        )
        anatomy = target.of_layers(layers)
        trained = sum(anatomy.layers) + anatomy.other + target.hidden_size**2
        trained += target.embedding if settings.train_embeddings else 0
        columns = target.vocab_size
        if 0 < settings.hot_vocab < columns:
            columns = min(columns, settings.hot_vocab + NUM_COLD)
        return Draft(anatomy, trained, columns, tuple(layers))

    def which_draft(self) -> list[str]:
        """What to say of a draft whose depth is not yet known."""
        if not self.config.draft.chooses_depth:
            return []
        return [
            f"draft.num_layers=0: a draft of {len(self.draft().layers)} layers is reckoned, the"
            " most that are considered"
        ]

    def _rows(self) -> list[Row]:
        """A few answers of the usual size, with laws of no meaning."""
        settings = self.config.generate
        length, num_prompt = max(1, round(self.length)), max(1, round(self.mean_prompt))
        num_laws = length + (num_prompt - 1 if settings.record_prompts else 0)
        num_ids = max(1, round(USUAL_IDS * settings.top_k))
        rng = torch.Generator().manual_seed(0)
        ids_K = torch.randperm(self.target.vocab_size, generator=rng)[:num_ids].int()
        log_p_K = torch.full((len(ids_K),), 0.9 / len(ids_K)).log()
        count = max(16, 10 * self.config.optim.tokens_per_step // (num_prompt + length))
        return [
            Row(
                index=index,
                category="",
                temperature=1.0,
                prompt=torch.full((num_prompt,), 5),
                generated=torch.full((length,), 5),
                top_ids=ids_K.repeat(num_laws, 1),
                top_log_p=log_p_K.repeat(num_laws, 1),
            )
            for index in range(min(count, 256))
        ]

    def _distill(self, rates: Rates, draft: Draft, training: Training) -> StagePlan:
        optim, objective = self.config.optim, self.config.objective
        lengths = [round(len(j.prompt) + self.length) - 1 for j in self.jobs if j.split == "train"]
        steps = plan_batches(
            lengths,
            tokens_per_step=optim.tokens_per_step,
            seed=self.config.seed,
            num_epochs=optim.num_epochs,
        )
        taken = [sum(lengths[i] for share in step for i in share) for step in steps]
        if optim.max_steps >= 0:
            taken = taken[: optim.max_steps]
        num_validations = 1 + -(-len(taken) // optim.evaluate_every)
        online = objective.source in (Supervision.online, Supervision.on_policy)
        beside = rates.reading(True) if online else 0.0
        validated = self._num_validated * (self.mean_prompt + self.length)
        seconds = (
            sum(taken) * (training.per_position + beside) / self.config.plan.num_devices
            + len(taken) * training.per_update
            + num_validations * validated * training.per_validated
        )
        itemsize = 2 if self.config.target.dtype is Dtype.auto else self.place.itemsize
        exported = float(itemsize * (draft.anatomy.weights + _untied(draft.anatomy)))
        exported += ID_BYTES * self.target.vocab_size
        moments = 1 if optim.name is Optimizer.muon else 2
        disk = 2 * exported + CALIBRATION_BYTES + 4.0 * draft.trained * (1 + 1 + moments)
        return StagePlan(
            stage=Stage.distill,
            tokens=float(sum(taken)),
            most_tokens=sum(taken) * self._longest / (self.mean_prompt + self.length),
            seconds=self._start(Stage.distill) + seconds,
            disk=disk,
            most_disk=disk,
            memory=self._memory_of_training(draft, training, online),
            loading=self._loading(draft),
        )

    @property
    def _num_validated(self) -> int:
        return sum(job.split == "validation" for job in self.jobs)

    @property
    def _longest(self) -> float:
        """Tokens of a prompt and of the longest answer to it."""
        return self.mean_prompt + self.config.generate.max_new_tokens

    def _loading(self, draft: Draft) -> float:
        """Held while layers are copied, by the host: the target and, in float32, the draft."""
        if not self.place.on_cpu or self.config.draft.init is not DraftInit.layers:
            return 0.0
        held = self.place.program + 4.0 * draft.anatomy.weights
        if not self.config.draft.chooses_depth:
            return held + 2.0 * self.target.weights
        # beside the deepest draft, the target and a draft of each depth decode
        deciding = [
            self.target.of_layers(draft.layers[:depth]) for depth in range(1, 1 + len(draft.layers))
        ]
        weights = self.target.weights + sum(each.weights for each in deciding)
        return held + float(self.place.itemsize * weights)

    def _memory_of_training(
        self, draft: Draft, training: Training, online: bool
    ) -> dict[str, float]:
        config, anatomy = self.config, draft.anatomy
        parts: dict[str, float] = {"program": self.place.program}
        if online:
            parts["target"] = float(self.target.weights * self.place.itemsize)
        if self.place.on_cpu:  # as training keeps them: ids of four bytes, probabilities too
            laws = len(self.jobs) * (self.length + self.mean_prompt)
            parts["lessons"] = laws * 8 * USUAL_IDS * config.generate.top_k
        measured = training.memory
        if measured is not None:
            names = ("weights", "gradients", "moments", "activations", "validation", "logits")
            return parts | {name: float(getattr(measured, name)) for name in names}
        kept = sum(anatomy.used) / anatomy.hidden_size + KEPT * anatomy.hidden_size * len(
            anatomy.layers
        )
        moments = 4 if config.optim.name is Optimizer.muon else 8
        return parts | {
            "weights": 4.0 * draft.trained + 2.0 * (anatomy.embedding + _untied(anatomy)),
            "gradients": 4.0 * draft.trained,
            "moments": float(moments * draft.trained),
            "activations": 4.0 * kept * config.optim.tokens_per_step,
            "logits": 4.0 * COPIES_OF_LOGITS * config.runtime.head_chunk * draft.head_columns,
        }

    def _evaluate(self, rates: Rates, draft: Draft, training: Training) -> StagePlan:
        settings = self.config.eval
        categories = {source.category for source in settings.suites.values()}
        ways = 1 + len(settings.gammas) + (settings.by_cost > 0) + (settings.lookup_gamma > 0)
        outputs = settings.prompts_per_category * len(categories) * ways
        outputs *= len(settings.temperatures) * settings.repeats
        length = USUAL_LENGTH * settings.max_new_tokens
        # every way as slow as no draft: what it gains is what is to be found out
        decoding = outputs * length * rates.step_alone(round(self.mean_prompt + length / 2))
        judged = self._num_validated * (self.mean_prompt + self.length)
        judging = judged * (rates.reading(True) + 2 * training.per_validated)
        # on a CPU the decoder's kernels keep weights as bfloat16
        target = self.target.weights * 2.0
        drafts = 2 * 2.0 * (draft.anatomy.weights + _untied(draft.anatomy))
        most = outputs * settings.max_new_tokens + self._num_validated * self._longest
        return StagePlan(
            stage=Stage.evaluate,
            tokens=outputs * length + judged,
            most_tokens=most,
            seconds=self._start(Stage.evaluate) + decoding + judging,
            disk=float(REPORT_BYTES),
            most_disk=float(REPORT_BYTES),
            memory={
                "program": self.place.program,
                "weights": target,
                "drafts": drafts,
                "logits": 4.0 * COPIES_OF_LOGITS * self._longest * self.target.vocab_size,
                "measuring": MEASURING_BYTES,
            },
        )


def _untied(anatomy: Anatomy) -> int:
    """Weights of a head that an exported draft has beside its embedding."""
    return anatomy.head if anatomy.is_tied else 0


def _rounded(num_tokens: float) -> int:
    return -(-round(num_tokens) // 64) * 64
