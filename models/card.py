"""The model card: what a stranger needs to use a draft and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from conf.contracts import Acceptance, Draft, Interval, Report, Result
from models.serving import STAND_INS, serving_commands

TAGS = ["speculative-decoding", "draft-model", "assisted-generation", "draftsmith"]
POOLED = "all"  # the category of rows over every prompt
COLUMNS = [
    "speedup",
    "predicted",
    "tokens/s alone",
    "tokens/s with draft",
    "acceptance rate",
    "tokens per call",
    "utilisation",
    "identical",
    "prompts",
    "tokens",
]


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
        _measurements(report, recipe, publication),
        _cost(report),
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
    sources = _group(recipe, "data", "sources").values()
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
    size = f"{_count(draft.parameters)} parameters in {_plural(draft.num_layers, 'layer')}"
    if "parameters" in report.target:
        size += f"; the target has {_count(report.target['parameters'])}"
    return (
        f"A draft model for speculative decoding with {target}: it proposes tokens cheaply, and "
        "the target checks several of them in one call. The text stays the target's own, token for "
        "token when decoding greedily and in distribution when sampling, up to rounding; only the "
        "speed changes. "
        f"It has {size}. By itself it is of no use as a language model."
    )


def _summary(report: Report) -> str:
    expected, best, sampled = report.expected_acceptance, report.best, best_sampled(report)
    rows = [("speedup, greedy", _speedup(best.speedup), f"drafting {best.drafting}")]
    if sampled is not None:
        name = f"speedup, sampled at temperature {sampled.temperature:g}"
        rows.append((name, _speedup(sampled.speedup), f"drafting {sampled.drafting}"))
    rows += [
        ("tokens per target call, greedy", f"{best.acceptance_length:.2f}", "1 without a draft"),
        ("acceptance rate, greedy", f"{best.acceptance_rate:.1%}", "of the tested drafted tokens"),
        (
            "expected acceptance",
            _expected(expected.after),
            f"before distillation {_expected(expected.before)}",
        ),
    ]
    return _table(["", "measured", ""], rows)


def _usage(report: Report, publication: Publication) -> str:
    target, draft = publication.base_model or "TARGET", publication.repo_id or "DRAFT"
    length = report.best.usual_length
    advice = (
        f"The fastest setting here drafted {_plural(length, 'token')} a call on average. The "
        "optimum depends on the machine: try one less and one more."
    )
    names = [f"`{name}` for {text}" for name, text in STAND_INS.items() if name in (target, draft)]
    if names:
        advice += f" Below stand {' and '.join(names)}."
    return f"## Use\n\n{advice}\n\n{serving_commands(target, draft, length)}"


def _measurements(report: Report, recipe: Mapping[str, Any], publication: Publication) -> str:
    confidence = _group(recipe, "eval").get("confidence")
    interval = "interval" if confidence is None else f"{confidence:.0%} interval"
    machine = ", ".join(f"{key} {value}" for key, value in report.machine.items())
    blocks = [
        "## What was measured",
        f"Machine: {machine}. One request at a time, with draftsmith's own decoder; the baseline "
        "is the same target decoding token by token in the same loop. Speedup is wall time "
        "without the draft over wall time with it, prefill included: the median and in brackets "
        f"its {interval}.",
    ]
    for temperature in sorted({row.temperature for row in report.results}):
        blocks += _at_temperature(report, temperature)
    blocks += [f"![{name.rpartition('.')[0]}]({name})" for name in publication.plots]
    blocks.append(
        "- *predicted*: the speedup expected from acceptance and cost alone (see below)\n"
        "- *acceptance rate*: accepted / tested drafted tokens; after a rejection none is tested\n"
        "- *tokens per call*: tokens committed per target call, the target's own included\n"
        "- *utilisation*: accepted / drafted tokens, which some engines call acceptance rate\n"
        "- *identical*: prompts whose greedy text equals the target's own, token for token; in "
        "half precision, rounding may decide between two nearly equal tokens differently\n"
        "- *expected acceptance*: mean overlap of the draft's and the target's next-token "
        "distributions at temperature 1, over held-out answers"
    )
    return "\n\n".join(blocks)


def _at_temperature(report: Report, temperature: float) -> list[str]:
    name = "Greedy" if temperature == 0 else f"Sampled at temperature {temperature:g}"
    rows = [row for row in report.results if row.temperature == temperature]
    pooled = sorted((row for row in rows if row.category == POOLED), key=lambda row: row.gamma)
    best = max(pooled or rows, key=lambda row: row.speedup.median)
    if temperature == report.best.temperature:
        best = report.best
    chosen = [row for row in rows if row.drafts_like(best)]
    chosen.sort(key=lambda row: (row.category == POOLED, row.category))
    blocks = [
        f"### {name}, draft length {best.drafting}, by category",
        _table(["category", *COLUMNS], [(row.category, *_cells(row)) for row in chosen]),
    ]
    if len(pooled) > 1:
        blocks += [
            f"### {name}, all categories, by draft length",
            _table(["draft length", *COLUMNS], [(row.drafting, *_cells(row)) for row in pooled]),
        ]
    return blocks


def _cells(row: Result) -> tuple[str, ...]:
    return (
        _speedup(row.speedup),
        f"{row.predicted_speedup:.2f}x",
        f"{row.tokens_per_second.autoregressive:.1f}",
        f"{row.tokens_per_second.speculative:.1f}",
        f"{row.acceptance_rate:.1%}",
        f"{row.acceptance_length:.2f}",
        f"{row.draft_utilisation:.1%}",
        "" if row.identical_outputs is None else f"{row.identical_outputs:.0%}",
        str(row.num_prompts),
        str(row.num_tokens),
    )


def _cost(report: Report) -> str:
    cost = report.cost
    widths = sorted(cost.v.items(), key=lambda item: int(item[0]))
    blocks = [
        "## Why this speed",
        f"A draft step takes {cost.draft_step_ms:.2f} ms and a target step "
        f"{cost.target_step_ms:.2f} ms: c = {cost.c:.3f}. A target call over several tokens costs "
        "v times one over a single token:",
        _table(
            ["tokens", *(width for width, _ in widths)],
            [("v", *(f"{value:.2f}" for _, value in widths))],
        ),
        "Predicted speedup = tokens per call / (draft length x c + v(draft length + 1)). Another "
        "machine or engine has another c and v; acceptance depends on the models and the text.",
    ]
    by_category = sorted(report.expected_acceptance.after_by_category.items())
    if by_category:
        rows = [(name, _expected(value)) for name, value in by_category]
        blocks.append(_table(["category", "expected acceptance"], rows))
    return "\n\n".join(blocks)


def _training(draft: Draft, recipe: Mapping[str, Any]) -> str:
    objective, optim = _group(recipe, "objective"), _group(recipe, "optim")
    expected = draft.expected_acceptance
    start = "a smaller model with the target's tokenizer"
    if draft.layers:
        start = f"layers {', '.join(map(str, draft.layers))} of the target"
        if _group(recipe, "draft").get("warm_start"):
            start += ", with a closed-form fit to the target's final hidden state"
    how = ""
    if "divergence" in objective and "name" in optim:
        then = f", then {objective['finish']}" if objective.get("finish") else ""
        how = f", minimising {objective['divergence']}{then} with {optim['name']}"
    blocks = [
        "## How it was made",
        "The target answered the training prompts, and its next-token distributions were "
        f"recorded. The draft started as {start}. It was distilled on "
        f"{_count(draft.num_tokens_seen)} answer tokens in {_plural(draft.num_steps, 'step')} "
        f"({draft.seconds / 60:.1f} minutes){how}; step {draft.best_step} was kept. On recorded "
        f"validation answers its expected acceptance went from {_expected(expected.before)} to "
        f"{_expected(expected.after)}, a lower bound, since the recording is sparse.",
    ]
    sources = _group(recipe, "data", "sources")
    if sources:
        named = ", ".join(f"{name} ({sources[name].get('category')})" for name in sorted(sources))
        blocks.append(f"Prompts: {named}.")
    return "\n\n".join(blocks)


def _limits(report: Report, recipe: Mapping[str, Any], publication: Publication) -> str:
    generate, target = _group(recipe, "generate"), _group(recipe, "target")
    weights = ""
    if target.get("gguf") or target.get("package"):
        # only the file's name: a card does not tell where somebody keeps their files
        weights = f" from {target['path'].rpartition('/')[2]}"
    elif target.get("revision"):
        weights = f" at revision {target['revision']}"
    categories = ", ".join(sorted({row.category for row in report.results} - {POOLED}))
    suites = ", ".join(sorted(_group(recipe, "eval", "suites")))
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
        + _table(["", "command", "commit", "seed", "device", "when"], rows)
        + f"\n\nVersions: {packages}."
    )


# ---------------------------------------------------------------- words and cells


def _group(tree: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """The mapping under `keys`; empty where the manifests did not record it."""
    for key in keys:
        found = tree.get(key)
        tree = found if isinstance(found, Mapping) else {}
    return tree


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    # a pipe inside a cell would end it
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _speedup(value: Interval) -> str:
    return f"{value.median:.2f}x [{value.low:.2f}, {value.high:.2f}]"


def _expected(value: Acceptance) -> str:
    return f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]"


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
