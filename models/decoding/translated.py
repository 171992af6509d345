"""Drafting with a model of another tokenizer: token-level intersection (TLI, 2502.05202)."""

# B rows, N drafted tokens or candidates, S tokens that both vocabularies have, V a vocabulary

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from models.decoding.draft_model import ModelDrafter
from models.decoding.drafters import Proposal
from models.decoding.sampling import Sampling
from models.decoding.tree import Tree
from models.decoding.verify import NOTHING

WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"  # a space, in vocabularies of sentences' pieces


@dataclass(frozen=True)
class Translation:
    """What two vocabularies share: ids of the same texts, place by place, and how a text of the
    target's ids reads in the draft's.
    """

    target_ids_S: Tensor
    draft_ids_S: Tensor
    translate: Callable[[Sequence[int]], list[int]]

    @classmethod
    def of(cls, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> Translation:
        """Raises ValueError when no token is the same in both."""
        theirs, ours = texts_of(target), texts_of(draft)
        shared = sorted(theirs.keys() & ours.keys(), key=theirs.__getitem__)
        if not shared:
            raise ValueError(
                "the draft's tokenizer shares no token with the target's, so it can propose"
                " nothing. Pick another draft."
            )

        def translate(ids: Sequence[int]) -> list[int]:
            text = target.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            found: list[int] = draft.encode(str(text), add_special_tokens=False)
            # a draft needs a token to start from
            start = draft.bos_token_id if draft.bos_token_id is not None else draft.eos_token_id
            return found or [0 if start is None else start]

        return cls(
            torch.tensor([theirs[text] for text in shared]),
            torch.tensor([ours[text] for text in shared]),
            translate,
        )


def texts_of(tokenizer: PreTrainedTokenizerBase) -> dict[bytes, int]:
    """The id of every text that is one token; special ones by their names, apart from plain text
    that reads alike, and the one that ends a text by what it does.
    """
    vocabulary = tokenizer.get_vocab()
    special = set(tokenizer.all_special_tokens) | set(tokenizer.get_added_vocab())
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    is_bytes = not any(WORD_START in token for token in vocabulary)
    found = {}
    for token, number in vocabulary.items():
        if token == tokenizer.eos_token:
            text = b"special end"
        elif token in special:
            text = b"special " + token.encode()
        elif is_bytes and all(letter in byte_of for letter in token):
            text = bytes(byte_of[letter] for letter in token)
        else:
            text = token.replace(WORD_START, " ").encode()
        found[text] = number
    return found


class TranslatedDrafter:
    """A draft model that reads its own tokens and proposes those that the target has too.

    `model` drafts over the ids of the draft that are shared, `translation.draft_ids_S`: its head is
    narrowed to them, so its law is q(x) / sum over shared of q, in the order of the translation.
    The text is read anew in the draft's tokens every round, and what differs from the last reading
    is read again.
    """

    def __init__(self, model: ModelDrafter, translation: Translation, *, vocab_size: int):
        if model.hot_ids is None or not torch.equal(model.hot_ids.cpu(), translation.draft_ids_S):
            raise ValueError(
                "the draft's head must be narrowed to the shared ids: narrow_head(draft,"
                " translation.draft_ids_S), ModelDrafter(hot_ids=translation.draft_ids_S)."
            )
        self.model, self.translation, self.vocab_size = model, translation, vocab_size
        device = model.engine.device
        self._target_ids_S = translation.target_ids_S.to(device)
        self._draft_ids_S = translation.draft_ids_S.to(device)
        size = int(translation.draft_ids_S.max()) + 1
        self._target_of_V = torch.zeros(size, dtype=torch.long, device=device)
        self._target_of_V[self._draft_ids_S] = self._target_ids_S
        self._read: list[list[int]] = []

    def reset(self, num_rows: int) -> None:
        """Forget all texts; room for so many."""
        self.model.reset(num_rows)
        self._read = [[] for _ in range(num_rows)]

    def start(self, prompts: Sequence[Sequence[int]], rows: Sequence[int] = (0,)) -> None:
        """Read prompts into rows."""
        if not self._read:
            self.reset(self.model.engine.num_rows)
        read = [self.translation.translate(prompt) for prompt in prompts]
        self.model.start(read, rows)
        for text, row in zip(read, rows, strict=True):
            self._read[row] = text

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        self.model.keep(rows)
        self._read = [self._read[row] for row in rows]

    def draft(
        self,
        texts: Sequence[Sequence[int]],
        most: Sequence[int],
        sampling: Sampling,
        uniform_BN: Tensor,
    ) -> Proposal:
        """At most so many tokens after each text, one uniform each."""
        read = [self.translation.translate(text) for text in texts]
        for row, (now, before) in enumerate(zip(read, self._read, strict=True)):
            self.model.forget(row, len(os.path.commonprefix([now, before])))
        self._read = read
        found = self.model.draft(read, most, sampling, uniform_BN)
        ids_BN = self._target_of_V[found.ids_BN.clamp(min=0)]
        ids_BN = ids_BN.masked_fill(found.ids_BN == NOTHING, NOTHING)
        laws = found.laws
        if laws is not None:
            shared = laws.index_select(-1, self._draft_ids_S)
            laws = shared.new_zeros(*shared.shape[:-1], self.vocab_size)
            laws = laws.index_copy_(-1, self._target_ids_S, shared)
        return Proposal(ids_BN, laws, found.num_steps, self._trees(found.trees))

    def _trees(self, trees: Sequence[Tree] | None) -> list[Tree] | None:
        if trees is None:
            return None
        return [
            Tree(
                self._target_of_V[torch.tensor(tree.ids, dtype=torch.long)].tolist(),
                tree.parents,
                tree.depths,
                tree.survivals,
            )
            for tree in trees
        ]
