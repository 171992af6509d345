"""The speculative decoder: draft a few tokens, verify them in one target call, keep what the law
allows.

With gamma = 0 the same loop is plain autoregressive decoding: the baseline of every speedup is this
very code.
"""

# B rows, G drafted tokens (gamma) or candidates, T = 1 + G tokens the target reads, V vocabulary

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from conf.choices import Verification
from models.decoding.counts import Counts
from models.decoding.drafters import Drafter, Nobody, Proposal
from models.decoding.engine import Engine
from models.decoding.rows import Request, Round, Row, Uniforms
from models.decoding.sampling import Sampling, law, likeliest, penalise
from models.decoding.stops import StopStrings
from models.decoding.tree import ROOT, Branches
from models.decoding.verify import NOTHING, Kept, block, chain, greedy, on_host, tree


@dataclass
class Decoder:
    """A target and, for gamma > 0, a drafter. As many texts at once as the target's engine has
    rows.

    `rule` is `chain` or `block`; greedy, and where one token was drafted, they are the same. Trees
    have a rule of their own.
    With a `fixed_width` every target call reads at least so many tokens, so that calls with and
    without a draft have one shape: in bfloat16 the same sums over one token and over several round
    differently, and near ties then fall either way. Take gamma + 1, for both.
    `stop_ids` end an output and are part of it, and so does the token that completes one of
    `stop_strings`.
    """

    target: Engine
    drafter: Drafter | None
    stop_ids: frozenset[int]
    rule: Verification = Verification.block
    fixed_width: int = 0
    stop_strings: StopStrings | None = None

    def decode(
        self,
        prompt: Sequence[int],
        *,
        gamma: int,
        max_new_tokens: int,
        sampling: Sampling,
        rng: torch.Generator,
    ) -> tuple[list[int], Counts]:
        """The whole output and its counts."""
        request = Request(prompt, max_new_tokens, rng)
        row = next(self.decode_all([request], gamma=gamma, sampling=sampling))
        return row.new_tokens, row.counts

    def stream(
        self,
        prompt: Sequence[int],
        *,
        gamma: int,
        max_new_tokens: int,
        sampling: Sampling,
        rng: torch.Generator,
        counts: Counts | None = None,
    ) -> Iterator[Round]:
        """Yield what each target call commits, until a stop or the length limit; `counts` grow
        along.
        """
        request = Request(prompt, max_new_tokens, rng)
        for row, step in self.rounds([request], gamma=gamma, sampling=sampling):
            if counts is not None:
                vars(counts).update(vars(row.counts))
            yield step

    def decode_all(
        self, requests: Iterable[Request], *, gamma: int, sampling: Sampling
    ) -> Iterator[Row]:
        """Outputs in the order in which they end. A row that has ended makes room for the next
        request.
        """
        for row, _ in self.rounds(requests, gamma=gamma, sampling=sampling):
            if row.is_over:
                assert row.counts.num_tokens == len(row.new_tokens)
                yield row

    def rounds(
        self, requests: Iterable[Request], *, gamma: int, sampling: Sampling
    ) -> Iterator[tuple[Row, Round]]:
        """What each target call commits to each row it has part in.

        Raises ValueError when a prompt and its output do not fit the target's cache,
        FloatingPointError on NaN logits.
        """
        waiting = iter(enumerate(requests))
        first = islice(waiting, self.target.num_rows)
        rows = [self._row(index, request, gamma) for index, request in first]
        drafter = self.drafter if gamma and self.drafter is not None else Nobody(self.target.device)
        self.target.reset(len(rows))
        drafter.reset(len(rows))
        self._start(rows, range(len(rows)), drafter)
        while rows:
            uniforms = self._uniforms(rows, gamma, is_greedy=sampling.temperature == 0)
            texts = [row.tokens for row in rows]
            proposal = drafter.draft(texts, uniforms.most, sampling, uniforms.draw_BG)
            branches = self._branches(rows, proposal)
            logits_BTV = self._read(rows, proposal, branches)
            kept = self._judge(rows, proposal, branches, logits_BTV, sampling, uniforms)
            yield from zip(rows, self._commit(rows, proposal, kept), strict=True)
            rows = self._replace(rows, waiting, gamma, drafter)

    def _row(self, index: int, request: Request, gamma: int) -> Row:
        """A new row. Raises ValueError when it cannot be decoded."""
        prompt, max_new_tokens = request.prompt, request.max_new_tokens
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens}: use 1 or more.")
        if gamma < 0 or (gamma and self.drafter is None):
            raise ValueError(f"gamma={gamma}: use 0 without a draft and 1 or more with one.")
        if not prompt:
            raise ValueError(
                "prompt: it is empty; a target needs a token to start from, for example its BOS."
            )
        # rows of a batch are read as widely as the widest, also at their ends
        wider = gamma if self.target.num_rows > 1 else 0
        wider = max(wider, self.fixed_width - 1)
        if len(prompt) + max_new_tokens + wider > self.target.capacity:
            raise ValueError(
                f"prompt of {len(prompt)} tokens + {max_new_tokens} new ones exceed the context of"
                f" {self.target.capacity}. Shorten the prompt or lower max_new_tokens."
            )
        return Row(index, request, list(prompt))

    def _start(self, rows: Sequence[Row], places: Sequence[int], drafter: Drafter) -> None:
        """Read prompts. The last token is left for the first round, which then verifies drafts like
        every other.
        """
        if rows:
            self.target.start([row.tokens[:-1] for row in rows], places)
            drafter.start([row.tokens for row in rows], places)

    def _replace(
        self,
        rows: list[Row],
        waiting: Iterator[tuple[int, Request]],
        gamma: int,
        drafter: Drafter,
    ) -> list[Row]:
        """Rows that are over make room for requests that wait."""
        over = [place for place, row in enumerate(rows) if row.is_over]
        new = [self._row(*pair, gamma) for pair in islice(waiting, len(over))]
        for place, row in zip(over, new, strict=False):
            rows[place] = row
        self._start(new, over[: len(new)], drafter)
        if len(new) == len(over):
            return rows
        kept = [place for place, row in enumerate(rows) if not row.is_over]
        if kept:
            self.target.cache.keep(kept)
            drafter.keep(kept)
        return [rows[place] for place in kept]

    def _uniforms(self, rows: Sequence[Row], gamma: int, *, is_greedy: bool) -> Uniforms:
        """A row's numbers do not depend on the others; greedy decoding draws none."""
        # a token beyond the limit would never be committed
        most = [min(gamma, row.num_left - 1) for row in rows]
        if is_greedy:
            none = torch.empty(len(rows), 0, device=self.target.device)
            return Uniforms(most, none, none, none)
        width = max(most)
        accept_BG, draw_BG = torch.zeros(2, len(rows), width)
        last_B = torch.zeros(len(rows))
        for place, (row, num) in enumerate(zip(rows, most, strict=True)):
            rng = row.request.rng
            uniform = torch.rand(2 * num + 1, generator=rng, device=rng.device)
            accept_BG[place, :num], draw_BG[place, :num] = uniform[:num], uniform[num + 1 :]
            last_B[place] = uniform[num]
        device = self.target.device
        return Uniforms(most, accept_BG.to(device), last_B.to(device), draw_BG.to(device))

    def _branches(self, rows: Sequence[Row], proposal: Proposal) -> Branches | None:
        """Where the candidates of trees stand; None for chains."""
        if proposal.trees is None:
            return None
        fed = [range(ROOT, len(own)) for own in proposal.trees]
        lengths = [len(row.tokens) for row in rows]
        width = max(self.fixed_width, 1 + proposal.ids_BN.shape[1])
        return Branches.of(proposal.trees, lengths, fed, self.target.device, width)

    def _read(self, rows: Sequence[Row], proposal: Proposal, branches: Branches | None) -> Tensor:
        """The target's logits after each text and after each drafted token, shape B 1+G V."""
        device, width = self.target.device, proposal.ids_BN.shape[1]
        last_B1 = torch.tensor([[row.tokens[-1]] for row in rows], device=device)
        # what fills a width is the last token again, read once more in its place (trees) or behind
        # everything that is read (chains)
        filler = last_B1.expand(-1, max(0, self.fixed_width - 1 - width))
        ids_BN = proposal.ids_BN.where(proposal.ids_BN != NOTHING, last_B1)
        fed_BT = torch.cat([last_B1, ids_BN, filler], 1)
        if branches is None:
            ends_B1 = torch.tensor([[len(row.tokens)] for row in rows], device=device)
            positions_BT = ends_B1 - 1 + torch.arange(fed_BT.shape[1], device=device)
        else:
            positions_BT = branches.positions_BT
        longest = max(len(row.tokens) for row in rows) - 1 + fed_BT.shape[1]
        logits_BTV = self.target.forward(fed_BT, positions_BT, longest=longest, branches=branches)
        return logits_BTV[:, : width + 1]

    def _judge(
        self,
        rows: Sequence[Row],
        proposal: Proposal,
        branches: Branches | None,
        logits_BTV: Tensor,
        sampling: Sampling,
        uniforms: Uniforms,
    ) -> list[Kept]:
        """Which drafted tokens are kept, and what follows them."""
        ids_BN, q, width = proposal.ids_BN, proposal.laws, proposal.ids_BN.shape[1]
        if sampling.looks_back:
            assert branches is None, "penalties are those of one past"
            logits_BTV = self._penalised(rows, ids_BN, logits_BTV, sampling)
        at = [len(row.tokens) - 1 for row in rows] if branches is None else branches.positions_BT
        if sampling.temperature == 0:
            likeliest_BT = likeliest(logits_BTV, side="target", at=at)
            trees = proposal.trees
            parents = None if trees is None else [own.parents for own in trees]
            return greedy(likeliest_BT, ids_BN, parents)
        p = law(logits_BTV, sampling, side="target", at=at)
        if q is None:
            q = one_hot(ids_BN.clamp(min=0), p.shape[-1]).to(p.dtype)
            q = q.masked_fill((ids_BN == NOTHING).unsqueeze(-1), 0.0)
        if branches is not None:
            q = pad(q, (0, 0, 0, width + 1 - q.shape[1]))
            given = (branches.parents_BN, uniforms.accept_BG[:, :width], uniforms.last_B)
            return on_host(tree(p, q, ids_BN, *given), ids_BN)
        verify = block if self.rule is Verification.block else chain
        verdict = verify(p, q, ids_BN, uniforms.accept_BG[:, :width], uniforms.last_B)
        return on_host(verdict, ids_BN)

    def _penalised(
        self, rows: Sequence[Row], ids_BG: Tensor, logits_BTV: Tensor, sampling: Sampling
    ) -> Tensor:
        return torch.cat(
            [
                penalise(
                    logits_BTV[place : place + 1],
                    sampling,
                    text=row.tokens,
                    num_prompt=len(row.request.prompt),
                    drafted_1G=ids_BG[place : place + 1].clamp(min=0),
                    vocab_size=logits_BTV.shape[-1],
                    stop_ids=self.stop_ids,
                )
                for place, row in enumerate(rows)
            ]
        )

    def _commit(
        self, rows: Sequence[Row], proposal: Proposal, kept: Sequence[Kept]
    ) -> Iterator[Round]:
        """Take over what was kept."""
        for place, (row, (all_ids, nodes, last)) in enumerate(zip(rows, kept, strict=True)):
            ids, num = [token for token in all_ids if token != NOTHING], len(nodes)
            num_places, is_tested = len(ids), num < len(ids)
            if proposal.trees is not None:
                own = proposal.trees[place]
                num_places = own.num_places
                is_tested = (nodes[-1] if nodes else ROOT) in own.parents
                if nodes != list(range(num)):
                    length = len(row.tokens)
                    self.target.cache.move(place, [length + node for node in nodes], length)
            new = [*(ids[node] for node in nodes), last]
            stop = self._stop(row, new)
            new = new if stop is None else new[: stop + 1]
            num_kept = min(num, len(new))
            # a rejection is a test too, unless the output ended before it
            row.counts.add_round(
                len(ids),
                num_kept + (is_tested and len(new) > num_kept),
                num_kept,
                len(new),
                proposal.num_steps,
                num_places,
            )
            row.tokens += new
            row.is_over = stop is not None or row.num_left == 0
            yield Round(new, num_kept, len(ids), is_tested)

    def _stop(self, row: Row, new: Sequence[int]) -> int | None:
        """Which of the new tokens ends the output."""
        places = [place for place, token in enumerate(new) if token in self.stop_ids]
        if self.stop_strings is not None:
            found = self.stop_strings.first([*row.new_tokens, *new], len(new))
            places += [] if found is None else [found]
        return min(places, default=None)
