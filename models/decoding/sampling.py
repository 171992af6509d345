"""The one sampling law: every probability that draftsmith uses comes from `law`."""

# B batch, T positions, V vocabulary, K recorded ids

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.errors import UserError
from models.decoding.kernels import largest

# where T tokens stand in their texts: the first one, for all rows or for each, or every one
Places = int | Sequence[int] | Sequence[Sequence[int]] | Tensor


class NonFiniteLogits(UserError, FloatingPointError):
    """Logits that are no numbers. The message names the side and the position."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is the one-hot law of the most likely token.

    The penalties look at what came before (see `penalise`); 1 and 0 turn them off.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0  # no stop id before so many tokens

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"temperature={self.temperature}: it must be a finite number of 0 (greedy) or more."
            )
        if self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p < 1:
            raise ValueError(
                f"top_k={self.top_k}, top_p={self.top_p}, min_p={self.min_p}: use top_k >= 0, 0 <"
                " top_p <= 1 and 0 <= min_p < 1."
            )
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        if not all(map(math.isfinite, penalties)) or self.repetition_penalty <= 0:
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty},"
                f" presence_penalty={self.presence_penalty},"
                f" frequency_penalty={self.frequency_penalty}: use finite numbers, the first above"
                " 0."
            )
        if self.min_new_tokens < 0:
            raise ValueError(f"min_new_tokens={self.min_new_tokens}: use 0 or more.")

    @property
    def looks_back(self) -> bool:
        """Whether the law of a token depends on the tokens before it other than by the logits."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.min_new_tokens > 0
        )


def law(
    logits_BTV: Tensor,
    sampling: Sampling,
    side: str | None = "model",
    at: Places = 0,
) -> Tensor:
    """The probability law that tokens are drawn from, float32, same shape as the logits.

    softmax(logits / temperature), then restricted to the `top_k` likeliest ids, to the smallest set
    whose mass reaches `top_p`, and to ids of at least `min_p` times the largest probability, and
    renormalised. Temperature 0 gives the one-hot law of the first most likely id. Equal logits at a
    cut are all kept, so the law does not depend on their order. Raises NonFiniteLogits when a logit
    is NaN, naming the `side` (target or draft) and the position in the text; without a `side` the
    law is then NaN, for the caller to check, and nothing waits for a device.
    """
    logits = logits_BTV.float()
    if sampling.temperature == 0:
        best = likeliest(logits, side, at).unsqueeze(-1)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    probabilities = torch.softmax(logits / sampling.temperature, -1)
    check_finite(probabilities[..., :1], side, at)
    if sampling.top_k == 0 and sampling.top_p == 1.0 and sampling.min_p == 0.0:
        return probabilities
    return _truncate(probabilities, sampling)


def likeliest(logits_BTV: Tensor, side: str | None = "model", at: Places = 0) -> Tensor:
    """The first most likely ids, shape BT: where `law` at temperature 0 puts its mass. Raises as
    `law` does; without a `side` it is the id of a NaN, where there is one.
    """
    values_BT1, ids_BT1 = largest(logits_BTV, 1)
    check_finite(values_BT1, side, at)
    return ids_BT1.squeeze(-1)


def penalise(
    logits_1TV: Tensor,
    sampling: Sampling,
    *,
    text: Sequence[int],
    num_prompt: int,
    drafted_1G: Tensor,
    vocab_size: int,
    stop_ids: Collection[int] = (),
    ids_V: Tensor | None = None,
) -> Tensor:
    """Logits after the penalties of `sampling`, float32, to be given to `law` or `likeliest`.

    Of an id that came before, a positive logit is divided by `repetition_penalty` and a negative
    one multiplied (CTRL, 1909.05858). An id generated n > 0 times loses `presence_penalty` + n
    `frequency_penalty` (OpenAI's API). Stop ids are impossible until `min_new_tokens` were
    generated. The prompt counts for the first only.

    Args:
        logits_1TV: logits of the last T of the G + 1 positions after `text`, where `drafted_1G`
            follows.
        text: prompt and what was committed; the first `num_prompt` tokens are the prompt.
        vocab_size: ids there are.
        stop_ids: what `min_new_tokens` speaks of.
        ids_V: the ids of the columns, where these are not 0, 1, 2, ...
    """
    device, num_positions = logits_1TV.device, logits_1TV.shape[1]

    # not bincount or one_hot, which read their largest id back from a device
    def counted(ids: Sequence[int]) -> Tensor:
        ids_N = torch.tensor(ids, dtype=torch.long, device=device)
        return torch.zeros_like(every_V).index_add_(0, ids_N, torch.ones_like(ids_N))

    every_V = torch.arange(vocab_size, device=device)
    drafted_GV = (drafted_1G[0].unsqueeze(-1) == every_V).long()
    counts_TV = torch.cat([counted(text[num_prompt:]).unsqueeze(0), drafted_GV]).cumsum(0)
    counts_TV = counts_TV[-num_positions:]
    seen_TV = (counts_TV > 0) | (counted(text[:num_prompt]) > 0)
    num_new_T = len(text) - num_prompt + torch.arange(len(drafted_GV) + 1, device=device)
    stops_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    if sampling.min_new_tokens:
        stops_V[list(stop_ids)] = True
    barred_TV = stops_V & (num_new_T[-num_positions:, None] < sampling.min_new_tokens)
    if ids_V is not None:
        counts_TV, seen_TV, barred_TV = (
            table.index_select(1, ids_V) for table in (counts_TV, seen_TV, barred_TV)
        )
    size = logits_1TV.shape[-1]  # a draft may know fewer ids
    counts_TV, seen_TV, barred_TV = counts_TV[:, :size], seen_TV[:, :size], barred_TV[:, :size]
    logits = logits_1TV.float()
    factor = sampling.repetition_penalty
    logits = logits.where(~seen_TV, (logits / factor).where(logits > 0, logits * factor))
    logits = logits - sampling.frequency_penalty * counts_TV
    logits = logits - sampling.presence_penalty * (counts_TV > 0)
    return logits.masked_fill(barred_TV, -math.inf)


def _truncate(probabilities: Tensor, sampling: Sampling) -> Tensor:
    threshold = sampling.min_p * probabilities.amax(-1, keepdim=True)
    if 0 < sampling.top_k < probabilities.shape[-1]:
        threshold = threshold.maximum(probabilities.topk(sampling.top_k, -1).values[..., -1:])
    if sampling.top_p < 1:
        ordered = probabilities.sort(-1, descending=True).values
        before = ordered.cumsum(-1) - ordered
        kept = (before < sampling.top_p).sum(-1, keepdim=True)
        threshold = threshold.maximum(ordered.gather(-1, kept - 1))
    truncated = probabilities.where(probabilities >= threshold, 0.0)
    return truncated / truncated.sum(-1, keepdim=True)


def check_finite(values_BTV: Tensor, side: str | None, at: Places = 0) -> None:
    """Raise NonFiniteLogits naming side and position when any value is NaN; one reduction, one
    sync; without a side neither. Without a B there is one row.
    """
    if side is None or not bool(values_BTV.isnan().any()):
        return
    *rows, place, _ = values_BTV.isnan().nonzero()[0].tolist()
    row = rows[0] if rows else 0
    own = at if isinstance(at, int) else at[row]
    position = own + place if isinstance(own, int) else int(own[place])
    raise NonFiniteLogits(
        f"{side}: logits are NaN at row {row}, position {position}. "
        "Check the weights, or load the model in float32."
    )


def draw(law_BTV: Tensor, uniform_BT: Tensor) -> Tensor:
    """Token ids drawn by inverting the cumulative law: one uniform in [0, 1) per position, shape
    BT.

    The law needs not be normalised: the uniform is scaled by its sum. An id of probability zero is
    never drawn.
    """
    cumulative = law_BTV.cumsum(-1)
    total = cumulative[..., -1:]
    # rounding can put the goal on the very last step of the sum, beyond every id with mass
    goal = (uniform_BT.unsqueeze(-1) * total).minimum(total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, goal, right=True).squeeze(-1)


def drawn_apart(law_V: Tensor, uniform_N: Tensor) -> list[int]:
    """Up to N different ids, each drawn from what those before it leave of a law; fewer where the
    law has fewer.
    """
    left_V = law_V.clone()
    found: list[int] = []
    for uniform in uniform_N:
        if found and not bool(left_V.any()):
            break
        found.append(int(draw(left_V.view(1, 1, -1), uniform.view(1, 1))))
        left_V[found[-1]] = 0
    return found


def draw_mixed(
    logits_BV: Tensor,
    temperature_B: Tensor,
    uniform_B: Tensor,
    recorded: tuple[Tensor, Tensor],
) -> Tensor:
    """One token per row where every row has its own temperature: the same law as `law` + `draw`,
    several times faster.

    `recorded` are the log-probabilities and ids of each row's k likeliest tokens, in falling order;
    logits are of any type. The cumulative law is inverted over those ids first, and over the rest
    of the vocabulary only for rows whose uniform falls beyond them; only rows at another
    temperature than 0 and 1 need a normaliser of their own.
    """
    log_p_BK, ids_BK = recorded
    top_BK = logits_BV.gather(-1, ids_BK).float()
    largest_B1 = top_BK.amax(-1, keepdim=True)
    greedy_B = temperature_B == 0
    inverse_B1 = (1 / temperature_B.where(~greedy_B, 1.0)).unsqueeze(-1)

    # relative to the largest: at a low temperature the scaled logits are too large for float32 to
    # tell laws apart
    def scaled(rows: Tensor) -> Tensor:
        return (logits_BV[rows].float() - largest_B1[rows]) * inverse_B1[rows]

    logsum_B1 = -log_p_BK[:, :1]
    tempered = (~greedy_B & (temperature_B != 1)).nonzero().squeeze(-1)
    if len(tempered):
        logsum_B1[tempered] = scaled(tempered).logsumexp(-1, keepdim=True)
    cumulative_BK = ((top_BK - largest_B1) * inverse_B1 - logsum_B1).exp().cumsum(-1)
    index_B = torch.searchsorted(cumulative_BK, uniform_B.unsqueeze(-1), right=True).squeeze(-1)
    tokens_B = ids_BK.gather(-1, index_B.clamp(max=ids_BK.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    # top-k may order equal logits as it likes; the greedy token is the first of them, as in `law`
    first_B = ids_BK.where(top_BK == largest_B1, logits_BV.shape[-1]).amin(-1)
    tokens_B = tokens_B.where(~greedy_B, first_B)
    beyond = ((index_B >= ids_BK.shape[-1]) & ~greedy_B).nonzero().squeeze(-1)
    if len(beyond):
        whole = (scaled(beyond) - logsum_B1[beyond]).exp()
        rest = whole.scatter(-1, ids_BK[beyond], 0.0)
        # by rounding the recorded ids can sum to less than 1 though nothing else has mass
        rest = rest.where(rest.sum(-1, keepdim=True) > 0, whole)
        mass = cumulative_BK[beyond, -1]
        left = ((uniform_B[beyond] - mass) / (1 - mass)).clamp(0, 1)
        tokens_B[beyond] = draw(rest, left)
    return tokens_B
