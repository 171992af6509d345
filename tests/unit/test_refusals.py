"""What the decoder refuses, in one sentence each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from models.decoding.draft_model import ModelDrafter
from models.decoding.engine import Engine
from models.decoding.length import Rule, StopBelow
from models.decoding.rows import Request
from models.decoding.sampling import NonFiniteLogits, Sampling
from models.decoding.speculative import Decoder
from tests.shapes import Bushy
from tests.tiny import VOCAB_SIZE, tiny_model

FIRST_NAN = 12


def broken(model: PreTrainedModel) -> PreTrainedModel:
    """Its logits are NaN at and after a position."""

    def spoil(_model: Any, _args: Any, given: dict[str, Any], found: Any) -> Any:
        positions_BT = given["position_ids"][:, -found.logits.shape[1] :]
        is_bad_BT1 = (positions_BT >= FIRST_NAN).unsqueeze(-1)
        found.logits = found.logits.masked_fill(is_bad_BT1, torch.nan)
        return found

    model.register_forward_hook(spoil, with_kwargs=True)
    return model


def decoder_of(
    target: PreTrainedModel, draft: PreTrainedModel, rule: Rule | None = None, num_rows: int = 1
) -> Decoder:
    engines = [
        Engine(model, num_rows=num_rows, capacity=64, compiled=False) for model in (target, draft)
    ]
    drafter = ModelDrafter(engines[1], vocab_size=VOCAB_SIZE, rule=rule)
    return Decoder(engines[0], drafter, frozenset())


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "rule", [None, StopBelow(1e-9), Bushy((2, 2, 1))], ids=["chain", "shaped chain", "tree"]
)
@pytest.mark.parametrize("side", ["target", "draft"])
def test_nan_logits_name_the_side_the_row_and_the_position(
    side: str, rule: Rule | None, temperature: float, num_rows: int
) -> None:
    models = {"target": tiny_model(2), "draft": tiny_model(1, seed=1)}
    broken(models[side])
    decoder = decoder_of(models["target"], models["draft"], rule, num_rows)
    # the last row is ahead of the others
    lengths = [3, 6][-num_rows:]
    requests = [Request([5] * n, 20, torch.Generator().manual_seed(0)) for n in lengths]
    said = f"{side}: logits are NaN at row {num_rows - 1}, position {FIRST_NAN}"
    with pytest.raises(NonFiniteLogits, match=said):
        list(decoder.decode_all(requests, gamma=4, sampling=Sampling(temperature)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gamma": -1}, "gamma=-1: use 0 without a draft and 1 or more with one"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: use 1 or more"),
        ({"prompt": []}, "prompt: it is empty"),
        ({"prompt": [5] * 62}, "prompt of 62 tokens . 3 new ones exceed the context of 64"),
    ],
)
def test_what_cannot_be_decoded_is_refused(change: dict[str, Any], said: str) -> None:
    decoder = decoder_of(tiny_model(1), tiny_model(1, seed=1))
    rng = torch.Generator().manual_seed(0)
    request = {"prompt": [5, 6], "gamma": 2, "max_new_tokens": 3, "rng": rng, **change}
    with pytest.raises(ValueError, match=said):
        decoder.decode(**request, sampling=Sampling(0.0))
