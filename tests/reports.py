"""A realistic Report for tests of what shows it; its numbers obey the real one's identities."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from conf.contracts import (
    Acceptance,
    Cost,
    ExpectedAcceptance,
    Interval,
    Provenance,
    Rates,
    Report,
    Result,
)

ALPHA = {  # category -> acceptance at the first position, greedy
    "all": 0.62,
    "chat": 0.55,
    "qa": 0.60,
    "summarise": 0.58,
    "translate": 0.53,
    "mathematics": 0.71,
    "code": 0.74,
}
COST = Cost(
    draft_step_ms=5.6,
    target_step_ms=43.1,
    c=5.6 / 43.1,
    v={"1": 1.0, "2": 1.04, "3": 1.09, "4": 1.13, "5": 1.17, "8": 1.31},
    compile_seconds=71.0,
    target_bytes=269_000_000,
    draft_bytes=74_000_000,
    memory_gb_per_s=14.2,
)


ANSWER = [  # "+" an accepted draft token, "!" a correction, "*" a bonus token
    *[
        ("+", "To"),
        ("+", " reverse"),
        ("*", " a"),
        ("+", " string"),
        ("!", " in"),
        ("+", " Python"),
        ("+", ","),
    ],
    *[
        ("*", " you"),
        ("+", " can"),
        ("+", " use"),
        ("*", " the"),
        ("!", " slicing"),
        ("+", " syntax"),
        ("!", ":"),
    ],
    *[
        ("+", "\n\n"),
        ("+", "```"),
        ("*", "python"),
        ("+", "\n"),
        ("+", "def"),
        ("*", " reverse"),
        ("!", "_string"),
    ],
    *[
        ("+", "("),
        ("!", "text"),
        ("+", "):"),
        ("+", "\n"),
        ("*", "   "),
        ("+", " return"),
        ("!", " text"),
        ("!", "[::"),
    ],
    *[
        ("+", "-"),
        ("+", "1"),
        ("*", "]"),
        ("+", "\n"),
        ("+", "```"),
        ("*", "\n\n"),
        ("+", "This"),
        ("!", " walks"),
    ],
    *[("+", " the"), ("+", " string"), ("*", " backwards"), ("+", ".")],
]


def example_result(
    category: str, temperature: float, gamma: int, *, alpha: float | None = None
) -> Result:
    """One row whose counts, lengths and speedups agree; acceptance falls with position."""
    first = alpha if alpha is not None else ALPHA[category] - 0.13 * temperature
    conditional = [max(first - 0.035 * i, 0.01) for i in range(gamma)]
    survival = [math.prod(conditional[: i + 1]) for i in range(gamma)]
    num_target_calls = 1200 if category == "all" else 200
    still = [1.0, *survival, 0.0]
    histogram = [round(num_target_calls * (still[i] - still[i + 1])) for i in range(gamma + 1)]
    num_tokens = sum((i + 1) * rounds for i, rounds in enumerate(histogram))
    num_accepted = num_tokens - num_target_calls
    num_tested = sum(histogram[i] * min(i + 1, gamma) for i in range(gamma + 1))
    length = num_tokens / num_target_calls
    predicted = length / (gamma * COST.c + COST.v[str(gamma + 1)])
    efficiency = 0.94 - 0.01 * gamma
    speedup = predicted * efficiency
    spread = 0.05 if category == "all" else 0.12
    return Result(
        category=category,
        temperature=temperature,
        gamma=gamma,
        acceptance_rate=num_accepted / num_tested,
        acceptance_length=length,
        acceptance_length_histogram=histogram,
        position_acceptance=survival,
        conditional_acceptance=conditional,
        draft_utilisation=num_accepted / (num_target_calls * gamma),
        num_prompts=24 if category == "all" else 4,
        num_tokens=num_tokens,
        num_target_calls=num_target_calls,
        target_call_widths=[0] * gamma + [num_target_calls],
        num_draft_steps=num_target_calls * gamma,
        num_drafted=num_target_calls * gamma,
        num_tested=num_tested,
        num_accepted=num_accepted,
        tokens_per_second=Rates(autoregressive=22.4, speculative=22.4 * speedup),
        speedup=Interval(
            median=speedup, low=speedup * (1 - spread), high=speedup * (1 + 0.8 * spread)
        ),
        predicted_speedup=predicted,
        efficiency=efficiency,
        identical_outputs=(22 / 24 if category == "all" else 0.75) if temperature == 0 else None,
    )


def example_report(**changes: Any) -> Report:
    """The report of a default run as it could be; `changes` replace fields by name."""
    results = [
        example_result(category, temperature, gamma)
        for category in ALPHA
        for temperature in (0.0, 1.0)
        for gamma in (1, 2, 3, 4)
    ]
    best = max(
        (row for row in results if row.category == "all" and row.temperature == 0),
        key=lambda row: row.speedup.median,
    )
    fields: dict[str, Any] = {
        "fingerprint": "0123456789abcdef",
        "determined_by": {"seed": 0, "eval": {"confidence": 0.9, "max_new_tokens": 64}},
        "provenance": Provenance(
            git_commit="5ac3f11d5ac3f11d5ac3f11d5ac3f11d5ac3f11d",
            command="python -m train",
            seed=0,
            device="cpu",
            created="2026-01-05T10:12:13+00:00",
            packages={"torch": "2.13.0", "transformers": "5.24.0", "python": "3.11.2"},
            seconds=243.0,
        ),
        "name": "main",
        "target": {
            "name": "SmolLM2-135M-Instruct",
            "vocab_size": 49152,
            "num_layers": 30,
            "hidden_size": 576,
            "parameters": 134_515_008,
            "dtype": "bfloat16",
        },
        "draft": {"parameters": 63_702_720, "layers": 2, "bytes": 127_405_440, "hot_vocab": 16384},
        "machine": {
            "device": "Intel Xeon Platinum 8481C",
            "cores": 2,
            "dtype": "bfloat16",
            "compiled": True,
        },
        "cost": COST,
        "expected_acceptance": ExpectedAcceptance(
            before=Acceptance(value=0.268, low=0.262, high=0.275, count=12840),
            after=Acceptance(value=0.431, low=0.422, high=0.440, count=12840),
            after_by_category={
                name: Acceptance(
                    value=alpha - 0.17, low=alpha - 0.19, high=alpha - 0.155, count=2140
                )
                for name, alpha in ALPHA.items()
                if name != "all"
            },
            after_by_temperature={
                "0.0": Acceptance(value=0.498, low=0.481, high=0.513, count=3100),
                "0.7": Acceptance(value=0.462, low=0.449, high=0.477, count=3210),
                "1.0": Acceptance(value=0.381, low=0.370, high=0.392, count=6530),
            },
        ),
        "results": results,
        "with_lookup": [
            example_result(category, temperature, 4, alpha=0.8)
            for category in ("all", "chat", "code")
            for temperature in (0.0, 1.0)
        ],
        "best": best,
        "verdict": f"With this draft the target decodes {best.speedup.median:.2f}x as fast, "
        f"greedy, at gamma {best.gamma}.",
        "warnings": [],
        "samples": [example_sample(), example_sample(temperature=1.0)],
        "seconds_by_stage": {
            "prepare": 31.0,
            "generate": 520.0,
            "distill": 448.0,
            "evaluate": 243.0,
        },
        "peak_memory_gib": 3.4,
        "training_curve": [
            {"step": 0.0, "tokens": 0.0, "expected_acceptance": 0.259},
            *(
                {
                    "step": 40.0 * i,
                    "tokens": 21_000.0 * i,
                    "expected_acceptance": 0.259 + 0.165 * (1 - math.exp(-i / 3)),
                    "loss": 2.1 * math.exp(-i / 6) + 1.2,
                }
                for i in range(1, 13)
            ),
        ],
    }
    return Report(**{**fields, **changes})


def example_sample(*, text: str = "", temperature: float = 0.0) -> dict[str, Any]:
    """One decoded answer with the origin of each token; `text` is added as a last drafted token."""
    kinds = {"+": "draft", "!": "correction", "*": "bonus"}
    tokens = [{"text": token, "kind": kinds[kind]} for kind, token in ANSWER]
    if text:
        tokens.append({"text": text, "kind": "draft"})
    return {
        "prompt": "Write a Python function that reverses a string.",
        "category": "code",
        "temperature": temperature,
        "gamma": 2,
        "tokens": tokens,
    }


def _only(*rows: Result, **changes: Any) -> Report:
    return example_report(results=list(rows), with_lookup=[], best=rows[0], **changes)


# Reports that lack what the default run has; all of them must show
SPARSE: dict[str, Callable[[], Report]] = {
    "one greedy setting": lambda: _only(example_result("all", 0.0, 1)),
    "sampled only": lambda: _only(
        example_result("all", 1.0, 4), example_result("chat", 1.0, 4), samples=[]
    ),
    "other categories by temperature": lambda: _only(
        example_result("all", 0.0, 2), example_result("chat", 0.0, 2), example_result("qa", 1.0, 2)
    ),
    "many temperatures": lambda: _only(
        *(example_result("all", t, 2, alpha=0.5) for t in (0.0, 0.3, 0.5, 0.7, 1.0, 1.3, 2.0))
    ),
    "untrained draft": lambda: example_report(training_curve=[], samples=[]),
    "nothing decoded": lambda: _only(
        dataclasses.replace(
            example_result("all", 0.0, 1),
            acceptance_length_histogram=[0, 0],
            num_tested=0,
            num_accepted=0,
        )
    ),
    "costs not measured": lambda: example_report(
        cost=dataclasses.replace(COST, v={"1": 1.0}, memory_gb_per_s=0.0)
    ),
    "nothing recorded about the configuration": lambda: example_report(
        determined_by={}, target={"name": "t"}, draft={}, machine={}, seconds_by_stage={}
    ),
}
