"""Outputs end with the token that completes a stop string, with and without a draft."""

from __future__ import annotations

import pytest
import torch

from models.decoding.counts import Counts
from models.decoding.draft_model import ModelDrafter
from models.decoding.engine import Engine
from models.decoding.sampling import Sampling
from models.decoding.speculative import Decoder
from models.decoding.stops import StopStrings
from tests.families import tiny_family
from tests.tiny import VOCAB_SIZE, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


@pytest.mark.parametrize(
    "text", ["a user asks; the wrapper wraps: done.", "caf\u00e9 \u2603 na\u00efve \u2603."]
)
@pytest.mark.parametrize("num_new", [1, 3])
def test_every_substring_ends_a_text_where_it_is_complete(text: str, num_new: int) -> None:
    """Against the text of all tokens so far, token by token."""
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    for start in range(0, len(text), 3):
        for length in (1, 2, 5):
            string = text[start : start + length]
            stops = StopStrings(TOKENIZER, (string, "not in there"))
            complete = next(
                end for end in range(1, len(tokens) + 1) if string in TOKENIZER.decode(tokens[:end])
            )
            found = None
            for end in range(num_new, len(tokens) + num_new, num_new):
                new = min(num_new, len(tokens) - end + num_new)
                place = stops.first(tokens[: end - num_new + new], new)
                if place is not None:
                    found = end - num_new + place + 1
                    break
            assert found == complete


def test_no_strings_end_nothing() -> None:
    tokens = TOKENIZER.encode("wrap it. wrap", add_special_tokens=False)
    assert StopStrings(TOKENIZER, ()).first(tokens, len(tokens)) is None


def test_an_empty_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(TOKENIZER, ("end", ""))


@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_decoding_ends_with_a_stop_string(gamma: int) -> None:
    """The prompt does not count, and what a draft says behind the string is dropped."""
    model = tiny_family("llama", vocab_size=VOCAB_SIZE)
    target = Engine(model, num_rows=1, capacity=64, compiled=False)
    drafter = ModelDrafter(
        Engine(model, num_rows=1, capacity=64, compiled=False), vocab_size=VOCAB_SIZE
    )
    settings = {"max_new_tokens": 24, "sampling": Sampling(1.5)}

    def decode(stops: StopStrings | None, gamma: int) -> tuple[list[int], Counts]:
        decoder = Decoder(target, drafter, frozenset(), stop_strings=stops)
        rng = torch.Generator().manual_seed(3)
        return decoder.decode(PROMPT, gamma=gamma, rng=rng, **settings)  # type: ignore[arg-type]

    whole, _ = decode(None, gamma)
    for end in range(2, 24, 5):
        string = TOKENIZER.decode(whole[end - 2 : end])
        want = next(n for n in range(1, 25) if string in TOKENIZER.decode(whole[:n]))
        found, counts = decode(StopStrings(TOKENIZER, (string,)), gamma)
        assert found == whole[:want]
        assert counts.num_tokens == want


PROMPT = [40, 41, 42]
