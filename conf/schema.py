"""Typed configuration of every stage.

The YAML files in this folder hold values, `conf.groups` holds types, units and single-group ranges;
a default lives in exactly one of the two (there). Hydra validates names and types against these
classes before any code of ours runs; `__post_init__` checks ranges inside one group,
`conf.validate` checks what spans several groups.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from conf.choices import Stage
from conf.devices import PlanConfig
from conf.errors import ConfigError
from conf.groups import (
    DataConfig,
    DraftConfig,
    EvalConfig,
    GenerateConfig,
    HubConfig,
    ObjectiveConfig,
    OptimConfig,
    RuntimeConfig,
    TargetConfig,
    TrackerConfig,
)

CONFIG_FOLDER = str(Path(__file__).parent.resolve())


@dataclass
class Config:
    """A whole run. `outputs/<name>/` holds what it makes; recorded answers are shared between runs
    in `outputs/.store`.
    """

    name: str = "main"
    stage: Stage = Stage.all
    outputs: str = "outputs"
    seed: int = 0
    data: DataConfig = field(default_factory=DataConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)


GROUPS: dict[str, type] = {
    "data": DataConfig,
    "target": TargetConfig,
    "generate": GenerateConfig,
    "draft": DraftConfig,
    "objective": ObjectiveConfig,
    "optim": OptimConfig,
    "runtime": RuntimeConfig,
    "eval": EvalConfig,
    "tracker": TrackerConfig,
    "hub": HubConfig,
    "plan": PlanConfig,
}


def folder_name(text: str) -> str:
    """Text as one folder name of at most 120 characters: a job of a multirun is named by its
    overrides.
    """
    plain = re.sub(r"[^\w.,=+-]+", "_", text)
    if plain == text and len(text) <= 120:
        return text
    # what the replacement or the cut makes alike, the digest keeps apart
    return f"{plain[:107]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def register() -> None:
    """Make the classes above known to Hydra, under names that stay out of its list of options."""
    OmegaConf.register_new_resolver("folder_name", folder_name, replace=True)
    store = ConfigStore.instance()
    store.store(group="schema", name="config", node=Config, package="_global_")
    for group, node in GROUPS.items():
        store.store(group=f"schema/{group}", name="base", node=node, package=group)


def typed(config: DictConfig) -> Config:
    """The composed configuration as plain dataclasses; past this call nobody sees a DictConfig.

    Raises ConfigError for a value that is missing and for a key that was added with `+` but that
    nothing reads.
    """
    missing = OmegaConf.missing_keys(config)
    if missing:
        raise ConfigError(
            f"{sorted(missing)[0]}: no value is set and there is no default. Give it on the command"
            " line."
        )
    result = OmegaConf.to_object(config)
    assert isinstance(result, Config)
    for key in _unknown(result):
        raise ConfigError(
            f"{key}: there is no such setting, and + only adds to dictionaries. Remove it."
        )
    return result


def _unknown(settings: Any, prefix: str = "") -> Iterator[str]:
    """Attributes that are no fields of their dataclass."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            yield from _unknown(value, f"{prefix}{key}.")
    elif dataclasses.is_dataclass(settings):
        known = {each.name for each in dataclasses.fields(settings)}
        for key, value in vars(settings).items():
            if key in known:
                yield from _unknown(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}"


def setting_names() -> list[str]:
    """Every key of the configuration, with its group."""
    own = [each.name for each in dataclasses.fields(Config) if each.name not in GROUPS]
    return own + [
        f"{group}.{each.name}"
        for group, node in GROUPS.items()
        for each in dataclasses.fields(node)
    ]


def as_tree(config: Any) -> Any:
    """Dataclasses, enums and lists as plain JSON values."""
    if hasattr(config, "__dataclass_fields__"):
        return {key: as_tree(getattr(config, key)) for key in config.__dataclass_fields__}
    if isinstance(config, StrEnum):
        return str(config)
    if isinstance(config, dict):
        return {str(key): as_tree(value) for key, value in config.items()}
    if isinstance(config, Sequence) and not isinstance(config, str):
        return [as_tree(value) for value in config]
    return config
