"""A draft model as drafter: chains of a constant length, and chains or trees shaped by a rule."""

# B rows, G drafted positions (gamma), N candidates of a tree, T fed tokens, K candidates of a law,
# H ids the draft proposes, V vocabulary of the target

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from models.decoding.drafters import Proposal
from models.decoding.engine import Engine
from models.decoding.growing import Growing, Held
from models.decoding.kernels import largest
from models.decoding.length import Look, Rule, Shape
from models.decoding.routing import FEW_QUERIES
from models.decoding.sampling import (
    Sampling,
    check_finite,
    draw,
    drawn_apart,
    law,
    likeliest,
    penalise,
)
from models.decoding.tree import ROOT, Branches
from models.decoding.verify import NOTHING


class ModelDrafter:
    """An independent draft model with a cache of its own, for as many rows as its engine has.

    With `hot_ids` the draft's head has been narrowed to those ids (FR-Spec, 2502.14856): q is zero
    elsewhere, so the output law stays the target's and the head costs len(hot_ids) / V of its time.

    Without a `rule` every draft is a chain of gamma tokens, and no token waits for anything to
    reach the host. A rule looks at the draft's laws to decide on a chain's length or a tree's
    shape; penalties of `sampling` are those of one past, so under them all drafts are chains.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        vocab_size: int,
        hot_ids: Tensor | None = None,
        rule: Rule | None = None,
    ):
        self.engine, self.vocab_size, self.hot_ids = engine, vocab_size, hot_ids
        self.rule = rule
        self._known_ids: list[int] | None = None if hot_ids is None else hot_ids.tolist()
        self._rows = [Held(0, 0) for _ in range(engine.num_rows)]
        self._nothing = torch.empty(1, 0, dtype=torch.long, device=engine.device)

    def reset(self, num_rows: int) -> None:
        """Forget all texts; room for so many."""
        self.engine.reset(num_rows)
        self._rows = [Held(0, 0) for _ in range(num_rows)]

    def start(self, prompts: Sequence[Sequence[int]], rows: Sequence[int] = (0,)) -> None:
        """Read prompts, but for their last tokens, into rows."""
        read = [prompt[: min(len(prompt) - 1, self.engine.capacity)] for prompt in prompts]
        self.engine.start(read, rows)
        for prompt, known, row in zip(prompts, read, rows, strict=True):
            self._rows[row] = Held(len(prompt), len(known))

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows; the kept ones are renumbered in the given order."""
        self.engine.cache.keep(rows)
        self._rows = [self._rows[row] for row in rows]

    def forget(self, row: int, num_tokens: int) -> None:
        """A row's text has changed behind so many tokens."""
        held = self._rows[row]
        if num_tokens < held.num_sure:
            held.num_sure, held.drafted = num_tokens, []

    def draft(
        self,
        texts: Sequence[Sequence[int]],
        most: Sequence[int],
        sampling: Sampling,
        uniform_BG: Tensor,
    ) -> Proposal:
        """At most so many tokens after each text, one uniform each; none where the text has
        outgrown the draft's context.
        """
        capacity = self.engine.capacity
        most = [min(m, max(0, capacity - len(t))) for m, t in zip(most, texts, strict=True)]
        if not any(most):
            return Proposal.nothing(len(texts), self.engine.device)
        texts = [text if len(text) <= capacity else text[:capacity] for text in texts]
        if self.rule is None:
            return self._chain(texts, most, sampling, uniform_BG, self._read(texts))
        shape = self.rule.shape(is_greedy=sampling.temperature == 0, is_chain=sampling.looks_back)
        if not shape.continues([1.0]):  # not even a first step would pay
            return Proposal.nothing(len(texts), self.engine.device)
        return self._shaped(texts, most, sampling, uniform_BG, self._read(texts), shape)

    def draws_trees(self, sampling: Sampling) -> bool:
        """Whether drafts are trees of drawn candidates, which have a rule of verification of their
        own.
        """
        if self.rule is None or sampling.temperature == 0:
            return False
        shape = self.rule.shape(is_greedy=False, is_chain=sampling.looks_back)
        return shape.most_candidates > 1

    def _read(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Catch up with the texts; logits after their last tokens."""
        for text, held in zip(texts, self._rows, strict=True):
            held.settle(text)
        pairs = list(zip(texts, self._rows, strict=True))
        # one call of more tokens would need code of its own
        while max(len(text) - held.num_sure for text, held in pairs) > FEW_QUERIES:
            for text, held in pairs:
                held.num_sure = min(held.num_sure + FEW_QUERIES, len(text) - 1)
            self._feed(texts, [held.num_sure for held in self._rows], FEW_QUERIES)
        width = max(len(text) - held.num_sure for text, held in pairs)
        for text, held in pairs:
            held.num_sure = len(text)
        return self._feed(texts, [len(text) for text in texts], width)

    def _feed(self, texts: Sequence[Sequence[int]], ends: Sequence[int], width: int) -> Tensor:
        """The `width` tokens of each text before its end; a shorter one begins several times."""
        places = [[max(0, end - width + i) for i in range(width)] for end in ends]
        fed = [[text[i] for i in own] for text, own in zip(texts, places, strict=True)]
        fed_BT, places_BT = (torch.tensor(x, device=self.engine.device) for x in (fed, places))
        return self._logits(fed_BT, places_BT, longest=max(ends), last_only=True)

    def _logits(
        self,
        fed_BT: Tensor,
        positions_BT: Tensor,
        *,
        longest: int,
        last_only: bool,
        branches: Branches | None = None,
    ) -> Tensor:
        logits = self.engine.forward(
            fed_BT, positions_BT, longest=longest, last_only=last_only, branches=branches
        )
        # a padded draft vocabulary is cut before the law: ids the target lacks have no mass
        return logits if self.hot_ids is not None else logits[..., : self.vocab_size]

    def _chain(
        self,
        texts: Sequence[Sequence[int]],
        most: Sequence[int],
        sampling: Sampling,
        uniform_BG: Tensor,
        logits_B1H: Tensor,
    ) -> Proposal:
        """Chains of constant length, without a look at what is drafted."""
        gamma = max(most)
        longest = max(map(len, texts))
        last = self.engine.capacity - 1
        lengths_B1 = torch.tensor([[len(text)] for text in texts], device=self.engine.device)
        ids: list[Tensor] = []
        laws: list[Tensor] = []
        seen: list[Tensor] = []  # a number of each law, NaN where it is
        for step in range(gamma):
            if step:
                # rows that draft less have nothing to lose at the end of the cache
                places_B1 = (lengths_B1 + (step - 1)).clamp(max=last)
                reached = min(longest + step, last + 1)
                logits_B1H = self._logits(ids[-1], places_B1, longest=reached, last_only=True)
            if sampling.looks_back:
                drafted = torch.cat(ids, 1) if ids else self._nothing.expand(len(texts), 0)
                logits_B1H = self._penalised(logits_B1H, sampling, texts, drafted)
            if sampling.temperature == 0:
                index_B1 = likeliest(logits_B1H, side=None)
                seen.append(logits_B1H.gather(-1, index_B1.unsqueeze(-1)))
            else:
                q_B1H = law(logits_B1H, sampling, side=None)
                laws.append(q_B1H)
                seen.append(q_B1H[..., :1])
                # where the law is NaN any index may be drawn
                index_B1 = draw(q_B1H, uniform_BG[:, step, None]).clamp(max=q_B1H.shape[-1] - 1)
            ids.append(index_B1 if self.hot_ids is None else self.hot_ids[index_B1])
        check_finite(torch.cat(seen, 1), "draft", [len(text) - 1 for text in texts])
        ids_BG = torch.cat(ids, 1)
        for row, held in enumerate(self._rows):
            held.drafted = ids_BG[row, : max(0, most[row] - 1)]
        q = self._spread(torch.cat(laws, 1)) if laws else None
        if min(most) < gamma:
            most_B1 = torch.tensor(most, device=ids_BG.device).unsqueeze(-1)
            absent_BG = torch.arange(gamma, device=ids_BG.device) >= most_B1
            ids_BG = ids_BG.masked_fill(absent_BG, NOTHING)
            q = None if q is None else q.masked_fill(absent_BG.unsqueeze(-1), 0.0)
        return Proposal(ids_BG, q, gamma)

    def _shaped(
        self,
        texts: Sequence[Sequence[int]],
        most: Sequence[int],
        sampling: Sampling,
        uniform_BG: Tensor,
        logits_BTH: Tensor,
        shape: Shape,
    ) -> Proposal:
        """Chains or trees, as the rule says."""
        is_chain = shape.most_candidates == 1
        drafts = [Growing(len(text), room) for text, room in zip(texts, most, strict=True)]
        fed: list[list[int]] = [[ROOT] for _ in drafts]
        num_steps = 1
        while True:
            if sampling.looks_back:
                longest = max(len(draft.tree) for draft in drafts)
                drafted = [d.tree.ids + [0] * (longest - len(d.tree)) for d in drafts]
                drafted_BG = torch.tensor(drafted, dtype=torch.long, device=logits_BTH.device)
                logits_BTH = self._penalised(logits_BTH, sampling, texts, drafted_BG)
            self._grow(drafts, fed, logits_BTH, sampling, uniform_BG, shape)
            fed = [draft.go_on(shape) for draft in drafts]
            if not any(fed):
                break
            num_steps += 1
            logits_BTH = self._logits_after(drafts, fed, texts, is_chain=is_chain)
        for draft, held in zip(drafts, self._rows, strict=True):
            held.drafted = draft.first_line()
        return self._proposal(drafts, num_steps, is_chain=is_chain)

    def _logits_after(
        self,
        drafts: Sequence[Growing],
        fed: Sequence[Sequence[int]],
        texts: Sequence[Sequence[int]],
        *,
        is_chain: bool,
    ) -> Tensor:
        """Logits after candidates; rows that go on from fewer of them read their text's last token
        again.
        """
        width = max(map(len, fed))
        ids = [
            [draft.tree.ids[n] for n in nodes] + [text[-1]] * (width - len(nodes))
            for draft, nodes, text in zip(drafts, fed, texts, strict=True)
        ]
        device, branches = self.engine.device, None
        if is_chain:  # whose tokens stand where their positions say
            positions_BT = torch.tensor(_positions(drafts, fed, width), device=device)
        else:
            trees, lengths = [d.tree for d in drafts], [d.length for d in drafts]
            branches = Branches.of(trees, lengths, fed, device)
            positions_BT = branches.positions_BT
        return self._logits(
            torch.tensor(ids, device=device),
            positions_BT,
            longest=max(d.length + len(d.tree) for d in drafts),
            last_only=width == 1,
            branches=branches,
        )

    def _grow(
        self,
        drafts: Sequence[Growing],
        fed: Sequence[Sequence[int]],
        logits_BTH: Tensor,
        sampling: Sampling,
        uniform_BG: Tensor,
        shape: Shape,
    ) -> None:
        """Add the candidates that follow what was fed."""
        num_best = min(shape.most_candidates, logits_BTH.shape[-1])
        log_best_BTK, best_BTK = largest(logits_BTH, num_best, is_law=True)
        # all that the host looks at in one copy; float32 holds every id
        parts = [log_best_BTK, best_BTK.to(log_best_BTK)]
        log_q_BTH, q_BTH = logits_BTH, None
        if sampling.temperature > 0 or shape.sees_entropy:
            log_q_BTH = logits_BTH.float().log_softmax(-1)
        if shape.sees_entropy:
            parts.append(-(log_q_BTH.exp() * log_q_BTH).nansum(-1, keepdim=True))  # 0 log 0 = 0
        if sampling.temperature > 0:
            q_BTH = law(logits_BTH, sampling, side=None)
        seen_BTX = torch.cat(parts, -1).tolist()
        if any(x != x for seen_TX in seen_BTX for seen in seen_TX for x in seen):
            at = _positions(drafts, fed, len(seen_BTX[0]))
            check_finite(torch.tensor(seen_BTX), "draft", at)
        for row, (draft, seen_TX) in enumerate(zip(drafts, seen_BTX, strict=True)):
            draft.newest = []
            for place, parent in enumerate(fed[row]):
                seen = seen_TX[place]
                chances, ids = [*map(math.exp, seen[:num_best])], seen[num_best : 2 * num_best]
                entropy = seen[-1] if shape.sees_entropy else 0.0
                confidences = shape.confidences(Look(chances, entropy))
                survival = draft.survival(parent)
                num = shape.num_candidates(confidences, survival, len(draft.tree))
                chosen = [*map(int, ids[: min(num, draft.room - len(draft.tree))])]
                if q_BTH is not None and chosen:
                    uniform_G = uniform_BG[row, len(draft.tree) :]
                    chosen = drawn_apart(q_BTH[row, place], uniform_G[: len(chosen)])
                    draft.laws[parent] = q_BTH[row, place]
                    own = log_q_BTH[row, place, chosen].exp().tolist()
                    confidences = [*map(shape.confidence, own, confidences)]
                for index, confidence in zip(chosen, confidences, strict=False):
                    token = index if self._known_ids is None else self._known_ids[index]
                    draft.newest.append(draft.tree.add(token, parent, survival * confidence))

    def _proposal(self, drafts: Sequence[Growing], num_steps: int, *, is_chain: bool) -> Proposal:
        trees = [draft.tree for draft in drafts]
        size = max(map(len, trees))
        ids = [[*tree.ids, *[NOTHING] * (size - len(tree))] for tree in trees]
        ids_BN = torch.tensor(ids, dtype=torch.long, device=self.engine.device)
        q = None
        known = [law_H for draft in drafts for law_H in draft.laws.values()]
        if known:
            none_H = torch.zeros_like(known[0])
            # a chain's laws are numbered by the token drawn from them, a tree's by what they follow
            nodes = range(ROOT, size - 1 if is_chain else size)
            q = self._spread(
                torch.stack([torch.stack([d.laws.get(n, none_H) for n in nodes]) for d in drafts])
            )
        return Proposal(ids_BN, q, num_steps, None if is_chain or not size else trees)

    def _penalised(
        self,
        logits_B1H: Tensor,
        sampling: Sampling,
        texts: Sequence[Sequence[int]],
        drafted_BG: Tensor,
    ) -> Tensor:
        """The target's penalties, for drafts that it accepts. It alone knows its stop ids."""
        return torch.cat(
            [
                penalise(
                    logits_B1H[row : row + 1],
                    sampling,
                    text=text,
                    num_prompt=held.num_prompt,
                    drafted_1G=drafted_BG[row : row + 1],
                    vocab_size=self.vocab_size,
                    ids_V=self.hot_ids,
                )
                for row, (text, held) in enumerate(zip(texts, self._rows, strict=True))
            ]
        )

    def _spread(self, q_BGH: Tensor) -> Tensor:
        """Laws over the hot ids as laws over the target's vocabulary."""
        if self.hot_ids is None:
            return torch.nn.functional.pad(q_BGH, (0, self.vocab_size - q_BGH.shape[-1]))
        q = q_BGH.new_zeros(*q_BGH.shape[:-1], self.vocab_size)
        return q.index_copy_(-1, self.hot_ids, q_BGH)


def _positions(
    drafts: Sequence[Growing], fed: Sequence[Sequence[int]], width: int
) -> list[list[int]]:
    """Where fed candidates stand; rows that feed fewer, feed their text's last token again."""
    return [
        [draft.position(node) for node in [*own, *[ROOT] * (width - len(own))]]
        for draft, own in zip(drafts, fed, strict=True)
    ]
