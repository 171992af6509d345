"""The model card: what a stranger needs to use a draft and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from conf.contracts import Draft, Report, Result
from models.card_measured import POOLED, measurements, why_this_speed
from models.card_words import acceptance_text, count_text, group_of, plural, speedup_text, table_of
from models.serving import STAND_INS, serving_commands

TAGS = ["speculative-decoding", "draft-model", "assisted-generation", "draftsmith"]


@dataclass(frozen=True)
class Publication:
    """What manifests do not know: names on the Hub, the licence, the pictures beside the card."""

    target: str  # shown to the reader
    base_model: str  # Hub id of the target; empty: unknown
    repo_id: str  # empty: the folder is not meant for the Hub yet
    license: str
    plots: Sequence[str] = ()


def model_card(
    report: Report, draft: Draft, recipe: Mapping[str, Any], publication: Publication
) -> str:
    """README.md of the published folder: YAML front matter and Markdown.

    Every number comes from `report` and `draft`. `recipe` is the configuration that the manifests
    recorded (their `determined_by`, merged); what it lacks, the card does not claim.
    """
    title = publication.repo_id.rpartition("/")[2] or f"{report.name} draft"
    parts = [
        f"---\n{_front_matter(recipe, publication)}---",
        f"# {title}",
        f"**{report.verdict}**",
        _introduction(report, draft, publication),
        _summary(report),
        _usage(report, publication),
        measurements(report, recipe, publication.plots),
        why_this_speed(report),
        _training(draft, recipe),
        _limits(report, recipe, publication),
        _provenance(report, draft),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def best_sampled(report: Report) -> Result | None:
    """The pooled row above temperature 0 with the highest median speedup; None if there is none."""
    rows = [row for row in report.results if row.category == POOLED and row.temperature > 0]
    return max(rows, key=lambda row: row.speedup.median, default=None)


def _front_matter(recipe: Mapping[str, Any], publication: Publication) -> str:
    sources = group_of(recipe, "data", "sources").values()
    fields: dict[str, Any] = {
        "base_model": publication.base_model,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": publication.license,
        "datasets": sorted({source["path"] for source in sources if source.get("kind") == "hub"}),
        "tags": TAGS,
    }
    # the Hub refuses an empty base_model or list of data sets: what is unknown is left out
    known = {key: value for key, value in fields.items() if value}
    return str(yaml.safe_dump(known, sort_keys=False, allow_unicode=True))


def _introduction(report: Report, draft: Draft, publication: Publication) -> str:
    target = publication.target
    if publication.base_model:
        target = f"[{publication.base_model}](https://huggingface.co/{publication.base_model})"
    size = f"{count_text(draft.parameters)} parameters in {plural(draft.num_layers, 'layer')}"
    if "parameters" in report.target:
        size += f"; the target has {count_text(report.target['parameters'])}"
    return (
        f"A draft model for speculative decoding with {target}: it proposes tokens cheaply, and "
        "the target checks several of them in one call. The text stays the target's own, token for "
        "token when decoding greedily and in distribution when sampling, up to rounding; only the "
        "speed changes. "
        f"It has {size}. By itself it is of no use as a language model."
    )


def _summary(report: Report) -> str:
    expected, best, sampled = report.expected_acceptance, report.best, best_sampled(report)
    rows = [("speedup, greedy", speedup_text(best.speedup), f"drafting {best.drafting}")]
    if sampled is not None:
        name = f"speedup, sampled at temperature {sampled.temperature:g}"
        rows.append((name, speedup_text(sampled.speedup), f"drafting {sampled.drafting}"))
    rows += [
        ("tokens per target call, greedy", f"{best.acceptance_length:.2f}", "1 without a draft"),
        ("acceptance rate, greedy", f"{best.acceptance_rate:.1%}", "of the tested drafted tokens"),
        (
            "expected acceptance",
            acceptance_text(expected.after),
            f"before distillation {acceptance_text(expected.before)}",
        ),
    ]
    return table_of(["", "measured", ""], rows)


def _usage(report: Report, publication: Publication) -> str:
    target, draft = publication.base_model or "TARGET", publication.repo_id or "DRAFT"
    length = report.best.usual_length
    advice = (
        f"The fastest setting here drafted {plural(length, 'token')} a call on average. The "
        "optimum depends on the machine: try one less and one more."
    )
    names = [f"`{name}` for {text}" for name, text in STAND_INS.items() if name in (target, draft)]
    if names:
        advice += f" Below stand {' and '.join(names)}."
    return f"## Use\n\n{advice}\n\n{serving_commands(target, draft, length)}"


def _training(draft: Draft, recipe: Mapping[str, Any]) -> str:
    objective, optim = group_of(recipe, "objective"), group_of(recipe, "optim")
    expected = draft.expected_acceptance
    start = "a smaller model with the target's tokenizer"
    if draft.layers:
        start = f"layers {', '.join(map(str, draft.layers))} of the target"
        if group_of(recipe, "draft").get("warm_start"):
            start += ", with a closed-form fit to the target's final hidden state"
            if group_of(recipe, "draft").get("fit_steps"):
                start += " that was refined on the recorded distributions"
    how = ""
    if "divergence" in objective and "name" in optim:
        then = f", then {objective['finish']}" if objective.get("finish") else ""
        how = f", minimising {objective['divergence']}{then} with {optim['name']}"
    blocks = [
        "## How it was made",
        "The target answered the training prompts, and its next-token distributions were "
        f"recorded. The draft started as {start}. It was distilled on "
        f"{count_text(draft.num_tokens_seen)} answer tokens in {plural(draft.num_steps, 'step')} "
        f"({draft.seconds / 60:.1f} minutes){how}; step {draft.best_step} was kept. On recorded "
        f"validation answers its expected acceptance went from {acceptance_text(expected.before)}"
        f" to {acceptance_text(expected.after)}, a lower bound, since the recording is sparse.",
    ]
    sources = group_of(recipe, "data", "sources")
    if sources:
        named = ", ".join(f"{name} ({sources[name].get('category')})" for name in sorted(sources))
        blocks.append(f"Prompts: {named}.")
    return "\n\n".join(blocks)


def _limits(report: Report, recipe: Mapping[str, Any], publication: Publication) -> str:
    generate, target = group_of(recipe, "generate"), group_of(recipe, "target")
    weights = ""
    if target.get("gguf") or target.get("package"):
        # only the file's name: a card does not tell where somebody keeps their files
        weights = f" from {target['path'].rpartition('/')[2]}"
    elif target.get("revision"):
        weights = f" at revision {target['revision']}"
    categories = ", ".join(sorted({row.category for row in report.results} - {POOLED}))
    suites = ", ".join(sorted(group_of(recipe, "eval", "suites")))
    limits = [
        f"Made for and measured on {publication.target}{weights}, whose vocabulary has "
        f"{report.target['vocab_size']} ids. With other weights of it (quantised, fine-tuned, "
        "updated) the text stays right and acceptance differs; a target with another tokenizer "
        "cannot use this draft.",
        f"Measured on {report.best.num_prompts} prompts"
        + (f" ({categories})" if categories else "")
        + (f" from {suites}" if suites else "")
        + ". Other kinds of text and other languages may be accepted less.",
        "Measured one request at a time. In large batches the target is busy and drafting gains "
        "less, or costs.",
    ]
    if {"max_prompt_tokens", "max_new_tokens"} <= generate.keys():
        prompt, answer = generate["max_prompt_tokens"], generate["max_new_tokens"]
        limits.append(
            f"Trained on at most {prompt} tokens of prompt and {answer} of answer, "
            f"{prompt + answer} together. Expect less acceptance beyond."
        )
    if draft_ids := report.draft.get("hot_vocab"):
        limits.append(
            f"Measured proposing only the {draft_ids} most frequent ids (`hot_vocab.json`, read by "
            "draftsmith's decoder). The engines above draft over the whole vocabulary, which makes "
            "their draft steps slower."
        )
    return "## Limits\n\n" + "\n".join(f"- {limit}" for limit in [*limits, *report.warnings])


def _provenance(report: Report, draft: Draft) -> str:
    made = {"distilled": draft.provenance, "measured": report.provenance}
    rows = [
        (stage, f"`{it.command}`", it.git_commit, str(it.seed), it.device, it.created)
        for stage, it in made.items()
    ]
    packages = ", ".join(f"{name} {value}" for name, value in report.provenance.packages.items())
    return (
        "## Provenance\n\nMade with draftsmith. `report.json` beside this card holds every row "
        "and its counts.\n\n"
        + table_of(["", "command", "commit", "seed", "device", "when"], rows)
        + f"\n\nVersions: {packages}."
    )
