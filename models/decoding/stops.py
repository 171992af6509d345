"""What ends an output: stop ids, and strings that its text must not go beyond."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class StopStrings:
    """Ends an output with the token that completes one of `strings` in its text.

    Raises ValueError for an empty string, which any text contains.
    """

    tokenizer: PreTrainedTokenizerBase
    strings: tuple[str, ...]

    def __post_init__(self) -> None:
        if not all(self.strings):
            raise ValueError(
                "stop strings: one of them is empty and would end every output. Remove it."
            )

    def first(self, generated: Sequence[int], num_new: int) -> int | None:
        """Which of the last `num_new` generated tokens completes a string; None where none does."""
        # every token but a special one is a byte or more, and a character may have begun before
        window = max((len(string.encode()) for string in self.strings), default=0) + 4
        for place in range(num_new):
            end = len(generated) - num_new + place + 1
            text = self.tokenizer.decode(
                list(generated[max(0, end - window) : end]), clean_up_tokenization_spaces=False
            )
            if any(string in text for string in self.strings):
                return place
        return None
