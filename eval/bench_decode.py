"""Benchmarks of the decoder: the pair of the last run, beside what transformers does with it.

Both sides take turns in one process, on the same prompts and numbers of tokens, after a warm-up;
intervals resample prompts.
"""

# B rows, T prompt tokens

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from conf.bench import Row
from conf.contracts import Lessons, Report
from conf.groups import EvalConfig, RuntimeConfig
from conf.schema import Config
from data.shards import read_split
from eval import bench_flashspec
from eval.bench_batch import (
    NUM_ROWS,
    batch_decoder,
    block_and_chain,
    break_even,
    decode_batch,
)
from eval.chat import target_of
from eval.pair import ModelPair
from eval.plain import plain_generate
from eval.speed import ratio_interval
from eval.ties import tie
from models.decoding.autoregressive import Generator, Request
from models.decoding.costs import make_cheap
from models.decoding.draft_model import ModelDrafter
from models.decoding.engine import Engine, measure_seconds
from models.decoding.routing import cache_argument
from models.decoding.sampling import Sampling
from models.decoding.speculative import Decoder
from models.draft import from_layers
from models.load import load_folder, load_model

log = logging.getLogger(__name__)

COMMAND = "make bench"
CONFIDENCE = 0.9
NUM_PROMPTS = 6
NUM_TOKENS = 48
BATCH_SIZE = 32
CONTEXT = 128  # tokens in the cache while a step is timed
BLOCK_GAMMA = 4
GREEDY, AT_ONE = Sampling(0.0), Sampling(1.0)


@dataclass
class Bench:
    """The pair in our decoder, and the target once more for transformers' own loops."""

    report: Report
    pair: ModelPair
    plain: PreTrainedModel
    folder: Path
    prompts: list[list[int]]

    @classmethod
    def load(cls, folder: Path) -> Bench:
        """The pair of a finished run; raises ContractError when it has no report."""
        report = Report.read(folder / "report")
        lessons = Lessons.read(folder / "lessons")
        rows = sorted(
            read_split(folder / "lessons", lessons.splits["validation"]), key=lambda row: row.index
        )
        # all drafted tokens of a fixed number of them: what transformers is told to do, too
        config = Config(
            target=target_of(folder),
            eval=EvalConfig(stop_below=0.0),
            runtime=RuntimeConfig(compile=bool(report.machine.get("compiled", True))),
        )
        capacity = max(len(row.prompt) for row in rows) + 2 * NUM_TOKENS + 2 * BLOCK_GAMMA
        pair = ModelPair.load(config, folder / "draft" / "model", -(-capacity // 64) * 64)
        plain = load_model(pair.target, config.target, pair.model.device)
        prompts = [row.prompt.tolist() for row in rows]
        return cls(report, pair, plain, folder, prompts)

    def ours(self, prompt: Sequence[int], gamma: int, sampling: Sampling) -> int:
        """Decode; the number of tokens."""
        tokens, _ = self.pair.decoder.decode(
            prompt,
            gamma=gamma,
            max_new_tokens=NUM_TOKENS,
            sampling=sampling,
            rng=torch.Generator().manual_seed(len(prompt)),
        )
        return len(tokens)

    def theirs(self, prompts: Sequence[Sequence[int]], *, sample: bool, **settings: object) -> int:
        """The same by transformers' generate; the number of tokens that count."""
        return plain_generate(
            self.plain,
            self.pair.target,
            prompts,
            max_new_tokens=NUM_TOKENS,
            sample=sample,
            **settings,
        )


def decode(folder: Path, _outputs: Path) -> Iterator[Row]:
    """Every figure of the decoder."""
    bench = Bench.load(folder)
    best = bench.report.best
    yield Row(
        name="decode.efficiency",
        value=best.efficiency,
        low=best.speedup.low / best.predicted_speedup,
        high=best.speedup.high / best.predicted_speedup,
        unit="ratio",
        to_reach=">= 0.95",
        command=COMMAND,
    )
    yield _against_assisted(bench)
    if bench_flashspec.is_installed():
        yield _against_flashspec(bench)
    else:
        log.warning("bench: %s", bench_flashspec.MISSING)
    yield _against_generate(bench)
    yield _batch_against_generate(bench)
    yield _draft_step(bench)
    lengths = block_and_chain(bench.pair, bench.prompts, BLOCK_GAMMA, 2 * NUM_TOKENS)
    yield _row("decode.block_vs_chain", lengths, ">= 1.0")
    yield from _batch(bench)
    fixed = replace(bench.pair.decoder, fixed_width=1 + BLOCK_GAMMA)
    yield from _identical(bench, "fixed_width", fixed)
    yield from _identical(bench, "free_width", bench.pair.decoder)


def _rates(
    items: Sequence[Any], ours: Callable[..., int], theirs: Callable[..., int]
) -> list[tuple[float, float]]:
    """Seconds per token of theirs and ours for each item, in turns.

    Ours sees every item once before, for shapes that were not compiled yet must not be timed;
    theirs, which is not compiled, sees one.
    """
    for item in items:
        ours(item)
    theirs(items[0])
    found = []
    for place, item in enumerate(items):
        seconds = {}
        for run in (theirs, ours) if place % 2 else (ours, theirs):
            start = time.perf_counter()
            num_tokens = run(item)
            seconds[run] = (time.perf_counter() - start) / num_tokens
        found.append((seconds[theirs], seconds[ours]))
    return found


def _row(name: str, times: Sequence[tuple[float, float]], to_reach: str) -> Row:
    ratio = ratio_interval(times, CONFIDENCE)
    return Row(
        name=name,
        value=ratio.median,
        low=ratio.low,
        high=ratio.high,
        unit="x",
        to_reach=to_reach,
        command=COMMAND,
    )


def _against_assisted(bench: Bench) -> Row:
    """Greedy tokens per second over those of generate(assistant_model=...), one draft length."""
    gamma = max(1, min(bench.report.best.gamma, BLOCK_GAMMA))
    assistant = load_folder(
        bench.folder / "draft" / "model", dtype=bench.plain.dtype, device=bench.plain.device
    )
    assistant.generation_config.num_assistant_tokens = gamma
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    times = _rates(
        bench.prompts[:NUM_PROMPTS],
        lambda prompt: bench.ours(prompt, gamma, GREEDY),
        lambda prompt: bench.theirs([prompt], sample=False, assistant_model=assistant),
    )
    return _row("decode.vs_hf_assisted", times, ">= 1.5")


def _against_flashspec(bench: Bench) -> Row:
    """Greedy tokens per second over those of flashspec, each with prompt lookup beside the draft
    and drafts as it shapes them by default.
    """
    draft = load_folder(
        bench.folder / "draft" / "model", dtype=bench.plain.dtype, device=bench.plain.device
    )
    theirs = bench_flashspec.greedy_decoder(
        bench.plain, draft, bench.folder / "draft" / "model", bench.pair.target.stop_ids
    )
    cost = bench.report.cost
    v = {int(width): value for width, value in cost.v.items()}
    most = EvalConfig().by_cost
    alone = bench.pair.by_cost(cost.c, v, most) or bench.pair.decoder
    decoder = bench.pair.beside_lookup(alone, most, BLOCK_GAMMA)
    ours = replace(bench, pair=replace(bench.pair, decoder=decoder))
    times = _rates(
        bench.prompts[:NUM_PROMPTS],
        lambda prompt: ours.ours(prompt, most, GREEDY),
        lambda prompt: theirs(prompt, NUM_TOKENS),
    )
    return _row("decode.vs_flashspec", times, ">= 1.2")


def _batch(bench: Bench) -> Iterator[Row]:
    """Eight prompts at once, greedy: one drafted token over none, and from which acceptance on that
    gains.
    """
    decoder = batch_decoder(bench.pair)
    starts = range(0, min(4 * NUM_ROWS, len(bench.prompts) - NUM_ROWS + 1), NUM_ROWS)
    times = _rates(
        [bench.prompts[start : start + NUM_ROWS] for start in starts],
        lambda batch: decode_batch(decoder, batch, 1, NUM_TOKENS),
        lambda batch: decode_batch(decoder, batch, 0, NUM_TOKENS),
    )
    yield _row("decode.batch8", times, "")
    yield Row(
        name="decode.batch8.break_even",
        value=break_even(decoder),
        unit="acceptance",
        command=COMMAND,
    )


def _against_generate(bench: Bench) -> Row:
    """Sampled tokens per second without a draft over those of generate, one prompt at a time."""
    times = _rates(
        bench.prompts[:NUM_PROMPTS],
        lambda prompt: bench.ours(prompt, 0, AT_ONE),
        lambda prompt: bench.theirs([prompt], sample=True),
    )
    return _row("decode.autoregressive_vs_hf.b1", times, ">= 1.2")


def _batch_against_generate(bench: Bench) -> Row:
    """The same for a batch, where generate goes on until the longest row ends."""
    engine = Engine(
        bench.pair.model,
        num_rows=BATCH_SIZE,
        capacity=bench.pair.decoder.target.capacity,
        compiled=bench.pair.decoder.target.compiled,
    )
    engine.share(bench.prompts)  # as generate does
    generator = Generator(
        engine, stop_ids=bench.pair.target.stop_ids, max_new_tokens=NUM_TOKENS, top_k=8
    )
    size = min(BATCH_SIZE, len(bench.prompts))
    batches = [bench.prompts[i : i + size] for i in range(0, len(bench.prompts) - size + 1, size)]

    def ours(batch: Sequence[Sequence[int]]) -> int:
        rng = torch.Generator().manual_seed(0)
        requests = [
            Request(i, list(prompt), 1.0, torch.rand(NUM_TOKENS, generator=rng))
            for i, prompt in enumerate(batch)
        ]
        return sum(len(answer.tokens) for answer in generator.answer(requests))

    times = _rates(batches, ours, lambda batch: bench.theirs(batch, sample=True))
    generator.close()
    return _row(f"decode.autoregressive_vs_hf.b{size}", times, ">= 2.0")


def _draft_step(bench: Bench) -> Row:
    """A step of a two-layer draft in our decoder over the plain transformers call with its cache,
    both after a step of the target, as in decoding.
    """
    small, cheap = (from_layers(bench.plain, [0, 1]) for _ in range(2))
    for model in (small, cheap):
        nn.Module.to(model, bench.plain.device, bench.plain.dtype)
    hot_ids = bench.pair.hot_ids_H
    make_cheap(cheap, hot_ids, int8=True)
    target = bench.pair.decoder.target
    ours = ModelDrafter(
        Engine(cheap, num_rows=1, capacity=target.capacity, compiled=target.compiled),
        vocab_size=bench.pair.drafter.vocab_size,
        hot_ids=hot_ids,
    )
    context = [int(token) for token in torch.arange(CONTEXT) % 97 + 3]
    ours.start([context])
    target.prefill(context)
    uniform = torch.full((1, 1), 0.5, device=bench.plain.device)
    one, where = (torch.tensor([[x]], device=bench.plain.device) for x in (5, CONTEXT))
    key = cache_argument(small)
    with torch.inference_mode():
        ids = torch.tensor([context], device=bench.plain.device)
        cached = small(ids, use_cache=True).past_key_values

    def target_step() -> None:
        target.forward(one, where, longest=CONTEXT + 1)

    @torch.inference_mode()
    def plain_step() -> None:
        small(one, use_cache=True, **{key: cached}).logits.argmax(-1)
        cached.crop(-1)  # back to the context

    def our_step() -> None:
        ours.draft([context], [1], GREEDY, uniform)

    times = []
    for _ in range(15):
        pair = []
        for step in (our_step, plain_step):
            target_step()
            pair += measure_seconds(step, device=bench.plain.device, warmup=0, repeats=1)
        times.append((pair[0], pair[1]))
    return _row("decode.draft_step_ratio", times[3:], "<= 0.6")


def _identical(bench: Bench, name: str, decoder: Decoder) -> Iterator[Row]:
    """Share of greedy outputs that are token-identical with and without a draft, and the largest
    gap between two logits where outputs part.
    """

    def output(prompt: Sequence[int], gamma: int) -> list[int]:
        return decoder.decode(
            prompt,
            gamma=gamma,
            max_new_tokens=NUM_TOKENS,
            sampling=GREEDY,
            rng=torch.Generator(),
        )[0]

    prompts = bench.prompts[: 2 * NUM_PROMPTS]
    ties = [
        tie(decoder.target, prompt, output(prompt, 0), output(prompt, BLOCK_GAMMA))
        for prompt in prompts
    ]
    name = f"decode.identical_{_short(bench.plain.dtype)}.{name}"
    yield Row(
        name=name,
        value=ties.count(None) / len(ties),
        unit="share",
        to_reach=">= 1.0" if name.endswith("fixed_width") else "",
        command=COMMAND,
    )
    gaps = [one.gap for one in ties if one is not None]
    if gaps:
        yield Row(name=f"{name}.gap", value=max(gaps), unit="logits", command=COMMAND)


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
