"""Text as the corpus wants it: normalised, in words, shortened at sentences, without personal
details.
"""

from __future__ import annotations

import itertools
import re
import sys
import unicodedata

_INVISIBLE = re.compile(
    "["
    + "".join(
        re.escape(c)
        for c in map(chr, range(sys.maxunicode + 1))
        if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf")
    )
    + "]"
)
_SPACES = re.compile(r"(?<=\S)[^\S\n]+")  # those that indent a line are none of these
_BLANK_LINES = re.compile(r"\n\s*\n+")
_WORD = re.compile(r"\w+", re.UNICODE)
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*$")


def normalise(text: str) -> str:
    """The same text in NFC, with plain line ends and no invisible characters, runs of blanks or
    blank lines.

    Indentation stays (programs need it). Idempotent.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    # invisible characters go first: one between a letter and its accent would keep them from
    # composing
    text = unicodedata.normalize("NFC", _INVISIBLE.sub("", text))
    lines = (_SPACES.sub(" ", line.rstrip()) for line in text.split("\n"))
    return _BLANK_LINES.sub("\n\n", "\n".join(lines)).strip()


def words(text: str) -> list[str]:
    """Lower-case words without punctuation: what duplicates and contamination are compared by."""
    return _WORD.findall(text.casefold())


def shorten(text: str, max_words: int) -> str:
    """The start of a text that is longer than `max_words` blank-separated words.

    It ends with the last whole sentence within the limit, unless that is less than half of it: then
    at the limit, with an ellipsis.
    """
    pieces = list(itertools.islice(re.finditer(r"\S+", text), max_words + 1))
    if len(pieces) <= max_words:
        return text
    for piece in reversed(pieces[max_words // 2 : max_words]):
        if _SENTENCE_END.search(piece.group()):
            return text[: piece.end()]
    return text[: pieces[max_words - 1].end()] + " ..."


# ---------------------------------------------------------------- personal details

_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_SECRET = re.compile(r"\b(?:sk-|hf_|gh[pousr]_|github_pat_|xox[abp]-|AKIA|AIza)[A-Za-z0-9_-]{12,}")
_URL_SECRET = re.compile(
    r"(?i)([?&#](?:api_?key|key|token|access_token|auth|sig|signature|secret|password|pwd)=)"
    r"[^\s&#\"'<>\[]+"
)
_URL_LOGIN = re.compile(r"(?i)\b(https?://)[^\s/@\[]+@")
_CARD = re.compile(r"(?<![\w.-])\d(?:[ -]?\d){12,18}(?![\w-])")
# A separator or a leading + is required: a bare run of digits is a number in a sum far more often
# than a telephone
_PHONE = re.compile(
    r"(?<![\w.+-])(?:"
    r"\+\d{1,3}[ .-]?\(?\d{1,4}\)?(?:[ .-]?\d{2,4}){2,4}"
    r"|\(\d{3}\) ?\d{3}[-. ]\d{4}"
    r"|\d{3}([-.])\d{3}\1\d{4}"
    r")(?![\w-])"
)
_SOCIAL_SECURITY = re.compile(r"(?<![\w-])\d{3}-\d{2}-\d{4}(?![\w-])")
_OWN_NAME = re.compile(
    r"\b((?i:my name(?:'s| is)|call me|i am called)) (?!\[)[A-Z][\w'-]+(?: [A-Z][\w'-]+)?"
)


def mask_personal_details(text: str) -> tuple[str, int]:
    """Replace what identifies a person or opens an account by a word in brackets; also how many
    were replaced.

    Covers e-mail addresses, telephone and social-security numbers, payment cards (by their check
    digit), access keys, keys and logins inside addresses, and the writer's own name after "my name
    is". Idempotent.
    """
    total = 0
    for pattern, replacement in (
        (_URL_LOGIN, r"\1[login]@"),
        (_URL_SECRET, r"\1[key]"),
        (_SECRET, "[key]"),
        (_EMAIL, "[email]"),
        (_SOCIAL_SECURITY, "[number]"),
        (_PHONE, "[phone]"),
        (_OWN_NAME, r"\1 [name]"),
    ):
        text, count = pattern.subn(replacement, text)
        total += count
    cards = 0

    def hide(match: re.Match[str]) -> str:
        nonlocal cards
        if not _check_digit_holds(match.group()):
            return match.group()
        cards += 1
        return "[card]"

    text = _CARD.sub(hide, text)
    return text, total + cards


def _check_digit_holds(number: str) -> bool:
    """Luhn's sum, which every payment card satisfies and nine in ten other numbers do not."""
    digits = [int(c) for c in reversed(number) if c.isdigit()]
    doubled = [d if i % 2 == 0 else sum(divmod(2 * d, 10)) for i, d in enumerate(digits)]
    return sum(doubled) % 10 == 0
