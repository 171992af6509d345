"""Where figures and drafts go."""

from __future__ import annotations

from dataclasses import dataclass, field

from conf.choices import (
    TrackerKind,
)


@dataclass
class TrackerConfig:
    """Dashboards. The console and events.jsonl always get every event."""

    kind: TrackerKind = TrackerKind.wandb
    project: str = "draftsmith"
    entity: str = ""
    tags: list[str] = field(default_factory=list)


@dataclass
class HubConfig:
    """Publishing. Nothing leaves this machine unless `push` is true and `repo_id` is given."""

    repo_id: str = ""
    push: bool = False
    private: bool = True
    revision: str = "main"
    license: str = "apache-2.0"
    base_model: str = ""  # Hub id of the target; empty: target.path where that is one
