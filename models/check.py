"""What can be checked of target and draft before any weights are loaded."""

from __future__ import annotations

from collections.abc import Callable

from transformers import AutoTokenizer

from conf.choices import DraftInit, DraftVocab
from conf.errors import ConfigError, require
from conf.schema import Config
from conf.validate import validate_draft_layers
from models.decoding.translated import Translation
from models.load import device_of, open_target, why_not_loaded
from models.vocab import difference, require_same_tokenizer


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
