"""The composition root: composes a configuration and runs stages in order. The only place that reaches every room."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from conf.run import Run, process_rank
from conf.schema import CONFIG_FOLDER, Config, Stage, UserError, register, typed
from conf.tracking import Tracker, open_tracker
from conf.validate import validate

STAGES: dict[Stage, tuple[str, str]] = {
    Stage.prepare: ("data.prepare", "prepare"),
    Stage.generate: ("models.generate", "generate"),
    Stage.distill: ("train.distill", "distill"),
    Stage.evaluate: ("eval.evaluate", "evaluate"),
    Stage.publish: ("models.publish", "publish"),
}
PIPELINE = (Stage.prepare, Stage.generate, Stage.distill, Stage.evaluate)  # publishing happens only when asked for
SHARED = {Stage.generate, Stage.distill}  # stages whose work all processes of a launch share


failures: list[str] = []  # sentences for the end of the command, one per failed job of a multirun


def run_stages(config: Config, folder: Path) -> None:
    """Run the stages that `config.stage` asks for, in order. Raises ConfigError before any model loads."""
    validate(config)
    run = Run.open(config, folder)
    wanted = PIPELINE if config.stage is Stage.all else (config.stage,)
    with open_tracker(config, run) as tracker:
        check_ahead(config, wanted)
        for stage in wanted:
            run_stage(stage, config, run, tracker)


def check_ahead(config: Config, stages: Sequence[Stage]) -> None:
    """What can be known of the models before any weights load: the target is there and the draft fits it."""
    if not {Stage.generate, Stage.distill} & set(stages):
        return
    validate_models: Callable[[Config], None] = _load("models.check", "validate_models")
    validate_models(config)


def run_stage(stage: Stage, config: Config, run: Run, tracker: Tracker) -> None:
    """Run one stage, on every process or on the first alone."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    function: Callable[[Config, Run, Tracker], Any] = _load(*STAGES[stage])
    if world == 1:
        function(config, run, tracker)
        return
    from accelerate import PartialState

    state = PartialState(timeout=timedelta(hours=12))  # other processes wait while the first one prepares or measures
    if stage in SHARED or process_rank() == 0:
        function(config, run, tracker)
    state.wait_for_everyone()


def _load(module: str, name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def _quiet() -> None:
    """Keep libraries' chatter out of a run's own report; errors still show."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.filterwarnings("ignore", module="transformers|torch|accelerate")


@hydra.main(version_base="1.3", config_path=CONFIG_FOLDER, config_name="config")
def _main(composed: DictConfig) -> None:
    try:
        run_stages(typed(composed), Path(HydraConfig.get().runtime.output_dir))
    except UserError as wrong:  # raised here, hydra would print a report of its own around it
        failures.append(str(wrong))


def main() -> None:
    """`python -m train`: exit code 0, or 2 with one sentence when the configuration or the input is at fault."""
    _quiet()
    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach the handler below instead of hydra's exit code 1
    try:
        _main()
    except (HydraException, OmegaConfBaseException) as wrong:
        cause = wrong.__cause__
        failures.append(" ".join(dict.fromkeys([*str(wrong).splitlines()[:1], *str(cause or "").splitlines()[:1]])))
    except OSError as refused:
        place = refused.filename or "a file"
        failures.append(f"{place}: {refused.strerror}. Make room or rights there, or choose another folder with outputs=.")
    for failure in failures:
        sys.stderr.write(f"error: {failure}\n")
    if failures:
        sys.exit(2)
