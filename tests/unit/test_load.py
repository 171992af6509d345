"""What a target's folder says about it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conf.choices import Dtype
from conf.groups import TargetConfig
from conf.schema import Config
from models import load
from models.load import dtype_of, load_model, multiplies_bfloat16, open_target
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


CPU = torch.device("cpu")


@pytest.mark.parametrize("able", [True, False])
def test_auto_computes_in_bfloat16_only_where_the_processor_multiplies_it(
    folder: Path, able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are the same numbers on both."""
    monkeypatch.setattr(load, "multiplies_bfloat16", lambda _device: able)
    config = TargetConfig(path=str(folder))
    assert config.dtype is Dtype.auto
    target = open_target(Config(target=config))
    model = load_model(target, config, CPU)
    assert model.dtype is (torch.bfloat16 if able else torch.float32)
    for name, weight in tiny_model(num_layers=1).named_parameters():
        assert torch.equal(model.get_parameter(name).float(), weight.bfloat16().float()), name
    # what is asked for by name is given everywhere
    for dtype in (Dtype.float32, Dtype.bfloat16):
        assert dtype_of(dtype, CPU) is getattr(torch, str(dtype))


def test_a_processor_is_asked_for_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not oneDNN, which also counts what it emulates at a fifth of the speed."""
    monkeypatch.setattr(load.platform, "machine", lambda: "x86_64")
    for avx, amx in ((True, False), (False, True), (False, False)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda avx=avx: avx)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        assert multiplies_bfloat16(CPU) is (avx or amx)
