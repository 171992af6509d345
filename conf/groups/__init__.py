"""The groups of settings: types, units, defaults and the ranges inside each group."""

from __future__ import annotations

from conf.groups.data import DataConfig, SourceConfig
from conf.groups.measurement import EvalConfig, RuntimeConfig
from conf.groups.models import DraftConfig, GenerateConfig, TargetConfig
from conf.groups.reporting import HubConfig, TrackerConfig
from conf.groups.training import ObjectiveConfig, OptimConfig

__all__ = [
    "DataConfig",
    "DraftConfig",
    "EvalConfig",
    "GenerateConfig",
    "HubConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "RuntimeConfig",
    "SourceConfig",
    "TargetConfig",
    "TrackerConfig",
]
