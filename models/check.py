"""What can be checked of target and draft before any weights are loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer

from conf.choices import DraftInit, DraftVocab, Engine, Stage
from conf.errors import ConfigError, require
from conf.schema import Config
from conf.validate import validate_draft_layers
from models.decoding.translated import Translation
from models.load import Target, device_of, open_target, why_not_loaded
from models.vocab import difference, require_same_tokenizer

WEIGHTS = ("*.safetensors", "*.bin")


def require_weights(config: Config, target: Target) -> None:
    """Raise ConfigError when a stage needs weights that a local target folder lacks: where servers
    answer, the rest of the folder is enough for stage=generate.
    """
    folder = Path(target.source)
    if not folder.is_dir() or any(list(folder.glob(pattern)) for pattern in WEIGHTS):
        return
    copies = config.draft.init is DraftInit.layers
    require(
        config.stage is not Stage.distill or not copies,
        "target.path",
        config.target.path,
        "it has no weights, and draft.init=layers copies some of the target's layers",
        "Add them, or start from a small model with draft=pretrained draft.pretrained=...",
    )
    require(
        config.stage not in (Stage.all, Stage.evaluate),
        "target.path",
        config.target.path,
        "it has no weights, and evaluation decodes with the target itself",
        "Add them, or run stage=prepare, generate and distill alone",
    )


def validate_models(config: Config, say: Callable[[str], None] | None = None) -> None:
    """Raise ConfigError when the target is not there, or the draft is deeper than it or speaks
    another vocabulary. `say` is told before something takes long.
    """
    device_of(config.runtime)
    target = open_target(config, say)
    validate_draft_layers(config, target.config.num_hidden_layers)
    if config.generate.engine is Engine.server:
        require_weights(config, target)
    if config.draft.init is not DraftInit.pretrained:
        return
    name = config.draft.pretrained
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as failed:
        raise ConfigError(
            f"draft.pretrained={name}: it cannot be loaded ({why_not_loaded(failed)}). Give a Hub"
            " id or a folder."
        ) from None
    if config.draft.vocab is DraftVocab.same:
        require_same_tokenizer(tokenizer, target.tokenizer, name, config.target.path)
        return
    require(
        difference(tokenizer, target.tokenizer) is not None,
        "draft.vocab",
        config.draft.vocab,
        f"{name} has the target's tokenizer, so all of its tokens are the target's, and it can be"
        " distilled",
        "Leave draft.vocab out",
    )
    Translation.of(target.tokenizer, tokenizer)  # which share some
