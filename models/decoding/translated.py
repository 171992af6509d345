"""Drafting with a model of another tokenizer: token-level intersection (TLI, 2502.05202)."""

# B rows, N drafted tokens or candidates, S tokens that both vocabularies have, V ids of the
# draft or, of laws, of the target

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from conf.errors import UserError
from models.decoding.draft_model import ModelDrafter
from models.decoding.drafters import Proposal
from models.decoding.engine import Engine
from models.decoding.length import Rule
from models.decoding.sampling import Sampling
from models.decoding.verify import NOTHING

# of vocabularies of sentences' pieces: a space, and a byte that no piece holds
WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"
ONE_BYTE = re.compile("<0x([0-9A-F]{2})>")


class NothingShared(UserError, ValueError):
    """Two vocabularies without a common token."""


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
        """All tokens of the same text. Raises NothingShared when there are none."""
        theirs, ours = texts_of(target), texts_of(draft)
        shared = sorted(theirs.keys() & ours.keys(), key=theirs.__getitem__)
        if not shared:
            raise NothingShared(
                "the draft's tokenizer shares no token with the target's, so it can propose"
                " nothing. Pick another draft."
            )
        return cls(
            torch.tensor([theirs[text] for text in shared]),
            torch.tensor([ours[text] for text in shared]),
            translator(target, draft),
        )

    def only(self, is_kept_S: Tensor) -> Translation:
        """With fewer of the shared tokens."""
        return Translation(
            self.target_ids_S[is_kept_S], self.draft_ids_S[is_kept_S], self.translate
        )


def translator(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase
) -> Callable[[Sequence[int]], list[int]]:
    """Ids of the target's to those of the same text in the draft's."""
    # a draft needs a token to start from
    start = draft.bos_token_id if draft.bos_token_id is not None else draft.eos_token_id

    def translate(ids: Sequence[int]) -> list[int]:
        text = target.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        # verbose: a text beyond the model's context, of which the drafter takes care
        found: list[int] = draft.encode(str(text), add_special_tokens=False, verbose=False)
        return found or [0 if start is None else start]

    return translate


def texts_of(tokenizer: PreTrainedTokenizerBase) -> dict[bytes, int]:
    """The id of every text that is one token; special ones by their names, apart from plain text
    that reads alike, and the one that ends a text by what it does.
    """
    special = _special(tokenizer)
    found = {}
    for number, text in token_bytes(tokenizer).items():
        token = tokenizer.convert_ids_to_tokens(number)
        if token == tokenizer.eos_token:
            text = b"special end"
        elif token in special:
            text = b"special " + text
        found[text] = number
    return found


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """What every id adds to a text, in bytes; of special ones, their names."""
    vocabulary, special = tokenizer.get_vocab(), _special(tokenizer)
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    is_bytes = not any(WORD_START in token for token in vocabulary)
    found = {}
    for token, number in vocabulary.items():
        if token in special:
            text = token.encode()
        elif is_bytes and all(letter in byte_of for letter in token):
            text = bytes(byte_of[letter] for letter in token)
        elif one := ONE_BYTE.fullmatch(token):
            text = bytes.fromhex(one[1])
        else:
            text = token.replace(WORD_START, " ").encode()
        found[number] = text
    return found


def _special(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    return {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}


class TranslatedDrafter(ModelDrafter):
    """A draft model that reads its own tokens and proposes those that the target has too.

    The head of the engine's model has been narrowed to the draft's shared ids, so its law is q(x) /
    sum over shared of q. The text is read anew in the draft's tokens every round, and what differs
    from the last reading is read again.
    """

    def __init__(
        self,
        engine: Engine,
        translation: Translation,
        *,
        vocab_size: int,
        rule: Rule | None = None,
    ):
        """vocab_size: of the target. Raises ValueError unless the head has the shared ids."""
        target_ids_S, draft_ids_S = (
            ids_S.to(engine.device) for ids_S in (translation.target_ids_S, translation.draft_ids_S)
        )
        num_logits = engine.model.get_output_embeddings().out_features
        if num_logits != len(draft_ids_S):
            raise ValueError(
                f"the draft's head has {num_logits} ids, and {len(draft_ids_S)} are shared: narrow"
                " it with narrow_head(draft, translation.draft_ids_S)."
            )
        size = engine.model.config.vocab_size
        super().__init__(engine, vocab_size=size, hot_ids=draft_ids_S, rule=rule)
        self.translation, self._size, self._target_ids_S = translation, vocab_size, target_ids_S
        self._target_of_V = torch.zeros(size, dtype=torch.long, device=engine.device)
        self._target_of_V[draft_ids_S] = target_ids_S
        self._read_so_far: list[list[int]] = []
        self.reset(engine.num_rows)

    def reset(self, num_rows: int) -> None:
        """Forget all texts; room for so many."""
        super().reset(num_rows)
        self._read_so_far = [[] for _ in range(num_rows)]

    def start(self, prompts: Sequence[Sequence[int]], rows: Sequence[int] = (0,)) -> None:
        """Read prompts into rows."""
        read = [self.translation.translate(prompt) for prompt in prompts]
        super().start(read, rows)
        for text, row in zip(read, rows, strict=True):
            self._read_so_far[row] = text

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows; the kept ones are renumbered in the given order."""
        super().keep(rows)
        self._read_so_far = [self._read_so_far[row] for row in rows]

    def draft(
        self,
        texts: Sequence[Sequence[int]],
        most: Sequence[int],
        sampling: Sampling,
        uniform_BG: Tensor,
    ) -> Proposal:
        """At most so many tokens after each text, in the target's ids."""
        read = [self.translation.translate(text) for text in texts]
        for row, (now, before) in enumerate(zip(read, self._read_so_far, strict=True)):
            self.forget(row, len(os.path.commonprefix([now, before])))
        self._read_so_far = read
        found = super().draft(read, most, sampling, uniform_BG)
        ids_BN = self._target_of_V[found.ids_BN.clamp(min=0)]
        trees = found.trees and [
            replace(tree, ids=self._target_of_V[torch.tensor(tree.ids, dtype=torch.long)].tolist())
            for tree in found.trees
        ]
        return found._replace(
            ids_BN=ids_BN.masked_fill(found.ids_BN == NOTHING, NOTHING), trees=trees
        )

    @torch.inference_mode()
    def laws_along(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        """The laws at temperature 1 that each token of an answer would be drafted from, given those
        before it: a line per token over the target's ids, zero where nothing would be drafted.
        """
        self.reset(1)
        self.start([prompt])
        text = list(prompt)
        laws_NV = torch.zeros(len(answer), self._size, device=self.engine.device)
        uniform_11 = torch.full((1, 1), 0.5, device=self.engine.device)
        for place, token in enumerate(answer):
            found = self.draft([text], [1], Sampling(1.0), uniform_11)
            if found.laws is not None:
                laws_NV[place] = found.laws[0, 0]
            text.append(token)
        return laws_NV

    def _spread(self, q_BGH: Tensor) -> Tensor:
        q = q_BGH.new_zeros(*q_BGH.shape[:-1], self._size)
        return q.index_copy_(-1, self._target_ids_S, q_BGH)
