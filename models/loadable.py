"""Whether a model folder loads and computes as a stranger will use it, before it goes anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from conf.errors import ConfigError

REQUIRED = ("config.json", "tokenizer_config.json", "generation_config.json")
AGAIN = "Run stage=distill again."


class UnfitDraft(ConfigError):
    """A model folder that serving engines would refuse or that computes nonsense."""


def verify_loadable(folder: Path, vocab_size: int) -> None:
    """Raise UnfitDraft unless `folder` is a whole transformers model over `vocab_size` ids.

    Whole: safetensors weights for every parameter, a tokenizer and a generation config; config and
    embeddings have the target's vocabulary; a forward pass over tokenized text gives finite logits.
    """
    missing = [name for name in REQUIRED if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise UnfitDraft(f"The draft's folder lacks {', '.join(missing)}. {AGAIN}")
    tokenizer, model = _load(folder)
    sizes = {
        "config.json": model.config.vocab_size,
        "its input embedding": cast(
            torch.nn.Embedding, model.get_input_embeddings()
        ).num_embeddings,
    }
    for where, size in sizes.items():
        if size != vocab_size:
            raise UnfitDraft(
                f"The draft has {size} vocabulary ids ({where}), the target {vocab_size}: serving "
                "engines refuse such a pair. Run stage=distill with this target."
            )
    ids_BT = tokenizer("A quick look at the published draft.", return_tensors="pt")["input_ids"]
    if int(ids_BT.max()) >= vocab_size:
        raise UnfitDraft(f"The tokenizer gives id {int(ids_BT.max())} of {vocab_size}. {AGAIN}")
    with torch.inference_mode():
        logits_BTV = model.eval()(input_ids=ids_BT).logits
    if logits_BTV.shape[-1] != vocab_size or not bool(torch.isfinite(logits_BTV).all()):
        raise UnfitDraft(f"The draft's logits are not {vocab_size} finite numbers. {AGAIN}")


def _load(folder: Path) -> tuple[Any, PreTrainedModel]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as broken:
        reason = str(broken).strip().partition("\n")[0]
        raise UnfitDraft(f"transformers cannot load the draft ({reason}). {AGAIN}") from broken
    model, loading = loaded
    # transformers fills what is missing with random numbers and goes on
    wrong = sorted(map(str, {*loading["missing_keys"], *loading["mismatched_keys"]}))
    if wrong:
        raise UnfitDraft(f"The draft's weights lack {', '.join(wrong)}. {AGAIN}")
    return tokenizer, model
