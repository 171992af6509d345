"""Conversations as token ids, through the tokenizer's own chat template."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], system_prompt: str = ""
) -> list[int]:
    """Ids of a conversation up to where the assistant's answer starts.

    `system_prompt` is put first unless the conversation has a system turn of its own. A tokenizer
    without a chat template (a base model) gets the turns as plain text, a blank line after each.
    """
    turns = with_system_prompt(messages, system_prompt)
    if tokenizer.chat_template is None:
        text = "".join(f"{turn['content']}\n\n" for turn in turns)
        return list(tokenizer(text).input_ids)
    rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    # the template writes its special tokens itself: adding them again would double the BOS
    return list(tokenizer(rendered, add_special_tokens=False).input_ids)


def with_system_prompt(
    messages: Sequence[dict[str, str]], system_prompt: str
) -> list[dict[str, str]]:
    """The conversation with a system turn first, unless it has one or there is nothing to say."""
    if system_prompt and messages and messages[0]["role"] != "system":
        return [{"role": "system", "content": system_prompt}, *messages]
    return list(messages)


def show_supervision(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], num_supervised: int
) -> str:
    """One conversation as text, its supervised last part between brackets: what a reader checks
    before a run.
    """
    start = len(ids) - num_supervised
    return f"{tokenizer.decode(list(ids[:start]))}[[{tokenizer.decode(list(ids[start:]))}]]"
