"""A pretrained draft of another tokenizer, from the configuration to the report and the chat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from conf.contracts import Draft, Report
from data.chat import render_prompt
from eval.__main__ import main
from eval.chat import HARMLESS
from eval.pair import load_draft
from models.decoding.by_cost import Calibration
from models.decoding.translated import Translation
from tests.commands import Place, tiny_place
from tests.tiny import OTHER_VOCAB_SIZE, other_tokenizer, tiny_model, tiny_tokenizer

QUESTION = "Why is the house red?"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = tiny_place(tmp_path_factory.mktemp("shared"))
    # more rows than its tokenizer has ids, and a shorter context than the target's
    model = tiny_model(
        num_layers=1,
        seed=3,
        vocab_size=OTHER_VOCAB_SIZE + 8,
        max_position_embeddings=160,
        tie_word_embeddings=True,
    )
    model.save_pretrained(place.folder / "stranger")
    other_tokenizer().save_pretrained(place.folder / "stranger")
    return place


def overrides(place: Place, *more: str) -> tuple[str, ...]:
    stranger = f"draft.pretrained={place.folder / 'stranger'}"
    return ("draft=pretrained", stranger, "draft.vocab=shared", "tracker=none", *more)


@pytest.fixture(scope="module")
def shown(place: Place) -> str:
    """What the command says; its run is finished."""
    return place.run(*overrides(place)).stderr


def test_the_draft_is_taken_as_it_is(place: Place, shown: str) -> None:
    folder = place.outputs / "main" / "draft"
    translation = Translation.of(tiny_tokenizer(), other_tokenizer())
    draft = Draft.read(folder)
    assert draft.shared_vocab == len(translation.target_ids_S) > 256
    assert (draft.num_steps, draft.layers, draft.num_layers) == (0, [], 1)
    assert "has a tokenizer of its own" in shown and "used as it is" in shown
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer.get_vocab() == other_tokenizer().get_vocab()
    model, ids = load_draft(folder / "model", torch.float32, torch.device("cpu"), int8=False)
    assert ids is not None and torch.equal(ids, translation.draft_ids_S)
    assert model.get_output_embeddings().out_features == len(ids)
    assert Calibration.read(folder / "model") is not None


def test_greedy_outputs_are_the_targets(place: Place, shown: str) -> None:
    report = Report.read(place.outputs / "main" / "report")
    greedy = [row for row in (*report.results, *report.with_lookup) if row.temperature == 0]
    assert {row.drafting for row in greedy} == {"1", "3", "4", "up to 7, by cost"}
    for row in greedy:
        assert row.identical_outputs == 1.0
    assert sum(row.num_accepted for row in report.results) > 0
    assert report.draft["shared_vocab"] > 256
    assert 0 < report.expected_acceptance.after.value < 1
    assert report.expected_acceptance.before == report.expected_acceptance.after
    page = (place.outputs / "main" / "report" / "index.html").read_text(encoding="utf-8")
    assert "its own tokenizer shares" in page
    assert "assistant_tokenizer" in page and "vllm serve" not in page
    assert report.verdict in shown


@pytest.mark.usefixtures("shown")
def test_what_decoding_accepts_is_what_the_laws_promise(place: Place) -> None:
    """On the suites' own answers, of which the report warns otherwise."""
    assert Report.read(place.outputs / "main" / "report").warnings == []


@pytest.mark.usefixtures("shown")
def test_the_chat_answers_as_the_target_does(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["chat", "--outputs", str(place.outputs), "--once", QUESTION, "--temperature", "0"]
    assert main([*command, "--no-compile", "--max-new-tokens", "24", "--context", "256"]) == 0
    tokenizer, target = tiny_tokenizer(), tiny_model(num_layers=4)
    prompt = render_prompt(tokenizer, [{"role": "user", "content": QUESTION}])
    ids = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24)[0]
    said = str(tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True))
    assert capsys.readouterr().out == said.translate(HARMLESS) + "\n"


@pytest.mark.usefixtures("shown")
def test_the_same_command_again_skips_it_and_publishing_is_refused(place: Place) -> None:
    assert "draft is there already" in place.run(*overrides(place, "stage=distill")).stderr
    done = place.run(*overrides(place, "stage=publish"), code=2)
    assert "nothing was trained" in done.stderr.splitlines()[-1]
    # what is not trained does not depend on how
    place.run(*overrides(place, "stage=distill", "optim.lr=0.5", "objective=lk"))


@pytest.mark.usefixtures("shown")
def test_fewer_tokens_are_proposed_with_a_hot_vocabulary(place: Place) -> None:
    place.run(*overrides(place, "name=hot", "draft.hot_vocab=40"))
    folder = place.outputs / "hot"
    assert 0 < Draft.read(folder / "draft").shared_vocab <= 40
    best = Report.read(folder / "report").best
    assert best.identical_outputs == 1.0


@pytest.mark.usefixtures("shown")
def test_a_draft_of_another_tokenizer_is_refused_without_being_asked_for(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    done = place.run(*overrides(place)[:2], "name=other", "tracker=none", code=2)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: draft.pretrained=") and "draft.vocab=shared" in last
    # also one that was put where a distilled one belongs
    hot = place.outputs / "main" / "draft" / "model" / "hot_vocab.json"
    known = hot.read_text(encoding="utf-8")
    tree = json.loads(known)
    del tree["target_ids"]
    hot.write_text(json.dumps(tree), encoding="utf-8")
    try:
        assert main(["chat", "--outputs", str(place.outputs), "--once", QUESTION]) == 2
    finally:
        hot.write_text(known, encoding="utf-8")
    said = capsys.readouterr().err.splitlines()[-1]
    assert "tokenizer is not the target's" in said and "draft.vocab=shared" in said


def test_the_targets_own_tokenizer_needs_no_sharing(place: Place, tmp_path: Path) -> None:
    tiny_model(num_layers=1).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    settings = ("draft=pretrained", f"draft.pretrained={tmp_path}", "draft.vocab=shared")
    done = place.run(*settings, "name=same", "tracker=none", code=2)
    assert "Leave draft.vocab out" in done.stderr.splitlines()[-1]
    done = place.run("draft.vocab=shared", "name=same", "tracker=none", code=2)
    assert done.stderr.splitlines()[-1].startswith("error: draft.vocab=shared: ")
