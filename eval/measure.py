"""Suites decoded with and without a draft, in turns, and what comes of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

from conf.contracts import Cost, Difference, Rates, Result, drafting
from conf.groups import EvalConfig
from conf.schema import Config
from conf.tracking import Tracker
from eval.acceptance import Text, mean_overlap
from eval.pair import ModelPair, Pieces
from eval.speed import Decoded, Pair, predicted_speedup, speedup, timed
from eval.ties import tie
from models.decoding.counts import Counts
from models.decoding.sampling import Sampling
from models.decoding.speculative import Decoder

ALL = "all"
AT_ONE = Sampling(temperature=1.0)


@dataclass(frozen=True)
class Question:
    """A prompt of a suite, as ids."""

    category: str
    prompt: list[int]
    text: str


class Setting(NamedTuple):
    """What is measured beside plain decoding."""

    beside_lookup: bool
    temperature: float
    gamma: int
    by_cost: bool


class Way(NamedTuple):
    """A way of drafting: at most `most` tokens, whoever drafts; `gamma` names it in the report."""

    decoder: Decoder
    most: int
    gamma: int
    beside_lookup: bool = False
    by_cost: bool = False


@dataclass
class Decodings:
    """Rows of the draft alone and beside prompt lookup, the answers sampled at temperature 1
    without a draft, and marked-up samples.
    """

    alone: list[Result] = field(default_factory=list)
    with_lookup: list[Result] = field(default_factory=list)
    answers: list[Text] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)


def ways_of(models: ModelPair, settings: EvalConfig, c: float, v: Mapping[int, float]) -> list[Way]:
    """What is measured: the draft alone at each draft length and by these costs, and the last of
    them beside prompt lookup.
    """
    found = [Way(models.decoder, gamma, gamma) for gamma in sorted(settings.gammas)]
    by_cost = models.by_cost(c, v, settings.by_cost) if settings.by_cost else None
    if by_cost is not None:
        found.append(Way(by_cost, settings.by_cost, settings.by_cost, by_cost=True))
    if settings.lookup_gamma:
        alone, gamma = found[-1], settings.lookup_gamma
        decoder = models.beside_lookup(alone.decoder, alone.most, gamma)
        found.append(Way(decoder, max(alone.most, gamma), gamma, beside_lookup=True))
    return [way._replace(decoder=replace(way.decoder, rule=settings.verification)) for way in found]


def decode_all(
    config: Config, models: ModelPair, questions: Sequence[Question], cost: Cost, tracker: Tracker
) -> Decodings:
    """Decode every prompt at every setting, autoregressive and speculative runs taking turns."""
    settings = config.eval
    measured = ways_of(models, settings, cost.c, {int(k): v for k, v in cost.v.items()})
    num_alone = sum(not way.beside_lookup for way in measured)
    pairs: dict[tuple[Setting, str], list[Pair]] = defaultdict(list)
    unlike: dict[tuple[Setting, int], Pair] = {}
    found = Decodings()
    visits = list(product(settings.temperatures, range(settings.repeats), enumerate(questions)))
    total = len(visits) * (1 + len(measured))
    with tracker.progress("evaluate: decoding", total, "outputs") as bar:
        for temperature, repeat, (number, question) in visits:
            seed = config.seed + 1000 * repeat + number
            plain = _decode(models.decoder, 0, question, temperature, config, seed)
            bar.advance()
            if temperature == 1.0:
                found.answers.append(
                    Text(question.prompt, plain.tokens, question.category, temperature)
                )
            # another order for every prompt: no setting is always measured right after the baseline
            for place in range(len(measured)):
                index = (place + number) % len(measured)
                way = measured[index]
                fast = _decode(way.decoder, way.most, question, temperature, config, seed)
                bar.advance()
                setting = Setting(way.beside_lookup, temperature, way.gamma, way.by_cost)
                for category in (ALL, question.category):
                    pairs[setting, category].append(Pair(plain, fast))
                if temperature == 0 and plain.tokens != fast.tokens:
                    unlike[setting, number] = Pair(plain, fast)
                is_shown = repeat == 0 and number % settings.prompts_per_category == 0
                if is_shown and index == num_alone - 1:
                    found.samples.append(_sample(models, question, fast, setting))
    differences: dict[tuple[Setting, str], list[Difference]] = defaultdict(list)
    for (setting, number), pair in unlike.items():
        for category in (ALL, questions[number].category):
            differences[setting, category].append(_difference(models, questions[number], pair))
    for (setting, category), those in sorted(pairs.items()):
        rows = found.with_lookup if setting.beside_lookup else found.alone
        row = _result(category, setting, those, cost, settings.confidence)
        rows.append(replace(row, differences=differences[setting, category]))
    return found


def _difference(models: ModelPair, question: Question, pair: Pair) -> Difference:
    plain, fast = pair.autoregressive.tokens, pair.speculative.tokens
    found = tie(models.decoder.target, question.prompt, plain, fast)
    assert found is not None
    ours, theirs = (
        str(models.target.tokenizer.decode([output[found.position]])) for output in (plain, fast)
    )
    return Difference(
        category=question.category,
        prompt=question.text,
        autoregressive=ours,
        speculative=theirs,
        **found._asdict(),
    )


def _decode(
    decoder: Decoder, gamma: int, question: Question, temperature: float, config: Config, seed: int
) -> Decoded:
    return timed(
        decoder,
        question.prompt,
        gamma=gamma,
        max_new_tokens=config.eval.max_new_tokens,
        sampling=Sampling(temperature),
        seed=seed,
    )


def best_of(rows: Sequence[Result], temperature: float) -> Result | None:
    """The fastest setting over all prompts at a temperature."""
    pooled = [row for row in rows if (row.category, row.temperature) == (ALL, temperature)]
    return max(pooled, key=lambda row: row.speedup.median, default=None)


def _result(
    category: str, setting: Setting, pairs: Sequence[Pair], cost: Cost, confidence: float
) -> Result:
    counts = sum((pair.speculative.counts for pair in pairs), Counts())
    seconds = [pair.seconds() for pair in pairs]
    num_tokens = sum(one[2] for one in seconds)
    measured = speedup(pairs, confidence)
    predicted = predicted_speedup(counts, cost)
    same = sum(pair.autoregressive.tokens == pair.speculative.tokens for pair in pairs) / len(pairs)
    return Result(
        category=category,
        temperature=setting.temperature,
        gamma=setting.gamma,
        by_cost=setting.by_cost,
        acceptance_rate=counts.acceptance_rate,
        acceptance_length=counts.acceptance_length,
        acceptance_length_histogram=counts.calls_by_length,
        position_acceptance=counts.position_acceptance,
        conditional_acceptance=counts.conditional_acceptance,
        draft_utilisation=counts.draft_utilisation,
        num_prompts=len(pairs),
        num_tokens=counts.num_tokens,
        num_target_calls=counts.num_target_calls,
        target_call_widths=counts.calls_by_width,
        num_draft_steps=counts.num_draft_steps,
        num_drafted=counts.num_drafted,
        num_tested=counts.num_tested,
        num_accepted=counts.num_accepted,
        tokens_per_second=Rates(
            autoregressive=num_tokens / sum(one[0] for one in seconds),
            speculative=num_tokens / sum(one[1] for one in seconds),
        ),
        speedup=measured,
        predicted_speedup=predicted,
        efficiency=measured.median / predicted,
        identical_outputs=same if setting.temperature == 0 else None,
    )


def _sample(
    models: ModelPair, question: Question, decoded: Decoded, setting: Setting
) -> dict[str, Any]:
    """An output with the origin of each token: accepted drafts, corrections after a rejection,
    bonus tokens.
    """
    pieces = Pieces(models.target.tokenizer)
    tokens = [piece for step in decoded.rounds for piece in pieces.of_round(step)]
    tokens += pieces.rest()
    return {
        "prompt": question.text,
        "category": question.category,
        "temperature": setting.temperature,
        "drafting": drafting(setting.gamma, by_cost=setting.by_cost),
        "tokens": [asdict(piece) for piece in tokens],
    }


def check_estimate(
    models: ModelPair, answers: Sequence[Text], results: Sequence[Result], confidence: float
) -> list[str]:
    """A warning when decoding accepts otherwise than the teacher-forced estimate on the same kind
    of text says.

    Compares rounds of one drafted token at temperature 1: later ones are tested only after
    successes, and block verification accepts more.
    """
    rows = [row for row in results if (row.category, row.temperature, row.gamma) == (ALL, 1.0, 1)]
    if not answers or not rows:
        return []
    found = [models.overlaps(text, AT_ONE)[-1] for text in answers]
    estimate = mean_overlap(found, confidence)
    tested = sum(row.num_target_calls for row in rows)
    measured = sum(row.conditional_acceptance[0] * row.num_target_calls for row in rows) / tested
    noise = (
        2 * (measured * (1 - measured) / (tested / len(rows))) ** 0.5
        + (estimate.high - estimate.low) / 2
    )
    if abs(measured - estimate.value) <= noise:
        return []
    return [
        f"Decoding at temperature 1 accepted {measured:.3f} of first drafted tokens, but the laws"
        f" of the same draft overlap by {estimate.value:.3f} on text of that kind (tolerance"
        f" {noise:.3f}). One of the two is wrong: do not trust this report."
    ]
