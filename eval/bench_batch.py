"""Several prompts decoded together: with the draft and without, and by one rule and another."""

# B rows

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from conf.choices import Verification
from eval.pair import ModelPair
from models.decoding.draft_model import ModelDrafter
from models.decoding.engine import Engine, measure_seconds
from models.decoding.rows import Request
from models.decoding.sampling import Sampling
from models.decoding.speculative import Decoder

NUM_ROWS = 8
CONTEXT = 128  # tokens in the cache while a step is timed
GREEDY = Sampling(0.0)


def batch_decoder(pair: ModelPair) -> Decoder:
    """The pair with a cache of eight rows; drafts have a constant length."""
    target, draft = (
        Engine(model, num_rows=NUM_ROWS, capacity=known.capacity, compiled=known.compiled)
        for model, known in (
            (pair.model, pair.decoder.target),
            (pair.draft, pair.drafter.engine),
        )
    )
    drafter = ModelDrafter(draft, vocab_size=pair.drafter.vocab_size, hot_ids=pair.hot_ids_H)
    return Decoder(target, drafter, pair.target.stop_ids)


def decode_batch(
    decoder: Decoder, prompts: Sequence[Sequence[int]], gamma: int, max_new_tokens: int
) -> int:
    """Greedily, all at once; the number of tokens."""
    requests = [Request(prompt, max_new_tokens, torch.Generator()) for prompt in prompts]
    rows = decoder.decode_all(requests, gamma=gamma, sampling=GREEDY)
    return sum(row.counts.num_tokens for row in rows)


def block_and_chain(
    pair: ModelPair, prompts: Sequence[Sequence[int]], gamma: int, max_new_tokens: int
) -> list[tuple[float, float]]:
    """Tokens per target call at temperature 1 under block and under chain verification, of each
    prompt.

    A gain of a few hundredths takes many prompts to see; in a batch a row's law is what it is by
    itself.
    """
    found: dict[Verification, list[float]] = {}
    for rule in (Verification.block, Verification.chain):
        requests = [
            Request(prompt, max_new_tokens, torch.Generator().manual_seed(seed))
            for seed, prompt in enumerate(prompts)
        ]
        decoder = replace(batch_decoder(pair), rule=rule)
        rows = [*decoder.decode_all(requests, gamma=gamma, sampling=Sampling(1.0))]
        rows.sort(key=lambda row: row.index)
        found[rule] = [row.counts.acceptance_length for row in rows]
    return [*zip(*found.values(), strict=True)]


def break_even(decoder: Decoder) -> float:
    """Acceptance rate at which drafting one token neither gains nor loses: c + v(2) - 1 of a batch
    (Leviathan et al. 2211.17192, theorem 3.8, with v measured).
    """
    assert isinstance(decoder.drafter, ModelDrafter)
    device = decoder.target.device
    context = [int(token) for token in torch.arange(CONTEXT) % 97 + 3]
    places = range(NUM_ROWS)
    uniform_B1 = torch.full((NUM_ROWS, 1), 0.5, device=device)
    decoder.target.reset(NUM_ROWS)
    decoder.drafter.reset(NUM_ROWS)
    decoder.target.start([context[:-1]] * NUM_ROWS, places)
    decoder.drafter.start([context] * NUM_ROWS, places)
    seconds: dict[str, list[float]] = {"one": [], "two": [], "draft": []}

    def target_step(width: int) -> None:
        at = torch.arange(CONTEXT - 1, CONTEXT - 1 + width, device=device)
        tokens_BT = torch.full((NUM_ROWS, width), 5, device=device)
        positions_BT = at.expand(NUM_ROWS, -1).contiguous()
        decoder.target.forward(tokens_BT, positions_BT, longest=CONTEXT + width)

    def draft_step() -> None:
        assert isinstance(decoder.drafter, ModelDrafter)
        decoder.drafter.draft([context] * NUM_ROWS, [1] * NUM_ROWS, GREEDY, uniform_B1)

    runs = {"one": lambda: target_step(1), "two": lambda: target_step(2), "draft": draft_step}
    for repeat in range(12):
        for name, run in runs.items():
            warmup = 0 if repeat else 3
            seconds[name] += measure_seconds(run, device=device, warmup=warmup, repeats=1)
    one, two, draft = (sorted(found)[len(found) // 2] for found in seconds.values())
    return (draft + two) / one - 1
