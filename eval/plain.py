"""What transformers does by itself, to measure beside."""

# B rows, T prompt tokens

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from models.load import Target


def plain_generate(
    model: PreTrainedModel,
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sample: bool,
    **settings: object,
) -> int:
    """`generate` on a batch of prompts, padded on the left, from the whole law at temperature 1 or
    greedily: the number of tokens that count, which are those up to each row's end.
    """
    longest = max(map(len, prompts))
    pad = target.tokenizer.pad_token_id or 0
    ids_BT = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts])
    mask_BT = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    torch.manual_seed(longest)
    generate: Any = model.generate
    out = generate(
        input_ids=ids_BT.to(model.device),
        attention_mask=mask_BT.to(model.device),
        do_sample=sample,
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        top_k=None,  # the whole law, as ours
        eos_token_id=sorted(target.stop_ids),
        **({"temperature": 1.0, "top_p": 1.0} if sample else {}),
        **settings,
    )
    new = out[:, longest:].tolist()
    stops = target.stop_ids
    return sum(next((i + 1 for i, t in enumerate(row) if t in stops), len(row)) for row in new)
