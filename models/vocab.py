"""Whether two tokenizers are the same one, by content, and what a draft of another one proposes."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from conf.errors import ConfigError
from models.decoding.translated import Translation, translator
from models.draft import read_shared_ids

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
    how = difference(draft, target)
    if how is None:
        return
    raise ConfigError(
        f"draft.pretrained={draft_name}: its tokenizer ({len(draft.get_vocab())} tokens) is not the"
        f" target's ({target_name}, {len(target.get_vocab())} tokens; {how}). Acceptance compares"
        " whole distributions: pick a draft of the target's family, set draft.vocab=shared to draft"
        " the tokens that both have, or draft.init=layers."
    )


def difference(draft: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> str | None:
    """How two tokenizers differ, in words; None: they are one."""
    ours, theirs = draft.get_vocab(), target.get_vocab()
    differing = [token for token, index in theirs.items() if ours.get(token) != index]
    if differing:
        return f"{len(differing)} differ, for example {differing[0]!r}"
    if all(draft(text).input_ids == target(text).input_ids for text in PROBES):
        return None
    return "0 differ, they split text differently"


def read_translation(folder: str | Path, target: PreTrainedTokenizerBase) -> Translation | None:
    """Of an exported draft with a tokenizer of its own; None: it has the target's.

    Raises ConfigError when it has another one and was not exported for that.
    """
    draft = AutoTokenizer.from_pretrained(folder)
    ids = read_shared_ids(folder)
    if ids is not None:
        return Translation(*ids, translator(target, draft))
    how = difference(draft, target)
    if how is not None:
        raise ConfigError(
            f"{folder}: the draft's tokenizer is not the target's ({how}). Make it with"
            " draft=pretrained draft.pretrained=<its Hub id or folder> draft.vocab=shared, which"
            " drafts the tokens that both have."
        )
    return None


def usable_ids(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Ids that both the model and its tokenizer have; a padded embedding has more rows."""
    return min(config.vocab_size, len(tokenizer))
