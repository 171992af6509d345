"""What a target's folder says about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.schema import Config, TargetConfig
from models.load import open_target
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tiny_model(num_layers=1)
    model.generation_config.eos_token_id = [2, 7]
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_an_answer_ends_at_every_id_that_any_setting_names(folder: Path) -> None:
    target = open_target(Config(target=TargetConfig(path=str(folder))))
    assert target.stop_ids == {target.tokenizer.eos_token_id, 2, 7}


def test_a_target_without_generation_settings_opens(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    target = open_target(Config(target=TargetConfig(path=str(folder))))
    assert target.tokenizer.eos_token_id in target.stop_ids
    assert 7 not in target.stop_ids
