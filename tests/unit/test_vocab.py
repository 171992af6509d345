"""Tokenizers are compared by what they do to text, not by the sizes that models claim."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import LlamaConfig, PreTrainedTokenizerFast

from conf.errors import ConfigError
from models.vocab import require_same_tokenizer, usable_ids
from tests.tiny import VOCAB_SIZE, tiny_tokenizer


def changed(**parts: object) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with parts of its pipeline replaced."""
    tree = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    for name, value in parts.items():
        tree[name] = value
    backend = Tokenizer.from_str(json.dumps(tree))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


def test_the_same_tokenizer_passes() -> None:
    require_same_tokenizer(tiny_tokenizer(), tiny_tokenizer(), "small", "large")


def test_another_template_or_padding_side_is_the_same_tokenizer() -> None:
    other = tiny_tokenizer()
    other.chat_template, other.padding_side, other.pad_token = None, "left", "<|endoftext|>"
    require_same_tokenizer(other, tiny_tokenizer(), "small", "large")


def test_swapped_ids_are_refused_with_both_names_and_the_way_out() -> None:
    tree = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    vocab = tree["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    other = changed(model=tree["model"])
    with pytest.raises(ConfigError) as refused:
        require_same_tokenizer(other, tiny_tokenizer(), "owner/small", "owner/large")
    message = str(refused.value)
    assert message.startswith("draft.pretrained=owner/small: ")
    assert "owner/large" in message and "2 differ" in message
    assert "'a'" in message or "'b'" in message
    assert "draft.init=layers" in message and "draft.vocab=shared" in message


def test_the_same_vocabulary_split_another_way_is_refused() -> None:
    """No token differs, but text becomes other ids: digits are taken one by one."""
    splitter = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}],
    }
    other = changed(pre_tokenizer=splitter)
    assert other.get_vocab() == tiny_tokenizer().get_vocab()
    with pytest.raises(ConfigError, match="0 differ, they split text differently"):
        require_same_tokenizer(other, tiny_tokenizer(), "small", "large")


def test_a_smaller_vocabulary_is_refused() -> None:
    larger = tiny_tokenizer()
    larger.add_tokens([AddedToken("<think>", special=True)])
    with pytest.raises(ConfigError, match="<think>"):
        require_same_tokenizer(tiny_tokenizer(), larger, "small", "large")


def test_padding_rows_of_an_embedding_are_no_tokens() -> None:
    """151936 against 152064 in one family: the size of a model's vocabulary is not compared."""
    for size in (VOCAB_SIZE, VOCAB_SIZE + 20):
        assert usable_ids(LlamaConfig(vocab_size=size), tiny_tokenizer()) == VOCAB_SIZE
    assert usable_ids(LlamaConfig(vocab_size=VOCAB_SIZE - 7), tiny_tokenizer()) == VOCAB_SIZE - 7
