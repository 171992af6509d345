"""`python -m train stage=plan`: what a run would take, before anything is loaded.

Of the target only the configuration is read. Numbers of tokens and bytes follow from the settings,
times from a device's rates, see train.rates. Prompts are counted where the corpus is there already.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from conf.console import Screen
from conf.run import Run, write_atomically
from conf.schema import Config
from conf.validate import validate_draft_layers
from models.anatomy import anatomy_of, read_config
from models.jobs import USUAL_LENGTH, size_of
from models.load import set_threads
from train.estimate import held_bytes
from train.plan_stages import Place, StagePlan, expected_jobs, gib, prepare, too_busy, too_large
from train.plan_work import Work
from train.rates import Rates, stated
from train.rates_measured import measured_here


@dataclass(kw_only=True)
class Plan:
    """All stages, and what they were reckoned from."""

    device: str
    unit: str  # CPU or GPU
    num_devices: int
    room: float  # bytes of memory of a device
    basis: list[str]
    warnings: list[str]
    stages: list[StagePlan]

    def write(self, path: Path) -> None:
        """As JSON, with the sums that the table shows."""
        tree = asdict(self)
        for shown, stage in zip(tree["stages"], self.stages, strict=True):
            shown["peak"] = stage.peak
        write_atomically(path, json.dumps(tree, indent=1) + "\n")


def plan(config: Config, run: Run, screen: Screen) -> Plan:
    """Say what each stage takes, as a table, and write plan.json to the run's folder.

    Raises ConfigError for a target without a configuration.
    """
    set_threads(config.runtime)
    program = float(held_bytes())
    found = reckon(config, run, program)
    found.write(run.folder / "plan.json")
    show(found, screen)
    return found


def reckon(config: Config, run: Run, program: float) -> Plan:
    """The plan; `program` is what a process holds before it loads anything."""
    model_config = read_config(config.target)
    target = anatomy_of(model_config, trust_remote_code=config.target.trust_remote_code)
    validate_draft_layers(config, len(target.layers))
    place = Place.of(config, program)
    jobs, counted = expected_jobs(config, run)
    longest = max(len(job.prompt) for job in jobs)
    work = Work(
        config, place, target, jobs, longest if counted else config.generate.max_prompt_tokens
    )
    warnings = []
    if config.plan.device:
        rates: Rates = stated(config.plan.device, target)
    else:
        warnings += too_busy(place)
        cached = work.num_rows * work.longest * target.cache_per_layer
        rates = measured_here(config, model_config, target, cached)
    size = size_of(jobs, config.generate, model_config)
    stages = [
        prepare(config, run),
        work.generate(rates, size.expected, size.most),
        *work.distill_and_evaluate(rates),
    ]
    prompts = "counted in the corpus" if counted else "assumed"
    return Plan(
        device=rates.name,
        unit="CPU" if place.on_cpu else "GPU",
        num_devices=config.plan.num_devices,
        room=place.room,
        basis=[
            f"target: {large(target.weights)} weights, {large(target.used_weights)} used by a"
            f" token, {len(target.layers)} layers",
            f"{rates.name}: {rates.basis}",
            f"{len(jobs)} answers; prompts of {work.mean_prompt:.0f} tokens ({prompts}); answers"
            f" of {work.length:.0f}, {USUAL_LENGTH:.0%} of generate.max_new_tokens",
            *work.which_draft(),
        ],
        warnings=[*warnings, *(line for stage in stages for line in too_large(stage, place))],
        stages=stages,
    )


def count(tokens: float) -> str:
    """Tokens for people."""
    return f"{tokens:,.0f}" if tokens else "-"


def large(number: float) -> str:
    """A number of weights for people."""
    return f"{number / 1e9:.3g}B" if number >= 1e9 else f"{number / 1e6:.3g}M"


def show(found: Plan, screen: Screen) -> None:
    """One page."""
    rows = [
        [
            str(stage.stage),
            count(stage.tokens),
            count(stage.most_tokens),
            str(timedelta(seconds=round(stage.seconds))),
            f"{stage.seconds * found.num_devices / 3600:.2f}",
            gib(stage.disk),
            gib(stage.most_disk),
            gib(stage.peak),
        ]
        for stage in found.stages
    ]
    total = sum(stage.seconds for stage in found.stages)
    disk, most_disk = (
        sum(getattr(stage, name) for stage in found.stages) for name in ("disk", "most_disk")
    )
    peak = max(stage.peak for stage in found.stages)
    rows.append(
        [
            *("all", "", "", str(timedelta(seconds=round(total)))),
            *(f"{total * found.num_devices / 3600:.2f}", gib(disk), gib(most_disk), gib(peak)),
        ]
    )
    columns = ["stage", "tokens", "at most", "time", f"{found.unit} hours", "disk", "at most"]
    screen.table(f"plan for {found.num_devices} x {found.device}", [*columns, "memory"], rows)
    for line in found.basis:
        screen.say(f"plan: {line}.")
    for line in found.warnings:
        screen.say(f"WARNING: {line}")
