"""Target and exported draft, loaded as a user would, and the text of what they decode together."""

# H ids the draft proposes

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from conf.schema import Config
from eval.acceptance import Overlap, Text, overlap, overlaps
from models.decoding.by_cost import Calibration, CostAware
from models.decoding.costs import make_cheap
from models.decoding.draft_model import ModelDrafter
from models.decoding.drafters import CombinedDrafter, LookupDrafter
from models.decoding.engine import Engine
from models.decoding.kernels import use_kernel
from models.decoding.length import StopBelow
from models.decoding.rows import Round
from models.decoding.sampling import Sampling
from models.decoding.speculative import Decoder
from models.decoding.translated import TranslatedDrafter
from models.draft import read_hot_ids
from models.load import Target, device_of, load_folder, load_model, open_target
from models.vocab import read_translation

UNFINISHED = "\ufffd"  # what the bytes of an incomplete character decode to


@dataclass
class ModelPair:
    """Both models loaded from disk, one engine each, one decoder."""

    target: Target
    model: PreTrainedModel
    draft: PreTrainedModel
    hot_ids_H: Tensor | None
    drafter: ModelDrafter
    decoder: Decoder
    calibration: Calibration | None

    @classmethod
    def load(cls, config: Config, folder: Path, capacity: int) -> ModelPair:
        """The target of `config` and the draft exported to `folder`, with room for `capacity`
        tokens or as many as a model has positions for.

        Raises ConfigError for a draft with another tokenizer that was not made for that.
        """
        target = open_target(config)
        translation = read_translation(folder, target.tokenizer)
        model = load_model(target, config.target, device_of(config.runtime))
        use_kernel(model)
        int8 = config.runtime.int8_draft
        draft, hot_ids_H = load_draft(folder, model.dtype, model.device, int8=int8)
        # a text may have more tokens in the draft's vocabulary
        room = capacity if translation is None else 2 * capacity
        engine, beside = (
            Engine(
                one,
                num_rows=1,
                capacity=min(size, num_positions(one)),
                compiled=config.runtime.compile,
            )
            for one, size in ((model, capacity), (draft, room))
        )
        rule = StopBelow(config.eval.stop_below) if config.eval.stop_below else None
        vocab_size = target.config.vocab_size
        drafter = (
            ModelDrafter(beside, vocab_size=vocab_size, hot_ids=hot_ids_H, rule=rule)
            if translation is None
            else TranslatedDrafter(beside, translation, vocab_size=vocab_size, rule=rule)
        )
        decoder = Decoder(engine, drafter, target.stop_ids)
        calibration = Calibration.read(folder)
        return cls(target, model, draft, hot_ids_H, drafter, decoder, calibration)

    @property
    def has_own_tokens(self) -> bool:
        """Whether the draft's tokenizer is another than the target's."""
        return isinstance(self.drafter, TranslatedDrafter)

    def overlaps(
        self,
        text: Text,
        sampling: Sampling,
        *others: tuple[PreTrainedModel, Tensor | None],
    ) -> list[Overlap]:
        """Of this pair on a text of the target, after those of other drafts with its tokenizer."""
        if isinstance(self.drafter, TranslatedDrafter):
            assert not others and sampling == Sampling(1.0)
            drafter = copy(self.drafter)
            drafter.rule = None
            return [overlap(self.model, drafter.laws_along(text.prompt, text.answer), text)]
        return overlaps(self.model, [*others, (self.draft, self.hot_ids_H)], text, sampling)

    def by_cost(self, c: float, v: Mapping[int, float], most: int) -> Decoder | None:
        """The decoder with drafts of the shape that pays at these costs, of at most so many tokens;
        None for a draft without calibration.
        """
        if self.calibration is None:
            return None
        drafter = copy(self.drafter)  # on the same engine: one text at a time
        drafter.rule = CostAware(self.calibration, c, v, most_steps=most)
        return replace(self.decoder, drafter=drafter)

    def beside_lookup(self, decoder: Decoder, model_gamma: int, lookup_gamma: int) -> Decoder:
        """A decoder of this pair with prompt lookup beside its draft model; each drafts at most so
        many tokens.
        """
        lookup = LookupDrafter(device=self.decoder.target.device)
        assert isinstance(decoder.drafter, ModelDrafter)
        drafter = CombinedDrafter(
            decoder.drafter, lookup, model_gamma=model_gamma, lookup_gamma=lookup_gamma
        )
        return replace(decoder, drafter=drafter)


def num_positions(model: PreTrainedModel) -> int:
    """Of the longest text that a model can read."""
    return getattr(model.config, "max_position_embeddings", None) or sys.maxsize


def load_draft(
    folder: str | Path, dtype: torch.dtype, device: torch.device, *, int8: bool = True
) -> tuple[PreTrainedModel, Tensor | None]:
    """An exported draft as our decoder runs it, and the ids it proposes (None: all).

    Its head is narrowed to those ids, and on a CPU its weights become int8.
    """
    draft = load_folder(folder, dtype=dtype, device=device)
    hot_ids_H = read_hot_ids(folder)
    if hot_ids_H is not None:
        hot_ids_H = hot_ids_H.to(device)
    make_cheap(draft, hot_ids_H, int8=int8)
    return draft, hot_ids_H


@dataclass(frozen=True)
class Piece:
    """Text that one token completed, and where that token came from: draft, correction or bonus."""

    text: str
    kind: str


@dataclass
class Pieces:
    """Turns committed tokens into text as they come; the pieces joined are the text of all tokens.

    The bytes of one character may be spread over tokens. They are held back until the character is
    complete and then belong to the token that completed it.
    """

    tokenizer: PreTrainedTokenizerBase
    skip_special_tokens: bool = False
    _tokens: list[int] = field(default_factory=list)
    _told: int = 0  # tokens whose text has been given out
    _before: int = 0  # where the last piece starts: decoded along, for a space may depend on it
    _kind: str = "draft"

    def of_round(self, step: Round) -> Iterator[Piece]:
        """The pieces that a round completed."""
        for place, token in enumerate(step.tokens):
            if place < step.num_accepted:
                self._kind = "draft"
            else:
                self._kind = "correction" if step.is_corrected else "bonus"
            self._tokens.append(token)
            piece = self._new_text()
            if not piece.endswith(UNFINISHED):
                self._give_out()
                if piece:
                    yield Piece(piece, self._kind)

    def rest(self) -> Iterator[Piece]:
        """At the end: what no further token completed."""
        piece = self._new_text()
        self._give_out()
        if piece:
            yield Piece(piece, self._kind)

    def _new_text(self) -> str:
        told = self._decode(self._tokens[self._before : self._told])
        return self._decode(self._tokens[self._before :])[len(told) :]

    def _give_out(self) -> None:
        self._before, self._told = self._told, len(self._tokens)

    def _decode(self, tokens: list[int]) -> str:
        text = self.tokenizer.decode(
            tokens,
            skip_special_tokens=self.skip_special_tokens,
            clean_up_tokenization_spaces=False,  # it would change text that was given out already
        )
        assert isinstance(text, str)
        return text
