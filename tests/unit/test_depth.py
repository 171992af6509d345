"""Which depth is chosen, by given costs, and that one reading is as good as one for each depth."""

# N supervised positions, D features of the body, E of the head, K depths

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

from conf.contracts import Depth
from conf.errors import ConfigError
from conf.groups import DraftConfig
from conf.schema import Config
from data.batches import collate
from models.draft import DraftModel, from_layers, ridge_maps, warm_start
from tests.drafts import FAMILIES, NUM_LAYERS, build
from tests.lessons import recorded_rows
from tests.tiny import tiny_lessons
from tests.unit.test_warm_start import read_by_head
from train.depth import acceptance_by_depth, best, predicted, read_depths
from train.head import Head
from train.supervision import require_laws
from train.validation import evaluate

RIDGE = 1e-3
CALLS = [1.0, 1.02, 1.05, 1.1, 1.1, 1.2, 1.2, 1.3, 1.5]  # seconds of calls of 1 to 9 tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_one_reading_gives_what_drafts_of_each_depth_give(family: str) -> None:
    """The map of the warm start, and the acceptance with it."""
    target = build(family)
    rows, held_out = recorded_rows(target, 60), recorded_rows(target, 24, first=1000)
    batches = [collate([row.of_answer() for row in part]) for part in (rows[:30], rows[30:])]
    states = [(batch, read_by_head(target, batch)) for batch in batches]
    hot_ids = torch.arange(200)

    def head_of(draft: DraftModel) -> Head:
        return Head(draft.head, hot_ids, num_cold=0, dtype=torch.float32, chunk=100)

    deepest = DraftModel(from_layers(target, range(NUM_LAYERS - 1)))
    together = acceptance_by_depth(deepest, head_of(deepest), states, held_out, RIDGE)
    maps_KED, _ = ridge_maps(partial(read_depths, deepest), states, RIDGE)
    assert len(together) == len(maps_KED) == NUM_LAYERS - 1
    for num_layers, (acceptance, map_ED) in enumerate(zip(together, maps_KED, strict=True), 1):
        draft = DraftModel(from_layers(target, range(num_layers)))
        warm_start(draft, states, RIDGE)
        torch.testing.assert_close(draft.map.weight, map_ED.float(), rtol=1e-3, atol=1e-3)
        alone = evaluate(draft, head_of(draft), held_out, torch.float32)
        assert acceptance == pytest.approx(alone.value, abs=1e-5)


# ---------------------------------------------------------------- the choice


def chosen(acceptances: list[float], steps: list[float]) -> Depth:
    return best(
        [
            predicted(num_layers, acceptance, step, CALLS)
            for num_layers, (acceptance, step) in enumerate(zip(acceptances, steps, strict=True), 1)
        ]
    )


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("step", [0.05, 0.4])
def test_the_speedup_is_that_of_the_theorem_at_its_best_length(
    acceptance: float, step: float
) -> None:
    by_length = {
        gamma: (1 - acceptance ** (gamma + 1))
        / ((1 - acceptance) * (gamma * step / 1.0 + CALLS[gamma]))
        for gamma in range(1, 9)
    }
    found = predicted(3, acceptance, step, CALLS)
    assert found.predicted_speedup == pytest.approx(max(by_length.values()))
    assert by_length[found.gamma] == max(by_length.values())
    assert (found.num_layers, found.c, found.step_ms) == (3, step, 1e3 * step)


def test_times_count_in_target_steps_and_a_sure_draft_is_no_division_by_zero() -> None:
    slow = predicted(1, 1.0, 3 * 0.1, [3 * call for call in CALLS])
    assert slow.c == pytest.approx(0.1)
    assert slow.predicted_speedup == pytest.approx(
        max((g + 1) / (g * 0.1 + CALLS[g]) for g in range(1, 9))
    )


def test_free_depth_is_taken_and_costly_depth_is_not() -> None:
    acceptances = [0.30, 0.42, 0.47, 0.45]
    assert chosen(acceptances, [0.1] * 4).num_layers == 3
    assert chosen(acceptances, [0.1, 0.3, 0.5, 0.7]).num_layers == 1
    # between: the second layer pays, the third does not
    assert chosen(acceptances, [0.1, 0.12, 0.3, 0.5]).num_layers == 2


def test_of_equal_depths_the_shallowest_is_taken() -> None:
    assert chosen([0.2, 0.4, 0.4], [0.1] * 3).num_layers == 2


# ---------------------------------------------------------------- configuration


def test_a_recording_without_laws_compares_no_drafts() -> None:
    lessons = tiny_lessons(engine={"kind": "server", "laws": False})
    with pytest.raises(ConfigError, match="draft.num_layers=0: drafts are compared by dist"):
        require_laws(Config(draft=DraftConfig(num_layers=0)), lessons)


def test_named_layers_leave_nothing_to_choose() -> None:
    draft = DraftConfig(num_layers=0, layers=[2, 0])
    assert not draft.chooses_depth
    assert not dataclasses.replace(draft, warm_start=False).chooses_depth
