"""What an OpenAI-compatible server says of an answer, as ids and laws of the target.

Servers name tokens in several ways. Exact are ids (llama.cpp, vLLM), and bytes or texts of which
the target has one token (OpenAI) where together they are the whole answer. Nothing is guessed: an
answer whose ids do not follow exactly has none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from models.decoding.translated import WORD_START, token_bytes
from models.endpoints import Broken

BY_ID = "token_id:"  # how vLLM writes a token that was asked for as its id
NO_PROBABILITY = -1000.0  # below it a log-probability stands for none
FULL = 1.001  # probabilities that sum to more are none


@dataclass(frozen=True)
class Said:
    """One answer, as far as a server told it.

    Args:
        tokens: exact ids, none where they do not follow; None where a server says nothing of them.
        laws: log-probabilities of the likeliest ids at each of them; None where none were given.
        is_whole: whether `tokens` are all; else they are the first ones.
        text: the whole answer.
        ended: whether the target ended it, not the limit.
        num_prompt: tokens that the server read; None where it does not say.
    """

    tokens: list[int] | None
    laws: list[dict[int, float]] | None
    is_whole: bool
    text: str
    ended: bool
    num_prompt: int | None


@dataclass(frozen=True)
class _Token:
    number: int | None
    text: bytes | None  # None: unknown; empty for special ones
    by_text: bool  # the number follows from the text
    top: Mapping[int, float]


class Reader:
    """Reads answers of both APIs in the target's ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        texts = token_bytes(tokenizer)
        found = Counter(texts.values())
        self._ids = {text: number for number, text in texts.items() if found[text] == 1}
        self._special = set(tokenizer.all_special_ids)  # answers are shown without them
        self._texts: dict[int, bytes] = {**texts, **dict.fromkeys(self._special, b"")}
        # vocabularies of sentences' pieces drop the blank that a word starts with from its text
        self._texts_are_bytes = not any(WORD_START in token for token in tokenizer.get_vocab())

    def read(self, tree: Any) -> Said:
        """Of the JSON that a server sent. Raises Broken where that is no answer."""
        try:
            choice = tree["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            listed = [self._token(*entry) for entry in _listed(choice.get("logprobs") or {})]
            usage = tree.get("usage") or {}
            return self._said(choice, text or "", listed, usage)
        except (LookupError, TypeError, ValueError, AttributeError) as missing:
            reason = f"{type(missing).__name__} {missing}"
            raise Broken(f"an answer that is none ({reason})") from None

    def _said(
        self, choice: dict[str, Any], text: str, listed: list[_Token], usage: dict[str, Any]
    ) -> Said:
        ended = choice["finish_reason"] == "stop"
        num_prompt, given = usage.get("prompt_tokens"), choice.get("token_ids")
        if given is not None:
            laws = _as_laws(listed) if len(listed) == len(given) else None
            return Said(list(map(int, given)), laws, True, text, ended, num_prompt)
        num_generated = usage.get("completion_tokens")
        by_text = any(token.by_text for token in listed)
        num_read, is_whole = len(listed), True
        if by_text or num_generated is None or num_generated > num_read:
            num_read, is_whole = _num_in_a_row(listed, text)
            # the token that ends an answer may be left out
            is_whole = is_whole and (num_generated or 0) <= len(listed) + ended
        exact = [token.number for token in listed[:num_read] if token.number is not None]
        if not listed:
            return Said(None, None, False, text, ended, num_prompt)
        if len(exact) < num_read or (by_text and not is_whole):
            return Said([], None, False, text, ended, num_prompt)
        return Said(exact, _as_laws(listed[:num_read]), is_whole, text, ended, num_prompt)

    def _token(self, entry: dict[str, Any], top: list[dict[str, Any]]) -> _Token:
        number, text, by_text = self._named(entry)
        alternatives: dict[int, float] = {}
        for other in top:
            known = self._named(other)[0]
            value = other["logprob"]
            # an id that does not follow is one of those that are not recorded
            if known is not None and value is not None and float(value) > NO_PROBABILITY:
                alternatives[known] = float(value)
        if sum(map(math.exp, alternatives.values())) > FULL:
            raise ValueError("probabilities that sum to more than 1")
        return _Token(number, text, by_text, alternatives)

    def _named(self, entry: dict[str, Any]) -> tuple[int | None, bytes | None, bool]:
        """Id and bytes of a token, and whether the former follows from the latter."""
        token, listed = entry["token"], entry.get("bytes")
        given = entry.get("id")
        if token.startswith(BY_ID):
            given = int(token.removeprefix(BY_ID))
        if isinstance(given, int):
            # not the server's bytes: llama.cpp's of a part of a character are none
            return given, self._texts.get(given), False
        text = None if listed is None else bytes(listed)
        if text is None and self._texts_are_bytes and "\ufffd" not in token:
            text = token.encode()
        number = None if text is None else self._ids.get(text)
        return number, b"" if number in self._special else text, True


def _listed(logprobs: dict[str, Any]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each generated token with its alternatives: of chats, and llama.cpp, one object each; of
    completions parallel lists.
    """
    if logprobs.get("content") is not None:
        return [(entry, entry.get("top_logprobs") or []) for entry in logprobs["content"]]
    tokens = logprobs.get("tokens") or []
    tops: Sequence[dict[str, float] | None] = logprobs.get("top_logprobs") or [None] * len(tokens)
    return [
        ({"token": token}, [{"token": t, "logprob": value} for t, value in (top or {}).items()])
        for token, top in zip(tokens, tops, strict=True)
    ]


def _num_in_a_row(listed: Sequence[_Token], text: str) -> tuple[int, bool]:
    """Tokens before the first that is missing, and whether none is. llama.cpp leaves out those that
    end inside a character: their bytes are then missing too.
    """
    whole, place = text.encode(), 0
    if listed and (listed[0].text or b"").startswith(b" ") and not text.startswith(" "):
        whole = b" " + whole  # some vocabularies begin every text with a blank and do not show it
    for number, token in enumerate(listed):
        if token.text is None:
            return number, False
        if not whole.startswith(token.text, place):
            return number, False
        place += len(token.text)
    return len(listed), place >= len(whole)


def _as_laws(listed: Sequence[_Token]) -> list[dict[int, float]] | None:
    laws = [dict(token.top) for token in listed]
    return laws if any(laws) else None


def until_stop(said: Said, stop_ids: Collection[int]) -> Said:
    """The answer up to its first stop id."""
    assert said.tokens is not None
    for place, token in enumerate(said.tokens):
        if token in stop_ids:
            laws = None if said.laws is None else said.laws[: place + 1]
            return replace(
                said, tokens=said.tokens[: place + 1], laws=laws, is_whole=True, ended=True
            )
    return said
