"""What the evaluation asks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from conf.contracts import Prompt
from conf.errors import ConfigError
from conf.schema import Config
from eval import evaluate
from tests.tiny import tiny_tokenizer


def test_suites_of_long_prompts_only_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [{"role": "user", "content": "word " * 600}]
    long = Prompt(id="1", source="long", category="qa", messages=turns)
    monkeypatch.setattr(evaluate, "suite_prompts", lambda _settings: {"qa": [long]})
    target = SimpleNamespace(tokenizer=tiny_tokenizer())
    with pytest.raises(ConfigError, match=r"eval\.suites.* at most 512 tokens"):
        evaluate.ask(Config(), target)  # type: ignore[arg-type]
