"""The composition root: composes a configuration and runs stages in order.

The only place that reaches every room.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from conf.choices import Stage
from conf.console import Screen, settle_libraries
from conf.errors import UserError
from conf.run import Run, process_rank
from conf.schema import CONFIG_FOLDER, Config, register, setting_names, typed
from conf.tracking import Tracker, open_tracker
from conf.validate import validate

STAGES: dict[Stage, tuple[str, str]] = {
    Stage.prepare: ("data.prepare", "prepare"),
    Stage.generate: ("models.generate", "generate"),
    Stage.distill: ("train.distill", "distill"),
    Stage.evaluate: ("eval.evaluate", "evaluate"),
    Stage.publish: ("models.publish", "publish"),
}
# publishing happens only when asked for
PIPELINE = (Stage.prepare, Stage.generate, Stage.distill, Stage.evaluate)
SHARED = {Stage.generate, Stage.distill}  # stages whose work all processes of a launch share
# errors of a file system that the person at the keyboard can put right; any other OSError is a bug
REFUSED_BY_THE_DISK = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR),
    *(errno.EEXIST, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG),
}

SHOW_SETTINGS = "`python -m train --cfg job` shows every setting, conf/groups its type and unit."

failures: list[str] = []  # sentences for the end of the command, one per failed job of a multirun


def run_stages(config: Config, folder: Path) -> None:
    """Run the stages that `config.stage` asks for, in order.

    Raises ConfigError before any model loads.
    """
    validate(config)
    run = Run.open(config, folder)
    if config.stage is Stage.plan:
        _load("train.plan", "plan")(config, run, Screen())
        return
    wanted = PIPELINE if config.stage is Stage.all else (config.stage,)
    check_ahead(config, wanted)  # before the tracker: a typing error is no run on a dashboard
    with open_tracker(config, run) as tracker:
        for stage in wanted:
            run_stage(stage, config, run, tracker)


def check_ahead(config: Config, stages: Sequence[Stage]) -> None:
    """What can be known of the models before any weights load: the target is there, the draft fits.

    A target in a GGUF file is converted here, once, before the first stage.
    """
    if set(stages) <= {Stage.prepare, Stage.publish}:
        return
    validate_models: Callable[..., None] = _load("models.check", "validate_models")
    validate_models(config, Screen().say if process_rank() == 0 else None)


def run_stage(stage: Stage, config: Config, run: Run, tracker: Tracker) -> None:
    """Run one stage, on every process or on the first alone."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    function: Callable[[Config, Run, Tracker], Any] = _load(*STAGES[stage])
    if world == 1:
        function(config, run, tracker)
        return
    from accelerate import PartialState

    # without cpu=True every process of a launch on CPUs believes that it is alone; the others wait
    # while the first one prepares or measures
    on_cpu = _load("models.load", "device_of")(config.runtime).type == "cpu"
    state = PartialState(cpu=on_cpu, timeout=timedelta(hours=12))
    if stage in SHARED or process_rank() == 0:
        function(config, run, tracker)
    state.wait_for_everyone()


def _leave_launch() -> None:
    """Close the connection to the other processes of a launch."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from torch import distributed

        if distributed.is_initialized():
            distributed.destroy_process_group()


def _load(module: str, name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(module), name)


def explain(wrong: Exception) -> str | None:
    """One sentence for an error that the person at the keyboard can put right; None for a bug."""
    if isinstance(wrong, UserError):
        return str(wrong)
    if isinstance(wrong, HydraException | OmegaConfBaseException):
        return _explain_composition(wrong)
    if isinstance(wrong, OSError) and wrong.errno in REFUSED_BY_THE_DISK:
        place = wrong.filename or "the disk"
        return (
            f"{place}: {wrong.strerror}. Make room or rights there, or choose another folder with "
            "outputs=."
        )
    return None


def _explain_composition(wrong: Exception) -> str:
    """What hydra and omegaconf say over several lines, in the form of our own errors."""
    if isinstance(wrong, MissingConfigException) and wrong.options:
        group, _, option = str(wrong.missing_cfg_file).rpartition("/")
        return f"{group}={option}: there is no such file. Choose one of {', '.join(wrong.options)}."
    said = str(wrong).splitlines()
    if isinstance(wrong, OverrideParseException):
        reason = next((line for line in reversed(said) if not line.startswith("See http")), "")
        return f"{wrong.override}: {reason}. Write key=value, in quotes where the shell needs them."
    if "not in struct" in str(wrong.__cause__):
        return f"{said[0]} {said[-1].replace('your config', 'a dictionary')}. {SHOW_SETTINGS}"
    if unknown := re.match(r"Could not override '([^']+)'", said[0]):
        near = difflib.get_close_matches(unknown[1], setting_names(), 1)
        meant = f"Did you mean {near[0]}? " if near else ""
        return f"{unknown[1]}: there is no such setting. {meant}{SHOW_SETTINGS}"
    cause = str(wrong.__cause__ or wrong).splitlines()
    if refused := re.match(r"Error merging override (.+)", said[0]):
        return f"{refused[1]}: {cause[0].rstrip('.')}. {SHOW_SETTINGS}"
    where = re.search(r"full_key: (\S+)", str(wrong))
    return f"{where[1]}: {said[0]}. {SHOW_SETTINGS}" if where else " ".join(said[:2])


@hydra.main(version_base="1.3", config_path=CONFIG_FOLDER, config_name="config")
def _main(composed: DictConfig) -> None:
    try:
        run_stages(typed(composed), Path(HydraConfig.get().runtime.output_dir))
    except Exception as wrong:  # told here: hydra would print a report of its own around it
        sentence = explain(wrong)
        if sentence is None:
            raise
        failures.append(sentence)


def main() -> None:
    """`python -m train`: exit code 0, or 2 with one sentence for bad configuration or input."""
    settle_libraries()
    register()
    failures.clear()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach the handler below, not hydra's exit code 1
    try:
        _main()
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted. The same command goes on from here.\n")
        sys.exit(130)
    except Exception as wrong:
        sentence = explain(wrong)
        if sentence is None:
            raise
        failures.append(sentence)
    _leave_launch()
    for failure in failures:
        sys.stderr.write(f"error: {failure}\n")
    if failures:
        sys.exit(2)
