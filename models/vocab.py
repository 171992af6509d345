"""Whether two tokenizers are the same one, by content."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from conf.errors import ConfigError

PROBES = ("Hello world", " 12,345.67\n\n\tif x != y:", "naïve café — 東京", "<|im_start|>")


def require_same_tokenizer(
    draft: PreTrainedTokenizerBase,
    target: PreTrainedTokenizerBase,
    draft_name: str,
    target_name: str,
) -> None:
    """Raise ConfigError unless both map the same strings to the same ids.

    Vocabulary sizes of the models need not agree: padding rows of an embedding (151936 against
    152064) are no tokens.
    """
    ours, theirs = draft.get_vocab(), target.get_vocab()
    differing = [token for token, index in theirs.items() if ours.get(token) != index]
    if not differing and all(draft(text).input_ids == target(text).input_ids for text in PROBES):
        return
    example = f"for example {differing[0]!r}" if differing else "they split text differently"
    raise ConfigError(
        f"draft.pretrained={draft_name}: its tokenizer ({len(ours)} tokens) is not the target's"
        f" ({target_name}, {len(theirs)} tokens; {len(differing)} differ, {example}). Acceptance"
        " compares whole distributions: pick a draft of the target's family, or draft.init=layers."
    )


def usable_ids(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Ids that both the model and its tokenizer have; a padded embedding has more rows."""
    return min(config.vocab_size, len(tokenizer))
