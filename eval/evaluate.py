"""Stage evaluate: the exported draft, loaded from disk, is measured with the decoder against plain
decoding.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from conf.choices import Stage
from conf.contracts import (
    Corpus,
    Cost,
    Draft,
    ExpectedAcceptance,
    Interval,
    Lessons,
    Prompt,
    Report,
    Result,
)
from conf.errors import require
from conf.run import (
    Resume,
    Run,
    determined,
    fingerprint,
    peak_memory_gib,
    process_rank,
    provenance,
)
from conf.schema import Config
from conf.tracking import Tracker
from data.chat import render_prompt
from data.shards import read_split
from data.suites import suite_prompts
from eval.acceptance import Overlap, Text, mean_overlap
from eval.measure import AT_ONE, Question, best_of, check_estimate, decode_all, ways_of
from eval.pair import ModelPair, load_draft
from eval.report import write_report
from eval.speed import measure_cost, timed
from eval.table import summary_table
from models.decoding.compiled import has_compiler
from models.decoding.kernels import has_kernels
from models.decoding.sampling import Sampling
from models.load import Target, describe, set_threads

MAX_PROMPT_TOKENS = 512
GUESS = 0.02, {1: 1.0, 16: 1.2}  # c and v at which long and broad drafts pay
CATCHING_UP = (1, 2)  # tokens a draft reads at once: shapes to compile


def evaluate(config: Config, run: Run, tracker: Tracker) -> Report:
    """Measure acceptance and speed of the exported draft; writes report.json, plots and the page.

    Running the whole pipeline again shows the finished report; `stage=evaluate` measures again,
    and may do so by other settings. The old report stays until the new one is complete.
    """
    draft_manifest, lessons, corpus = (
        Draft.read(run.draft),
        Lessons.read(run.lessons),
        Corpus.read(run.corpus),
    )
    made_by = determined(
        config,
        "eval",
        draft=draft_manifest.fingerprint,
        lessons=lessons.fingerprint,
        compile=config.runtime.compile,
        int8_draft=config.runtime.int8_draft,
    )
    is_asked = config.stage is Stage.evaluate
    if not is_asked and run.resume(run.report, Report, made_by) is Resume.complete:
        report = Report.read(run.report)
        show(report, run, tracker)
        return report
    start = time.perf_counter()
    set_threads(config.runtime)
    torch.manual_seed(config.seed)
    settings = config.eval
    longest = max(*settings.gammas, settings.lookup_gamma, settings.by_cost)
    capacity = -(-(MAX_PROMPT_TOKENS + settings.max_new_tokens + longest) // 64) * 64
    models = ModelPair.load(config, run.draft / "model", capacity)
    room = models.decoder.target.capacity - settings.max_new_tokens - longest
    questions = ask(config, models.target, min(room, MAX_PROMPT_TOKENS))
    compile_seconds = warm_up(models, questions, config, tracker)
    cost = measure_cost(models.decoder.target, models.drafter, longest, Sampling(0.0))
    cost.compile_seconds = compile_seconds
    tracker.event(
        "evaluate/cost",
        {"c": cost.c, "target_step_ms": cost.target_step_ms, "draft_step_ms": cost.draft_step_ms}
        | {f"v_{width}": value for width, value in cost.v.items()},
    )
    expected = expect(config, models, run, lessons, tracker)
    found = decode_all(config, models, questions, cost, tracker)
    best = best_of(found.alone, min(settings.temperatures))
    assert best is not None
    report = Report(
        fingerprint=fingerprint(made_by),
        determined_by=made_by,
        provenance=provenance(config.seed, str(models.model.device), time.perf_counter() - start),
        name=run.name,
        target=describe(models.target, config.target, models.model),
        draft={
            "parameters": draft_manifest.parameters,
            "layers": draft_manifest.num_layers,
            "target_layers": draft_manifest.layers,
            "bytes": draft_manifest.num_bytes,
            "hot_vocab": draft_manifest.hot_vocab,
        }
        | ({"shared_vocab": num_shared} if (num_shared := draft_manifest.shared_vocab) else {}),
        machine=machine(models),
        cost=cost,
        expected_acceptance=expected,
        results=found.alone,
        with_lookup=found.with_lookup,
        best=best,
        verdict=verdict(best, best_of(found.with_lookup, best.temperature), cost),
        warnings=check_estimate(models, found.answers, found.alone, settings.confidence),
        samples=found.samples,
        seconds_by_stage={
            "prepare": corpus.provenance.seconds,
            "generate": lessons.seconds,
            "distill": draft_manifest.provenance.seconds,
            "evaluate": round(time.perf_counter() - start, 1),
        },
        peak_memory_gib=max(
            peak_memory_gib(),
            *(made.provenance.peak_memory_gib for made in (corpus, lessons, draft_manifest)),
        ),
        training_curve=json.loads((run.draft / "curve.json").read_text(encoding="utf-8")),
    )
    if process_rank() == 0:
        images = write_report(report, run.report)
        report.write(run.report)
        tracker.images({f"report/{name}": path for name, path in images.items()})
    publish_figures(report, run, tracker)
    show(report, run, tracker)
    return report


def ask(config: Config, target: Target, most_tokens: int = MAX_PROMPT_TOKENS) -> list[Question]:
    """The suites' prompts as ids. Prompts beyond the length limit are cut from the measurement, not
    shortened.
    """
    questions = []
    for category, prompts in suite_prompts(config.eval).items():
        for prompt in prompts:
            ids = render_prompt(target.tokenizer, prompt.messages, config.target.system_prompt)
            if len(ids) <= most_tokens:
                questions.append(Question(category, ids, _last_turn(prompt)))
    require(
        bool(questions),
        "eval.suites",
        sorted(config.eval.suites),
        f"they have no prompt of at most {most_tokens} tokens, which is what fits beside an answer,"
        " so nothing can be measured",
        "Name suites of shorter prompts or lower eval.max_new_tokens",
    )
    return questions


def _last_turn(prompt: Prompt) -> str:
    return prompt.messages[-1]["content"]


def warm_up(
    models: ModelPair, questions: Sequence[Question], config: Config, tracker: Tracker
) -> float:
    """Run every shape once, so that compiling is over before anything is timed; returns the seconds
    that took.
    """
    if config.runtime.compile and models.model.device.type == "cpu" and not has_compiler():
        tracker.message("evaluate: no C++ compiler was found, so decoding runs uncompiled.")
    elif models.model.device.type == "cpu" and not has_kernels():
        tracker.message(
            "evaluate: the CPU kernels could not be built (a C++ compiler with OpenMP builds them),"
            " so decoding runs on torch's own, slower products."
        )
    start = time.perf_counter()
    by_length = sorted(questions, key=lambda question: len(question.prompt))
    guess = ways_of(models, config.eval, *GUESS)  # what pays is not known before
    ways = [(models.decoder, 0), *((way.decoder, way.most) for way in guess)]
    # greedy drafts by cost are trees, sampled ones chains
    temperatures = sorted({min(config.eval.temperatures), max(config.eval.temperatures)})
    for (decoder, gamma), temperature in product(ways, temperatures):
        for question in (by_length[0], by_length[-1]):
            timed(
                decoder,
                question.prompt,
                gamma=gamma,
                max_new_tokens=12,
                sampling=Sampling(temperature),
                seed=0,
            )
    # after a few lookups in a row the draft has several tokens to read at once
    text = by_length[-1].prompt
    # one with its own tokens also reads again what is split anew
    for num_tokens in range(1, 9) if models.has_own_tokens else CATCHING_UP:
        if num_tokens < len(text):
            models.drafter.start([text[:-num_tokens]])
            uniform = torch.full((1, 1), 0.5, device=models.model.device)
            models.drafter.draft([text], [1], AT_ONE, uniform)
    return round(time.perf_counter() - start, 1)


def expect(
    config: Config, models: ModelPair, run: Run, lessons: Lessons, tracker: Tracker
) -> ExpectedAcceptance:
    """Exact expected acceptance at temperature 1 on the recorded validation answers, before and
    after distillation.
    """
    untrained = []
    if not models.has_own_tokens:  # else it was never trained
        numbers, device = models.draft.dtype, models.model.device
        int8 = config.runtime.int8_draft
        untrained.append(load_draft(run.draft / "initial", numbers, device, int8=int8))
    before: list[Overlap] = []
    after: list[Overlap] = []
    by_category: dict[str, list[Overlap]] = defaultdict(list)
    by_temperature: dict[str, list[Overlap]] = defaultdict(list)
    rows = sorted(read_split(run.lessons, lessons.splits["validation"]), key=lambda row: row.index)
    with tracker.progress("evaluate: expected acceptance", len(rows), "answers") as bar:
        for row in rows:
            text = Text(row.prompt.tolist(), row.generated.tolist(), row.category, row.temperature)
            found = models.overlaps(text, AT_ONE, *untrained)
            before.append(found[0])
            after.append(found[-1])
            by_category[row.category].append(found[-1])
            by_temperature[str(row.temperature)].append(found[-1])
            bar.advance()
    level = config.eval.confidence
    return ExpectedAcceptance(
        before=mean_overlap(before, level),
        after=mean_overlap(after, level),
        after_by_category={
            name: mean_overlap(found, level) for name, found in sorted(by_category.items())
        },
        after_by_temperature={
            name: mean_overlap(found, level) for name, found in sorted(by_temperature.items())
        },
    )


def verdict(best: Result, with_lookup: Result | None, cost: Cost) -> str:
    """What a reader takes away."""
    kind = "greedy" if best.temperature == 0 else f"temperature {best.temperature:g}"
    figures = _figures(best.speedup)
    beside = (
        "" if with_lookup is None else f" Beside prompt lookup: {_figures(with_lookup.speedup)}."
    )
    if best.speedup.median >= 1:
        return (
            f"With this draft the target decodes {figures} as fast, {kind}, drafting"
            f" {best.drafting}." + beside
        )
    return (
        f"This draft does not pay here: {figures} at its best, drafting {best.drafting} ({kind})."
        f" {best.acceptance_rate:.2f} of the tested tokens are accepted, and a drafted token costs"
        f" {cost.c:.2f} of a target step." + beside
    )


def _figures(speedup: Interval) -> str:
    return f"{speedup.median:.2f}x ({speedup.low:.2f} to {speedup.high:.2f})"


def machine(models: ModelPair) -> dict[str, Any]:
    """Where the figures come from."""
    device = models.model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "device": name,
        "cores": torch.get_num_threads() if device.type == "cpu" else os.cpu_count(),
        "dtype": str(models.model.dtype).removeprefix("torch."),
        "compiled": models.decoder.target.compiled,
    }


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def publish_figures(report: Report, run: Run, tracker: Tracker) -> None:
    """Figures to sort runs by, and the artifact."""
    best, expected = report.best, report.expected_acceptance
    beside = best_of(report.with_lookup, best.temperature)
    tracker.summary(
        {
            "report/speedup": best.speedup.median,
            "report/speedup_low": best.speedup.low,
            "report/speedup_high": best.speedup.high,
            "report/gamma": best.gamma,
            "report/acceptance_rate": best.acceptance_rate,
            "report/acceptance_length": best.acceptance_length,
            "report/expected_acceptance_before": expected.before.value,
            "report/expected_acceptance": expected.after.value,
            "report/c": report.cost.c,
            "report/minutes": sum(report.seconds_by_stage.values()) / 60,
            "report/peak_memory_gib": report.peak_memory_gib,
        }
        | ({"report/speedup_with_lookup": beside.speedup.median} if beside else {})
    )
    tracker.artifact(
        "report", run.report, uses=["draft"], metadata={"fingerprint": report.fingerprint}
    )


def show(report: Report, run: Run, tracker: Tracker) -> None:
    """The table at the end of a run."""
    columns, rows = summary_table(report)
    tracker.table("report/results", columns, rows)
    for warning in report.warnings:
        tracker.message(f"WARNING: {warning}")
    before, after = report.expected_acceptance.before, report.expected_acceptance.after
    tracker.message(
        f"{report.verdict} Expected acceptance {before.value:.3f} before, {after.value:.3f} after"
        f" distillation. Page: {_shown(run.report / 'index.html')}"
    )


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
