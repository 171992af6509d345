"""What the statistical tests share: exact output laws, samples of a decoder, their comparison."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import PreTrainedModel

from models.decoding.rows import Request
from models.decoding.sampling import Sampling, law, penalise
from models.decoding.speculative import Decoder
from models.decoding.tree import Branches

SIGNIFICANCE = 1e-6
LEAST_EXPECTED = 5  # samples in a cell, for the chi-square approximation to hold

Law = dict[tuple[int, ...], float]


def law_p_value(samples: Iterable[tuple[int, ...]], expected: Law) -> float:
    """Chi-square p-value of samples under an exact law; 0 when one of them is impossible."""
    counts = Counter(samples)
    if any(expected.get(sample, 0.0) == 0.0 for sample in counts):
        return 0.0
    total = counts.total()
    cells = sorted((probability * total, counts[key]) for key, probability in expected.items())
    pooled: list[tuple[float, int]] = []
    wanted, seen = 0.0, 0
    for want, count in cells:  # rare cells are summed until the sum is not rare
        wanted, seen = wanted + want, seen + count
        if wanted >= LEAST_EXPECTED:
            pooled.append((wanted, seen))
            wanted, seen = 0.0, 0
    if wanted:
        last = pooled.pop()
        pooled.append((last[0] + wanted, last[1] + seen))
    if len(pooled) == 1:  # one possible output, and nothing else was seen
        return 1.0
    wants = torch.tensor([want for want, _ in pooled], dtype=torch.float64)
    seens = [count for _, count in pooled]
    return float(chisquare(seens, (wants * (total / wants.sum())).numpy()).pvalue)


VOCAB_SIZE = 6
PROMPT = (3, 1)
NUM_CHECKED = 3  # tokens whose joint law is compared
DEPTH = 4  # continuations of the prompt that are computed beforehand
SPREAD = 0.25  # of the weights: every token is likely somewhere, and the two models disagree


TRUNCATIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "top_k+top_p+min_p": {"top_k": 5, "top_p": 0.9, "min_p": 0.05},
}
TEMPERATURES = [0.6, 1.0, 1.5]
GAMMAS = [1, 2, 4]
HOT_IDS = torch.tensor([4, 0, 3, 1])  # neither in order nor without gaps


class LookupEngine:
    """A real model's uncached logits behind the interface of Engine, each context computed once.

    A row of tokens stands for the cache: what a decoder writes at wrong positions, or leaves there,
    is read as it would be from keys and values. That the real Engine gives uncached logits is shown
    in test_cache.py.
    """

    def __init__(self, model: PreTrainedModel):
        self.model, self.device, self.capacity = model, torch.device("cpu"), 32
        self.num_rows = 1
        self.row: list[int] = []
        self.cache = SimpleNamespace(move=self.move)
        self.index: dict[tuple[int, ...], int] = {}
        self.table = torch.empty(0)

    def know(self, contexts: Sequence[tuple[int, ...]]) -> None:
        """Compute the logits after contexts of one length."""
        with torch.inference_mode():
            logits = self.model(torch.tensor(contexts), use_cache=False, logits_to_keep=1).logits[
                :, 0
            ]
        self.index.update(zip(contexts, itertools.count(len(self.index)), strict=False))
        self.table = torch.cat([self.table, logits]) if len(self.table) else logits

    def after(self, context: tuple[int, ...]) -> Tensor:
        """Logits after one context, shape V."""
        if context not in self.index:
            self.know([context])
        return self.table[self.index[context]]

    def reset(self, num_rows: int) -> None:
        assert num_rows == 1

    def start(self, texts: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        assert list(rows) == [0]
        self.row[: len(texts[0])] = texts[0]

    def move(self, _row: int, sources: Sequence[int], start: int) -> None:
        self.row[start : start + len(sources)] = [self.row[place] for place in sources]

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        *,
        longest: int,
        last_only: bool = False,
        branches: Branches | None = None,
    ) -> Tensor:
        self.row += [0] * (longest - len(self.row))
        slots = (positions_BT if branches is None else branches.slots_BT)[0].tolist()
        for slot, token in zip(slots, tokens_BT[0].tolist(), strict=True):
            self.row[slot] = token
        if branches is None:
            contexts = [self.row[: slot + 1] for slot in slots]
        else:
            length = int(branches.lengths_B[0])
            contexts = [
                self.row[: min(length, slot + 1)]
                + [self.row[length + n] for n, is_seen in enumerate(sees) if is_seen]
                for slot, sees in zip(slots, branches.sees_BTN[0].tolist(), strict=True)
            ]
            assert [len(one) - 1 for one in contexts] == positions_BT[0].tolist()
        read = contexts[-1:] if last_only else contexts
        return torch.stack([self.after(tuple(context)) for context in read]).unsqueeze(0)


def lookup(model: PreTrainedModel, depth: int) -> LookupEngine:
    """With all continuations of the prompt by up to `depth` tokens computed, in large batches."""
    engine = LookupEngine(model)
    for extra in range(depth + 1):
        engine.know([PROMPT + rest for rest in itertools.product(range(VOCAB_SIZE), repeat=extra)])
    return engine


def exact_law(target: LookupEngine, sampling: Sampling, stop_ids: frozenset[int]) -> Law:
    """Law of the first tokens of an output, by enumeration with the target itself."""
    open_law: Law = {(): 1.0}
    ended: Law = {}
    for _ in range(NUM_CHECKED):
        longer: Law = {}
        for tokens, probability in open_law.items():
            logits = target.after(PROMPT + tokens).view(1, 1, -1)
            if sampling.looks_back:
                logits = penalise(
                    logits,
                    sampling,
                    text=[*PROMPT, *tokens],
                    num_prompt=len(PROMPT),
                    drafted_1G=torch.empty(1, 0, dtype=torch.long),
                    vocab_size=VOCAB_SIZE,
                    stop_ids=stop_ids,
                )
            after_V = law(logits, sampling)[0, 0].double()
            for token, chance in enumerate(after_V.tolist()):
                held = ended if token in stop_ids else longer
                held[*tokens, token] = probability * chance
        open_law = longer
    return ended | open_law


def decoder_p_value(
    decoder: Decoder, exact: Law, *, sampling: Sampling, gamma: int, num_samples: int, seed: int = 0
) -> float:
    """The check that a correct decoder passes and each planted bug fails."""
    rng = torch.Generator().manual_seed(seed)
    # long enough for the first round to draft `gamma`, with a second one after rejections
    requests = [Request(PROMPT, max(gamma + 1, NUM_CHECKED), rng) for _ in range(num_samples)]
    rows = decoder.decode_all(requests, gamma=gamma, sampling=sampling)
    return law_p_value([tuple(row.new_tokens[:NUM_CHECKED]) for row in rows], exact)
