"""Which drafted tokens are kept: pure functions on laws, tokens and uniforms.

Rows may have drafted different numbers of tokens. Behind a row's own ones the id is NOTHING and q
is zero everywhere, so what is left of p there is p: the bonus token's law.
"""

# B batch, G drafted positions (gamma), N candidates of a tree, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from models.decoding.sampling import draw
from models.decoding.tree import ROOT

NOTHING = -1  # in the place of a drafted id
RESIDUAL_FLOOR = 1e-6  # below this the residual mass is rounding noise of float32 laws


class Verdict(NamedTuple):
    """`num_accepted` drafted tokens are kept, then `next_token` is emitted (a correction, or the
    bonus token). Of a tree, `kept` tells which candidates; of a chain they are the first ones.
    """

    num_accepted_B: Tensor
    next_token_B: Tensor
    kept_BN: Tensor | None = None


class Kept(NamedTuple):
    """On the host, of one row: which of its `drafted` ids are kept, and the token after them."""

    drafted: list[int]
    nodes: list[int]
    next_token: int


def on_host(verdict: Verdict, drafted_BN: Tensor) -> list[Kept]:
    """Every row's, in one copy."""
    columns = [verdict.num_accepted_B.unsqueeze(-1), verdict.next_token_B.unsqueeze(-1), drafted_BN]
    columns += [] if verdict.kept_BN is None else [verdict.kept_BN]
    num, found = drafted_BN.shape[1], []
    for num_accepted, next_token, *rest in torch.cat(columns, 1).tolist():
        nodes = [*range(num_accepted)]
        if verdict.kept_BN is not None:
            nodes = [node for node, is_kept in enumerate(rest[num:]) if is_kept]
        found.append(Kept(rest[:num], nodes, next_token))
    return found


def chain(
    p: Tensor, q: Tensor, drafted_BG: Tensor, uniform_BG: Tensor, uniform_B: Tensor
) -> Verdict:
    """Speculative sampling of a chain (Leviathan et al. 2211.17192, Chen et al. 2302.01318).

    Args:
        p: target laws at the G drafted positions and the one after, shape B G+1 V.
        q: laws the drafted tokens were really drawn from, shape B G V.
        drafted_BG: the drafted ids, NOTHING behind those of a shorter row.
        uniform_BG: one independent uniform per drafted position.
        uniform_B: one more, for the token emitted at the end.

    Position i is accepted when u_i < p_i(x_i) / q_i(x_i). At the first rejection y ~ norm((p_i -
    q_i)+) is emitted, and y ~ p_{G+1} when all are accepted. The emitted tokens follow the target's
    law exactly.
    """
    num_drafted = drafted_BG.shape[1]
    at_draft = drafted_BG.clamp(min=0).unsqueeze(-1)
    p_BG = p[:, :num_drafted].gather(-1, at_draft).squeeze(-1)
    q_BG = q.gather(-1, at_draft).squeeze(-1)
    accepted_BG = (uniform_BG * q_BG < p_BG) & (drafted_BG != NOTHING)
    num_accepted_B = accepted_BG.int().cumprod(-1).sum(-1)
    rows = torch.arange(len(p), device=p.device)
    p_BV = p[rows, num_accepted_B]
    if num_drafted == 0:
        return Verdict(num_accepted_B, draw(p_BV.unsqueeze(1), uniform_B.unsqueeze(1)).squeeze(1))
    q_BV = q[rows, num_accepted_B.clamp(max=num_drafted - 1)]
    rejected_B1 = (num_accepted_B < num_drafted).unsqueeze(-1)
    return Verdict(
        num_accepted_B,
        draw(residual(p_BV, q_BV, rejected_B1).unsqueeze(1), uniform_B.unsqueeze(1)).squeeze(1),
    )


def greedy(
    likeliest_BT: Tensor, drafted_BN: Tensor, parents: Sequence[Sequence[int]] | None = None
) -> list[Kept]:
    """What `chain`, `block` and `tree` come to at temperature 0, where every law is one-hot: a
    drafted id is kept while it is the target's most likely one.

    Args:
        likeliest_BT: the target's most likely ids after the text and after each drafted token.
        drafted_BN: the drafted ids.
        parents: of trees: the candidate that each of a row's own follows, -1 for the text.

    The host has to see these few ids anyway, and is done sooner than a dozen small operations.
    """
    num = drafted_BN.shape[1]
    found = []
    for row, numbers in enumerate(torch.cat([drafted_BN, likeliest_BT], 1).tolist()):
        drafted, likeliest = numbers[:num], numbers[num:]
        nodes: list[int] = []
        last = ROOT
        for node, parent in enumerate(range(ROOT, num - 1) if parents is None else parents[row]):
            if parent == last and drafted[node] == likeliest[1 + last]:
                nodes.append(node)
                last = node
        found.append(Kept(drafted, nodes, likeliest[1 + last]))
    return found


def tree(
    p: Tensor,
    q: Tensor,
    drafted_BN: Tensor,
    parents_BN: Tensor,
    uniform_BN: Tensor,
    uniform_B: Tensor,
) -> Verdict:
    """Recursive rejection over a tree whose candidates after one token were drawn without
    replacement (SpecInfer 2305.09781, Sequoia 2402.12374): the emitted tokens follow the target's
    law exactly.

    Args:
        p: target laws after the text and after each candidate, shape B N+1 V.
        q: laws that the candidates after the text and after each candidate were drawn from, the
            same shape; the second child was drawn from what the first leaves of q, and so on.
        drafted_BN: the candidates, parents first, children of one parent as they were drawn.
        parents_BN: the candidate that each follows, -1 for the text.
        uniform_BN: one independent uniform per candidate.
        uniform_B: one more, for the token emitted at the end.

    The children of the last kept token are tested in turn: x is kept when u < p(x) / q(x), else p
    becomes norm((p - q)+), q loses x and is normalised again. When none is kept, y ~ p.
    """
    at_B = torch.zeros_like(uniform_B, dtype=torch.long)  # 1 + the last kept candidate
    p_BV, q_BV = p[:, 0], q[:, 0]
    kept_BN = torch.zeros_like(drafted_BN, dtype=torch.bool)
    for node in range(drafted_BN.shape[1]):
        x_B1 = drafted_BN[:, node, None].clamp(min=0)
        tested_B1 = (drafted_BN[:, node, None] != NOTHING) & (
            parents_BN[:, node, None] + 1 == at_B.unsqueeze(-1)
        )
        passes_B1 = uniform_BN[:, node, None] * q_BV.gather(-1, x_B1) < p_BV.gather(-1, x_B1)
        kept_B1, failed_B1 = tested_B1 & passes_B1, tested_B1 & ~passes_B1
        left_BV = normalised(residual(p_BV, q_BV, failed_B1))
        p_BV = p[:, node + 1].where(kept_B1, left_BV.where(failed_B1, p_BV))
        others_BV = normalised(q_BV.scatter(-1, x_B1, 0.0))
        q_BV = q[:, node + 1].where(kept_B1, others_BV.where(failed_B1, q_BV))
        at_B = at_B.where(~kept_B1[:, 0], node + 1)
        kept_BN[:, node] = kept_B1[:, 0]
    next_token_B = draw(p_BV.unsqueeze(1), uniform_B.unsqueeze(1)).squeeze(1)
    return Verdict(kept_BN.sum(-1), next_token_B, kept_BN)


def block(
    p: Tensor, q: Tensor, drafted_BG: Tensor, uniform_BG: Tensor, uniform_B: Tensor
) -> Verdict:
    """Block verification (2403.10444): the same output law as `chain`, and at least as many
    accepted tokens on average.

    With b_0 = 1 and b_i = min(1, b_{i-1} p_i(x_i) / q_i(x_i)), prefix i < G is kept when u_i <= r_i
    / (r_i + 1 - b_i), r_i = sum (b_i p_{i+1} - q_{i+1})+, and all G tokens when u_G <= b_G. The
    longest prefix kept counts, whatever happened to shorter ones. Then y ~ norm((b p - q)+) at its
    end, and y ~ p after all G. Arguments as of `chain`.
    """
    num_drafted = drafted_BG.shape[1]
    if num_drafted <= 1:  # the same rule
        return chain(p, q, drafted_BG, uniform_BG, uniform_B)
    at_draft = drafted_BG.clamp(min=0).unsqueeze(-1)
    p_BG = p[:, :num_drafted].gather(-1, at_draft).squeeze(-1).double()
    q_BG = q.gather(-1, at_draft).squeeze(-1).double()
    # log b_i = S_i - max over j <= i of S_j, S the cumulative log-ratio and S_0 = 0
    ratio_BG = (p_BG / q_BG).where(drafted_BG != NOTHING, 0.0)
    sums_BG = ratio_BG.log().cumsum(-1)
    b_BG = (sums_BG - sums_BG.cummax(-1).values.clamp(min=0)).exp()
    # kept lengths 1 to G-1 are judged by what the law of the next position leaves
    left_BG = (b_BG[:, :-1, None] * p[:, 1:num_drafted] - q[:, 1:]).clamp_(min=0).sum(-1)
    room_BG = left_BG + 1 - b_BG[:, :-1]
    keep_BG = (left_BG / room_BG).where(room_BG > RESIDUAL_FLOOR, 1.0)
    keep_BG = torch.cat([keep_BG, b_BG[:, -1:]], -1)
    num_accepted_B = longest_kept(uniform_BG < keep_BG)
    rows = torch.arange(len(p), device=p.device)
    b_B = torch.cat([torch.ones_like(b_BG[:, :1]), b_BG], -1)[rows, num_accepted_B].to(p.dtype)
    p_BV = p[rows, num_accepted_B]
    q_BV = q[rows, num_accepted_B.clamp(max=num_drafted - 1)]
    rejected_B1 = (num_accepted_B < num_drafted).unsqueeze(-1)
    excess_BV = residual(p_BV, q_BV, rejected_B1, b_B.unsqueeze(-1))
    return Verdict(num_accepted_B, draw(excess_BV.unsqueeze(1), uniform_B.unsqueeze(1)).squeeze(1))


def longest_kept(kept_BG: Tensor) -> Tensor:
    """Length of the longest prefix that is kept."""
    return (kept_BG * torch.arange(1, kept_BG.shape[1] + 1, device=kept_BG.device)).amax(-1)


def residual(p_BV: Tensor, q_BV: Tensor, rejected_B1: Tensor, b_B1: Tensor | float = 1.0) -> Tensor:
    """(b p - q)+ where a draft was rejected and p elsewhere, un-normalised."""
    excess_BV = (b_B1 * p_BV - q_BV).clamp_(min=0)
    # p == q leaves no residual, and then nothing can have been rejected but by rounding
    usable_B1 = rejected_B1 & (excess_BV.sum(-1, keepdim=True) > RESIDUAL_FLOOR)
    return excess_BV.where(usable_B1, p_BV)


def normalised(law_BV: Tensor) -> Tensor:
    """Of sum 1; zero stays zero."""
    total_B1 = law_BV.sum(-1, keepdim=True)
    return law_BV / total_B1.where(total_B1 > 0, 1.0)
