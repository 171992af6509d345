"""What is recorded of vLLM's answers is the target's own, by a stand-in for vLLM's interface."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from conf.choices import Dtype, Engine
from conf.errors import ConfigError
from conf.groups import GenerateConfig
from conf.schema import Config, as_tree
from conf.vllm import VllmConfig
from data.chat import render_prompt
from data.shards import Row, read_shard
from models.decoding.sampling import NonFiniteLogits
from models.jobs import Job, jobs_of
from models.load import Target, open_target
from models.recording import Writer
from models.with_vllm import Vllm
from tests.lessons import Kept
from tests.stand_in_vllm import LLM, RequestOutput, stand_in
from tests.tiny import tiny_model, tiny_tokenizer

END = 2
WORDS = ("if a", "def b", "while c", "not d", "for e in f", "class g")
TEMPERATURES = (0.0, 0.7, 1.0)


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    package = stand_in()
    monkeypatch.setitem(sys.modules, "vllm", package)
    return package


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: PreTrainedModel) -> Path:
    return saved(tmp_path_factory.mktemp("target"), model)


def saved(folder: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def configured(folder: Path, **changes: Any) -> tuple[Config, Target]:
    config = Config()
    config.target.path = str(folder)
    config.target.dtype = Dtype.float32
    settings = {"temperatures": list(TEMPERATURES), "max_new_tokens": 24, "mass": 1.0, **changes}
    config.generate = GenerateConfig(engine=Engine.vllm, **settings)
    return config, open_target(config)


def jobs_for(target: Target, number: int = 12, split: str = "train") -> list[Job]:
    prompts = []
    for number_there in range(number):
        messages = [{"role": "user", "content": WORDS[number_there % len(WORDS)]}]
        ids = render_prompt(target.tokenizer, messages)
        prompts.append((split, number_there, "chat", ids, None))
    return jobs_of(GenerateConfig(engine=Engine.vllm, temperatures=list(TEMPERATURES)), prompts)


def recorded(
    config: Config, target: Target, jobs: Sequence[Job], say: Any = lambda _: None
) -> dict[int, Row]:
    teacher = Vllm(config, target, say)
    writer = Kept(Path(config.target.path), target.config.vocab_size, 99, 0)
    try:
        list(teacher.record(jobs, writer))
    finally:
        teacher.close()
    assert all(llm.is_shut_down for llm in LLM.made)
    return {row.index: row for row in writer.rows}


def assert_laws_are_the_targets(model: PreTrainedModel, row: Row) -> None:
    """At temperature 1, in order, to float32's last digits."""
    ids = torch.cat([row.prompt, row.generated])
    with torch.no_grad():
        own = model(ids.unsqueeze(0)).logits[0].log_softmax(-1)[-1 - row.num_laws : -1]
    top = own.topk(row.top_ids.shape[1])
    torch.testing.assert_close(row.top_log_p, top.values, atol=1e-4, rtol=0)
    assert row.top_ids.tolist() == top.indices.tolist()


# ---------------------------------------------------------------- what is recorded


def test_laws_are_those_at_temperature_1_of_prompt_and_answer(
    folder: Path, model: PreTrainedModel
) -> None:
    config, target = configured(folder)
    jobs = jobs_for(target)
    rows = recorded(config, target, jobs)
    assert {row.temperature for row in rows.values()} == set(TEMPERATURES)
    num_shared = len(os.path.commonprefix([job.prompt for job in jobs]))
    assert num_shared > 3
    for job in jobs:
        row = rows[job.index]
        assert row.prompt.tolist() == job.prompt
        assert row.top_ids.shape[1] == 32
        # as of our own engine: not of what all prompts begin with
        assert row.num_laws == len(job.prompt) - 1 - num_shared + len(row.generated)
        assert_laws_are_the_targets(model, row)
        if job.temperature == 0:
            answer = row.of_answer()
            assert answer.generated.tolist() == answer.top_ids[:, 0].tolist()


def test_prompts_have_laws_where_they_are_learned_from(
    folder: Path, model: PreTrainedModel
) -> None:
    for record_prompts, split in ((False, "train"), (True, "validation")):
        config, target = configured(folder, record_prompts=record_prompts)
        rows = recorded(config, target, jobs_for(target, split=split))
        assert all(row.num_laws == len(row.generated) for row in rows.values())
        for row in rows.values():
            assert_laws_are_the_targets(model, row)
    # it keeps none of what it has read before
    assert [llm.enable_prefix_caching for llm in LLM.made] == [True, False]


def test_an_answer_ends_with_any_of_the_targets_stop_ids(
    tmp_path: Path, model: PreTrainedModel
) -> None:
    """One of which only the generation settings name: vLLM is told. It is learned like others."""
    config, target = configured(saved(tmp_path, model))
    jobs = [job for job in jobs_for(target, 60) if job.temperature == 0]
    before = recorded(config, target, jobs)
    stop = int(before[jobs[0].index].generated[3])
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    settings["eos_token_id"] = [END, stop]
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    target = open_target(config)
    rows = recorded(config, target, jobs)
    assert rows[jobs[0].index].generated.tolist()[-1] == stop
    for job in jobs:
        row, longer = rows[job.index], before[job.index].generated.tolist()
        ends = [place for place, token in enumerate(longer) if token == stop]
        assert row.generated.tolist() == (longer[: ends[0] + 1] if ends else longer)
        assert len(row.of_answer().top_ids) == len(row.generated)
        assert_laws_are_the_targets(model, row)


def test_the_likeliest_ids_are_recorded_and_no_other_that_was_drawn(
    folder: Path, model: PreTrainedModel
) -> None:
    config, target = configured(folder, top_k=2, record_prompts=False, temperatures=[1.0])
    rows = recorded(config, target, jobs_for(target))
    drawn = [
        int(token) in law.tolist()
        for row in rows.values()
        for token, law in zip(row.generated, row.top_ids, strict=True)
    ]
    assert not all(drawn)
    for row in rows.values():
        assert row.top_ids.shape[1] == 2
        assert_laws_are_the_targets(model, row)


def test_logits_that_are_no_numbers_are_not_recorded(tmp_path: Path) -> None:
    broken = tiny_model()
    broken.lm_head.weight.data.fill_(torch.nan)
    config, target = configured(saved(tmp_path, broken), temperatures=[1.0])
    with pytest.raises(NonFiniteLogits, match="target: logits are NaN"):
        recorded(config, target, jobs_for(target))


# ---------------------------------------------------------------- what vLLM is asked for


def test_an_answer_is_the_same_in_whatever_call(folder: Path) -> None:
    """Its seed is its own: not its call's, nor its place in it, and not its prompt's."""
    found = []
    for size, first, reverse in ((1, 0, False), (5, 0, True), (100, 0, False), (4, 3, False)):
        config, target = configured(folder, vllm=VllmConfig(answers_per_call=size))
        jobs = jobs_for(target)[first:]
        rows = recorded(config, target, jobs[::-1] if reverse else jobs)
        sizes = [len(call) for call in LLM.made[-1].calls[1:]]
        assert sum(sizes) == len(jobs) and max(sizes) == min(size, len(jobs))
        found.append({index: row.generated.tolist() for index, row in rows.items()})
    assert found[0] == found[1] == found[2]
    assert found[3] == {index: found[0][index] for index in found[3]}
    drawn = {n: answer for n, answer in found[0].items() if TEMPERATURES[n % 3] == 1.0}
    assert drawn[2] != drawn[8]  # two answers to one prompt
    config.seed = 1
    other = recorded(config, target, jobs)
    assert all(other[n].generated.tolist() != drawn[n] for n in drawn if n in other)


def test_each_answer_is_sampled_at_its_own_temperature(folder: Path) -> None:
    config, target = configured(folder)
    jobs = jobs_for(target)
    recorded(config, target, jobs)
    trial, asked = LLM.made[-1].calls
    assert [parameters.temperature for parameters in asked] == [job.temperature for job in jobs]
    assert len({parameters.seed for parameters in asked}) == len(jobs)
    assert all(parameters.max_tokens == 24 for parameters in asked)
    assert [parameters.temperature for parameters in trial] == [1.0, 0.0, 0.7]


def test_laws_that_change_with_the_temperature_are_refused(
    vllm: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tempered(LLM):
        def __post_init__(self) -> None:
            self.logprobs_mode = "processed_logprobs"
            super().__post_init__()

    monkeypatch.setattr(vllm, "LLM", Tempered)
    config, target = configured(folder)
    with pytest.raises(ConfigError, match=r"at 0\.7 are not those at 1.*temperatures=\[1\.0\]"):
        recorded(config, target, jobs_for(target))
    config, target = configured(folder, temperatures=[1.0])
    jobs = [job for job in jobs_for(target) if job.temperature == 1]
    assert len(recorded(config, target, jobs)) == len(jobs)


def test_vllm_gets_the_numbers_and_the_room_that_the_settings_say(folder: Path) -> None:
    said: list[str] = []
    config, target = configured(
        folder, top_k=40, vllm=VllmConfig(tensor_parallel_size=2, gpu_memory_utilization=0.5)
    )
    config.target.dtype = Dtype.auto
    recorded(config, target, jobs_for(target), said.append)
    (llm,) = LLM.made
    assert (llm.dtype, llm.max_logprobs, llm.max_model_len) == ("bfloat16", 40, 224 + 24)
    assert (llm.tensor_parallel_size, llm.gpu_memory_utilization) == (2, 0.5)
    assert said == ["generate: vLLM 0.32.0 loads the target, which can take minutes."]


def test_what_vllm_refuses_is_one_sentence(folder: Path) -> None:
    config, target = configured(folder, max_prompt_tokens=500)
    with pytest.raises(ConfigError) as refused:
        recorded(config, target, jobs_for(target))
    sentence = str(refused.value)
    assert "(524) is greater than the derived max_model_len" in sentence
    assert "generate.max_prompt_tokens plus generate.max_new_tokens" in sentence
    assert "\n" not in sentence and "ArgsKwargs" not in sentence


def test_a_launch_of_several_processes_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config, target = configured(folder)
    with pytest.raises(ConfigError, match=r"one of 2\. .*tensor_parallel_size=2, and launch"):
        Vllm(config, target, lambda _: None)


# ---------------------------------------------------------------- what is kept


def test_what_was_answered_is_kept_when_a_call_fails(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = LLM.generate

    def third_fails(self: LLM, prompts: Any, asked: Any, **rest: Any) -> list[RequestOutput]:
        if len(self.calls) == 3:
            raise RuntimeError("the engine died")
        return whole(self, prompts, asked, **rest)

    monkeypatch.setattr(LLM, "generate", third_fails)
    config, target = configured(folder, vllm=VllmConfig(answers_per_call=5))
    teacher = Vllm(config, target, lambda _: None)
    jobs = jobs_for(target)
    with pytest.raises(RuntimeError, match="died"):
        list(teacher.record(jobs, Writer(tmp_path, target.config.vocab_size, 4, 0)))
    teacher.close()
    there = [row.index for path in sorted(tmp_path.glob("*")) for row in read_shard(path)]
    assert there == [job.index for job in jobs[:10]]


def test_which_settings_make_another_recording() -> None:
    def key(engine: Engine, **changes: Any) -> dict[str, Any]:
        settings = GenerateConfig(engine=engine, **changes)
        return settings.what_determines(as_tree(settings))

    ours, theirs = key(Engine.builtin), key(Engine.vllm)
    assert "vllm" not in ours and "engine" not in ours
    assert theirs == {**ours, "engine": "vllm"}
    assert theirs == key(Engine.vllm, vllm=VllmConfig(4, 0.5, 7))
    assert theirs != key(Engine.vllm, top_k=8)
    assert "vllm" not in key(Engine.server)
