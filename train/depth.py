"""How many of the target's layers become the draft, chosen before training (draft.num_layers=0).

A deeper draft is accepted more often and takes longer. Both are known before the first step: its
acceptance after the warm start, and the time of a decoding step. Drafts of a target's first layers
share their computation, so one reading of the deepest is a reading of all.

What training adds is not known, and deeper drafts gain more by it: the best draft after a long
training has more layers than are chosen here.
"""

# K depths, N supervised positions, D features of the body, E of the head

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from conf.contracts import Depth, Lessons
from conf.run import Run, fingerprint, process_rank, write_atomically
from conf.schema import Config
from conf.tracking import Tracker
from data.batches import Batch, collate
from data.shards import Row
from models.decoding.costs import seconds_by_depth
from models.draft import DraftModel, final_norm, neutralise, ridge_maps
from models.load import Target, device_of, dtype_of, load_model, release_freed
from models.packed import states_of_layers
from train.head import Head
from train.processes import agreed
from train.start import build, first_answers
from train.states import recorded_or_computed
from train.validation import packs

DEPTHS = "depths.json"  # what was compared and chosen, beside the draft
MOST_POSITIONS = 8192  # of validation answers
MOST_GAMMA = 8  # length of drafts


def settle_depth(
    config: Config,
    run: Run,
    tracker: Tracker,
    target: Target,
    lessons: Lessons,
    hot_ids: Tensor | None,
    train: Sequence[Row],
    validation: Sequence[Row],
    made_by: Mapping[str, Any],
) -> tuple[Config, list[Depth]]:
    """The configuration with a number of layers, and what it was chosen from.

    Step times differ from one run of the command to the next, so the choice of a draft that is
    determined by `made_by` is made once and kept in its folder. The first process decides for all;
    the others have nothing to choose from.
    """
    if not config.draft.chooses_depth:
        return config, []
    path, begun_by = run.draft / DEPTHS, fingerprint(made_by)
    chosen, depths = 0, []
    if process_rank() == 0:
        kept = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        if kept.get("fingerprint") != begun_by:
            found = compare(config, target, lessons, hot_ids, train, validation)
            release_freed()  # the target and all those drafts
            kept = {
                "fingerprint": begun_by,
                "num_layers": best(found).num_layers,
                "depths": [asdict(depth) for depth in found],
            }
            write_atomically(path, json.dumps(kept, indent=1) + "\n")
        chosen, depths = kept["num_layers"], [Depth(**depth) for depth in kept["depths"]]
        rows = [list(asdict(depth).values()) for depth in depths]
        tracker.table("distill/depths", list(asdict(depths[0])), rows)
    chosen = agreed(chosen, device_of(config.runtime))
    tracker.message(f"distill: draft.num_layers={chosen} has the largest predicted speedup.")
    return replace(config, draft=replace(config.draft, num_layers=chosen)), depths


def compare(
    config: Config,
    target: Target,
    lessons: Lessons,
    hot_ids: Tensor | None,
    train: Sequence[Row],
    validation: Sequence[Row],
) -> list[Depth]:
    """Drafts of the target's first 1, 2, ... layers: acceptance after the warm start, and cost."""
    device = device_of(config.runtime)
    model, _ = build(config, target, device)
    dtype = dtype_of(config.runtime.train_dtype, device)
    head = Head(model.head, hot_ids, num_cold=0, dtype=dtype, chunk=config.runtime.head_chunk)
    states = recorded_or_computed(config, target, lessons, train)
    answers = first_answers(validation, MOST_POSITIONS)
    accepted = acceptance_by_depth(model, head, states, answers, config.draft.ridge)
    whole = load_model(target, config.target, device)
    calls, steps = seconds_by_depth(whole, model.full[0], hot_ids, MOST_GAMMA, config.runtime)
    return [
        predicted(num_layers, acceptance, step, calls)
        for num_layers, (acceptance, step) in enumerate(zip(accepted, steps, strict=True), 1)
    ]


def predicted(num_layers: int, acceptance: float, step: float, calls: Sequence[float]) -> Depth:
    """The largest speedup over draft lengths of 1 to 8 tokens, all of which are always drafted:

        (1 - a^(gamma + 1)) / ((1 - a) (gamma c + v(gamma + 1)))

    with a the acceptance of each token, c = `step` / calls[0] and v(n) = calls[n - 1] / calls[0]:
    Leviathan et al. (2211.17192), theorem 3.8, with v measured instead of 1.
    """
    tokens = [1.0]  # of a round that drafts so many: 1 + a + ... + a^gamma
    for _ in calls[1:]:
        tokens.append(1 + acceptance * tokens[-1])
    speedups = {
        gamma: tokens[gamma] * calls[0] / (gamma * step + calls[gamma])
        for gamma in range(1, len(calls))
    }
    gamma = max(speedups, key=speedups.__getitem__)
    return Depth(
        num_layers=num_layers,
        expected_acceptance=acceptance,
        step_ms=1e3 * step,
        c=step / calls[0],
        gamma=gamma,
        predicted_speedup=speedups[gamma],
    )


def best(depths: Sequence[Depth]) -> Depth:
    """Of the largest predicted speedup; the shallowest of equal ones."""
    return max(depths, key=lambda depth: (depth.predicted_speedup, -depth.num_layers))


@torch.no_grad()
def acceptance_by_depth(
    model: DraftModel,
    head: Head,
    states: Iterable[tuple[Batch, Tensor]],
    answers: Sequence[Row],
    ridge: float,
) -> list[float]:
    """Mean of Head.acceptance on the same answers, of drafts of the first 1, 2, ... layers of
    `model`, each after the warm start.
    """
    model.eval()
    neutralise(final_norm(model.body))
    maps_KED, _ = ridge_maps(partial(read_depths, model), states, ridge)
    maps_KED = maps_KED.to(model.map.weight)
    totals_K, count = torch.zeros(len(maps_KED), dtype=torch.float64), 0
    for pack in packs(answers):
        batch = collate(pack).to(maps_KED.device)
        features_KNE = read_depths(model, batch) @ maps_KED.mT
        accepted = [head.acceptance(features_NE, batch).sum() for features_NE in features_KNE]
        totals_K += torch.stack(accepted).double().cpu()
        count += batch.num_supervised
    return (totals_K / count).tolist()


def read_depths(model: DraftModel, batch: Batch) -> Tensor:
    """What the maps of drafts of the first 1, 2, ... layers read at the supervised positions,
    KND.
    """
    *states, last = states_of_layers(model.full[0], batch)
    norm = final_norm(model.body)
    return torch.cat([*map(norm, states), last])[:, batch.supervised_N]
