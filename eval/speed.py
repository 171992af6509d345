"""Time of decoding with and without a draft: step costs, paired runs, bootstrap intervals."""

# G draft length (gamma)

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from conf.contracts import Cost, Interval
from models.decoding.costs import step_seconds
from models.decoding.counts import Counts
from models.decoding.draft_model import ModelDrafter
from models.decoding.engine import Engine, measure_seconds, synchronise
from models.decoding.rows import Round
from models.decoding.sampling import Sampling
from models.decoding.speculative import Decoder

RESAMPLES = 2000


@dataclass(frozen=True)
class Decoded:
    """One decoded prompt: its output, counts, and the wall time after which each number of tokens
    was there.
    """

    tokens: list[int]
    rounds: list[Round]
    counts: Counts
    seconds: list[float]  # after each round, from the start of the prefill

    def seconds_to(self, num_tokens: int) -> float:
        """Wall time until `num_tokens` tokens were committed; a share of the round in which the
        last one came.
        """
        done, before = 0, 0.0
        for step, after in zip(self.rounds, self.seconds, strict=True):
            if done + len(step.tokens) >= num_tokens:
                # the first round's time contains the prefill, which is not shared out
                share = (num_tokens - done) / len(step.tokens) if done else 1.0
                return before + share * (after - before)
            done, before = done + len(step.tokens), after
        raise ValueError(f"only {done} tokens were decoded, not {num_tokens}")


def timed(
    decoder: Decoder,
    prompt: Sequence[int],
    *,
    gamma: int,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
) -> Decoded:
    """Decode one prompt, the device synchronised after every round, prefill included."""
    rng = torch.Generator().manual_seed(seed)
    counts = Counts()
    tokens: list[int] = []
    rounds: list[Round] = []
    seconds: list[float] = []
    device = decoder.target.device
    synchronise(device)
    start = time.perf_counter()
    for step in decoder.stream(
        prompt,
        gamma=gamma,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        rng=rng,
        counts=counts,
    ):
        synchronise(device)
        seconds.append(time.perf_counter() - start)
        rounds.append(step)
        tokens += step.tokens
    return Decoded(tokens, rounds, counts, seconds)


@dataclass(frozen=True)
class Pair:
    """The same prompt decoded autoregressively and speculatively."""

    autoregressive: Decoded
    speculative: Decoded

    def seconds(self) -> tuple[float, float, int]:
        """Wall times to the same number of tokens, that of the shorter output, and that number.

        Greedy outputs are as long as each other but for near ties; sampled ones are different draws
        of one law and may end at different places.
        """
        num_tokens = min(len(self.autoregressive.tokens), len(self.speculative.tokens))
        return (
            self.autoregressive.seconds_to(num_tokens),
            self.speculative.seconds_to(num_tokens),
            num_tokens,
        )


def speedup(pairs: Sequence[Pair], confidence: float) -> Interval:
    """Total autoregressive over total speculative time; interval by resampling prompts (seeded)."""
    return ratio_interval([pair.seconds()[:2] for pair in pairs], confidence)


def ratio_interval(pairs: Sequence[tuple[float, float]], confidence: float) -> Interval:
    """Sum of the first over sum of the second numbers; bootstrap over pairs (seeded)."""
    both = torch.tensor(pairs, dtype=torch.float64)
    pick = torch.randint(
        len(both), (RESAMPLES, len(both)), generator=torch.Generator().manual_seed(0)
    )
    sums = both[pick].sum(1)
    edges = torch.tensor([(1 - confidence) / 2, 0.5, (1 + confidence) / 2], dtype=torch.float64)
    low, median, high = (sums[:, 0] / sums[:, 1]).quantile(edges).tolist()
    return Interval(median=median, low=low, high=high)


def predicted_speedup(counts: Counts, cost: Cost) -> float:
    """Tokens per target step that the rounds cost by measured step times, no overhead anywhere.

    Rounds of one draft length give tau / (gamma c + v(gamma + 1)) (Leviathan et al. 2211.17192,
    theorem 3.8, with v measured instead of 1).
    """
    steps = counts.num_draft_steps * cost.c + sum(
        num_calls * cost.v[str(width)]
        for width, num_calls in enumerate(counts.calls_by_width, 1)
        if num_calls
    )
    return counts.num_tokens / steps


def measure_cost(
    target: Engine,
    drafter: ModelDrafter,
    longest: int,
    sampling: Sampling,
    repeats: int = 15,
) -> Cost:
    """Step times of target and draft, see `step_seconds`; the target's over 1 to `longest` + 1
    tokens.
    """
    calls, (draft,) = step_seconds(target, [drafter], longest, sampling, repeats)
    step = calls[0]
    return Cost(
        draft_step_ms=1e3 * draft,
        target_step_ms=1e3 * step,
        c=draft / step,
        v={str(width): call / step for width, call in enumerate(calls, 1)},
        compile_seconds=0.0,
        target_bytes=read_bytes(target),
        draft_bytes=read_bytes(drafter.engine),
        memory_gb_per_s=memory_bandwidth(target.device),
    )


def read_bytes(engine: Engine) -> int:
    """Bytes of weights that one step reads: all but the rows of an input embedding that it does not
    look up.
    """
    model = engine.model
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    weights = [*model.parameters(), *model.buffers()]  # int8 weights are buffers
    total = sum(weight.numel() * weight.element_size() for weight in weights)
    return total if tied else total - embedding.numel() * embedding.element_size()


def memory_bandwidth(device: torch.device, mib: int = 256) -> float:
    """Measured read rate in GB/s: the best of several sums over a buffer larger than the caches."""
    buffer = torch.ones(mib * 2**18, device=device)
    best = measure_seconds(lambda: buffer.sum(), device=device, warmup=1, repeats=5)[0]
    return buffer.numel() * 4 / best / 1e9
