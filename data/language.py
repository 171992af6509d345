"""Prompts in the languages that are wanted: py3langid tells 139, without a network."""

from __future__ import annotations

from collections.abc import Sequence

from conf.errors import require

SURE = 0.5  # least probability of a language that a text is dropped for
UNTOLD = {"und", "zxx"}  # too short to tell; numbers, code and the like


class Languages:
    """Tells whether a text is in one of some languages, ISO 639-1 codes where there are any.

    A text whose language cannot be told passes: short questions, code and sums have no other.
    Raises ConfigError for a code that the model does not know. Validation has seen to it that the
    library is there.
    """

    def __init__(self, wanted: Sequence[str]) -> None:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        self._identifier = LanguageIdentifier.from_model_file(
            MODEL_FILE, norm_probs=True, min_confidence=SURE
        )
        self._passing = {*wanted, *UNTOLD}
        known = set(self._identifier.labels) - UNTOLD
        for code in wanted:
            require(
                code in known,
                "data.languages",
                list(wanted),
                f"{code!r} is no language that can be told",
                f"Use codes among {', '.join(sorted(known))}",
            )

    def allows(self, text: str) -> bool:
        """Whether the text may be in one of the languages."""
        return self._identifier.classify(text)[0] in self._passing
