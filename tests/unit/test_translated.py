"""Drafting over the tokens that two vocabularies share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from models.decoding.engine import Engine, narrow_head
from models.decoding.length import Rule, StopBelow
from models.decoding.rows import Request
from models.decoding.sampling import Sampling
from models.decoding.speculative import Decoder
from models.decoding.translated import TranslatedDrafter, Translation, texts_of
from tests.families import tiny_family
from tests.laws import (
    DEPTH,
    SIGNIFICANCE,
    SPREAD,
    VOCAB_SIZE,
    LookupEngine,
    decoder_p_value,
    exact_law,
    lookup,
)
from tests.shapes import Bushy
from tests.tiny import other_tokenizer, tiny_tokenizer

# of the target's six ids and the draft's nine, four are the same text
NUM_DRAFT_IDS = 9
TARGET_IDS, DRAFT_IDS = torch.tensor([0, 2, 3, 5]), torch.tensor([4, 1, 8, 3])


def translate(ids: Sequence[int]) -> list[int]:
    """As a tokenizer would: what comes later changes how the beginning is split."""
    known = dict(zip(TARGET_IDS.tolist(), DRAFT_IDS.tolist(), strict=True))
    found = [known.get(token, 0) for token in ids]
    return [2, *found] if sum(ids) % 3 == 0 else found


TRANSLATION = Translation(TARGET_IDS, DRAFT_IDS, translate)


def drafter_of(engine: object, rule: Rule | None) -> TranslatedDrafter:
    return TranslatedDrafter(engine, TRANSLATION, vocab_size=VOCAB_SIZE, rule=rule)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "sampling"),
    [
        (None, Sampling(1.0)),
        (None, Sampling(0.6, top_k=3)),
        (StopBelow(0.3), Sampling(1.5)),
        (Bushy((2, 2)), Sampling(1.0)),
        (None, Sampling(1.0, repetition_penalty=1.4, presence_penalty=0.3)),
        (StopBelow(0.1), Sampling(0.8, frequency_penalty=0.5, min_new_tokens=2)),
    ],
    ids=["chain", "truncated", "stopping", "tree", "penalties", "penalties and stopping"],
)
def test_the_output_law_is_the_targets(rule: Rule | None, sampling: Sampling) -> None:
    target = lookup(
        tiny_family("llama", vocab_size=VOCAB_SIZE, seed=3, initializer_range=SPREAD), DEPTH
    )
    model = tiny_family("gpt2", vocab_size=NUM_DRAFT_IDS, seed=2, initializer_range=SPREAD)
    narrow_head(model, DRAFT_IDS)
    decoder = Decoder(target, drafter_of(LookupEngine(model), rule), frozenset({2}))
    exact = exact_law(target, sampling, decoder.stop_ids)
    p_value = decoder_p_value(decoder, exact, sampling=sampling, gamma=4, num_samples=700)
    assert p_value > SIGNIFICANCE


@pytest.mark.parametrize("rule", [None, Bushy((2, 1))], ids=["chain", "tree"])
def test_what_is_cached_is_what_would_be_read_afresh(rule: Rule | None) -> None:
    """Real caches, several rows, texts whose beginnings are split anew."""

    def engine(num_rows: int) -> Engine:
        model = tiny_family("llama", vocab_size=NUM_DRAFT_IDS, seed=2)
        narrow_head(model, DRAFT_IDS)
        return Engine(model, num_rows=num_rows, capacity=64, compiled=False)

    def outputs(num_rows: int, requests: Sequence[Request]) -> list[tuple[list[int], int]]:
        target = Engine(
            tiny_family("gpt2", vocab_size=VOCAB_SIZE),
            num_rows=num_rows,
            capacity=64,
            compiled=False,
        )
        decoder = Decoder(target, drafter_of(engine(num_rows), rule), frozenset())
        rows = decoder.decode_all(requests, gamma=4, sampling=Sampling(0.8))
        found = sorted(rows, key=lambda row: row.index)
        return [(row.new_tokens, row.counts.num_accepted) for row in found]

    def requests() -> list[Request]:
        prompts = ([3, 1, 4], [1], [5, 2, 2, 0, 3, 3])
        return [Request(p, 30, torch.Generator().manual_seed(len(p))) for p in prompts]

    alone = [outputs(1, [request])[0] for request in requests()]
    assert outputs(2, requests()) == alone
    # every round drafts as a drafter does that has never seen the text
    used = drafter_of(engine(1), rule)
    used.reset(1)
    text = [3, 1, 4]
    used.start([text])
    uniform_BN = torch.rand(1, 4, generator=torch.Generator().manual_seed(0))
    for token in [0, 2, 5, 1, 3, 3, 0, 2]:
        found = used.draft([text], [4], Sampling(0.8), uniform_BN)
        fresh = drafter_of(engine(1), rule)
        fresh.reset(1)
        fresh.start([text])
        want = fresh.draft([text], [4], Sampling(0.8), uniform_BN)
        assert torch.equal(found.ids_BN, want.ids_BN)
        assert set(found.ids_BN[found.ids_BN >= 0].tolist()) <= set(TARGET_IDS.tolist())
        text = [*text, token]


def test_the_laws_along_an_answer_are_those_of_the_text_before_each_token() -> None:
    model = tiny_family("llama", vocab_size=NUM_DRAFT_IDS, seed=2)
    prompt, answer = [3, 1, 4], [0, 2, 5, 1, 3, 3, 0, 2]
    with torch.inference_mode():
        want = []
        for place in range(len(answer)):
            ids = translate([*prompt, *answer[:place]])
            logits_V = model(torch.tensor([ids])).logits[0, -1]
            want.append(torch.zeros(VOCAB_SIZE))
            want[-1][TARGET_IDS] = logits_V[DRAFT_IDS].softmax(-1)
    narrow_head(model, DRAFT_IDS)
    engine = Engine(model, num_rows=1, capacity=9, compiled=False)
    drafter = TranslatedDrafter(engine, TRANSLATION, vocab_size=VOCAB_SIZE)
    found = drafter.laws_along(prompt, answer)
    lengths = [len(translate([*prompt, *answer[:place]])) for place in range(len(answer))]
    assert max(lengths) > 9 > min(lengths)
    for law, exact, length in zip(found, want, lengths, strict=True):
        # none where the text has outgrown the draft's context
        torch.testing.assert_close(law, exact if length < 9 else torch.zeros_like(exact))


def test_tokenizers_share_the_tokens_of_the_same_text() -> None:
    target, draft = tiny_tokenizer(), other_tokenizer()
    found = Translation.of(target, draft)
    pairs = list(zip(found.target_ids_S.tolist(), found.draft_ids_S.tolist(), strict=True))
    assert len(pairs) > 256  # every byte, and merges
    ends = (target.eos_token_id, draft.eos_token_id)
    for ours, theirs in pairs:
        if (ours, theirs) != ends:
            assert target.convert_ids_to_tokens(ours) == draft.convert_ids_to_tokens(theirs)
    assert ends in pairs  # what ends a text does, whatever its name
    text = "def wrap(text):\n    return naïve 東京"
    ids = target(text).input_ids
    assert found.translate(ids) == draft(text).input_ids
    assert found.translate([]) == [draft.bos_token_id]


def test_words_of_sentence_pieces_are_found_in_byte_level_vocabularies() -> None:
    pieces = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(
            models.BPE(vocab={"<unk>": 0, "\u2581the": 1, "the": 2, "ö": 3, "<0x0A>": 4}, merges=[])
        ),
        unk_token="<unk>",
    )
    texts = texts_of(pieces)
    assert texts[b" the"] == 1 and texts[b"the"] == 2 and texts["ö".encode()] == 3
    assert texts[b"\n"] == 4  # a byte without a piece
    assert b"special <unk>" in texts


def test_nothing_in_common_is_refused() -> None:
    lonely = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab={"\u2581nowhere": 0}, merges=[]))
    )
    with pytest.raises(ValueError, match="shares no token"):
        Translation.of(tiny_tokenizer(), lonely)


def test_the_head_must_be_that_of_the_shared_ids() -> None:
    engine = Engine(
        tiny_family("llama", vocab_size=VOCAB_SIZE), num_rows=1, capacity=64, compiled=False
    )
    with pytest.raises(ValueError, match="narrow_head"):
        TranslatedDrafter(engine, TRANSLATION, vocab_size=VOCAB_SIZE)
