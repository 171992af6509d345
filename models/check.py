"""What can be checked of target and draft before any weights are loaded."""

from __future__ import annotations

from collections.abc import Callable

from transformers import AutoTokenizer

from conf.choices import DraftInit
from conf.errors import ConfigError
from conf.schema import Config
from conf.validate import validate_draft_layers
from models.load import device_of, open_target, why_not_loaded
from models.vocab import require_same_tokenizer


def validate_models(config: Config, say: Callable[[str], None] | None = None) -> None:
    """Raise ConfigError when the target is not there, or the draft is deeper than it or speaks
    another vocabulary. `say` is told before something takes long.
    """
    device_of(config.runtime)
    target = open_target(config, say)
    validate_draft_layers(config, target.config.num_hidden_layers)
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
    require_same_tokenizer(tokenizer, target.tokenizer, name, config.target.path)
