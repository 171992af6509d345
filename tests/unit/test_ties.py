"""Where greedy outputs with and without a draft part, by a tie that is planted."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from conf.choices import Dtype
from conf.console import Screen
from conf.contracts import Cost, Difference, Report
from conf.groups import EvalConfig, RuntimeConfig, TargetConfig
from conf.run import Run
from conf.schema import Config
from conf.tracking import Tracker
from eval.measure import ALL, Decodings, Question, decode_all
from eval.pair import ModelPair
from eval.report import write_report
from eval.table import summary_table
from tests.reports import example_report
from tests.tiny import tiny_model, tiny_tokenizer, write_tiny_run

NEAR = 1e-3  # the two tokens' logits differ by this share
BUMP = 1.0  # what a call over several tokens adds to the second, as rounding may, only more
COST = Cost(
    draft_step_ms=1.0,
    target_step_ms=8.0,
    c=0.125,
    v={str(width): 1.0 for width in range(1, 9)},
    compile_seconds=0.0,
    target_bytes=1,
    draft_bytes=1,
    memory_gb_per_s=1.0,
)
PROMPTS = ([1, 40, 41, 42], [1, 77, 9], [1, 120, 33, 60, 61])
LENGTH = 12


@dataclasses.dataclass
class Planted:
    run: Run
    pair: ModelPair
    outputs: list[list[int]]  # of the target alone
    first: int
    second: int  # which the target ties with the first, nearly

    def position(self, number: int) -> int | None:
        """Where a prompt's output comes to the tie."""
        output = self.outputs[number]
        return output.index(self.first) if self.first in output else None


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    run = write_tiny_run(tmp_path / "main", seed=1)
    target = tiny_model(num_layers=3)
    outputs = []
    for prompt in PROMPTS:
        ids = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=LENGTH)
        outputs.append(ids[0, len(prompt) :].tolist())
    first = outputs[0][5]
    used = {token for output in outputs for token in output}
    second = next(token for token in range(3, 300) if token not in used)
    with torch.no_grad():
        head = target.get_output_embeddings().weight
        head[second] = head[first] * (1 - NEAR)
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    config = Config(
        target=TargetConfig(path=str(tmp_path / "target"), dtype=Dtype.float32),
        runtime=RuntimeConfig(compile=False),
    )
    pair = ModelPair.load(config, run.draft / "model", 128)

    def round_otherwise(_model: Any, _args: Any, found: Any) -> Any:
        if found.logits.shape[1] > 1:
            found.logits[..., second] += BUMP
        return found

    pair.model.register_forward_hook(round_otherwise)
    return Planted(run, pair, outputs, first, second)


def decoded(planted: Planted) -> Decodings:
    settings = EvalConfig(
        temperatures=[0.0, 1.0], gammas=[2], by_cost=0, max_new_tokens=LENGTH, repeats=2
    )
    questions = [Question(f"kind{i}", prompt, f"question {i}") for i, prompt in enumerate(PROMPTS)]
    with Tracker(planted.run, Screen(Console(file=io.StringIO()))) as tracker:
        return decode_all(Config(eval=settings), planted.pair, questions, COST, tracker)


def test_each_output_that_parts_is_reported_with_its_gap(planted: Planted) -> None:
    found = decoded(planted)
    places = [planted.position(number) for number in range(len(PROMPTS))]
    assert 0 < sum(place is not None for place in places) < len(PROMPTS)
    greedy = [row for row in (*found.alone, *found.with_lookup) if row.temperature == 0]
    assert len(greedy) == 2 * 4
    tokenizer = tiny_tokenizer()
    for row in greedy:
        numbers = range(len(PROMPTS)) if row.category == ALL else [int(row.category[-1])]
        want = []
        for number in numbers:
            place = places[number]
            if place is None:
                continue
            text = [*PROMPTS[number], *planted.outputs[number][:place]]
            with torch.inference_mode():
                logits_V = planted.pair.model(torch.tensor([text]), logits_to_keep=1).logits[0, -1]
            size = float(logits_V[planted.first])
            assert size == float(logits_V.max())
            want.append(
                Difference(
                    category=f"kind{number}",
                    prompt=f"question {number}",
                    position=place,
                    autoregressive=str(tokenizer.decode([planted.first])),
                    speculative=str(tokenizer.decode([planted.second])),
                    gap=pytest.approx(NEAR * size, rel=0.02),
                    spacing=pytest.approx(2.0 ** (int(size).bit_length() - 1) * 2**-23),
                )
            )
        assert row.differences == want
        assert row.identical_outputs == pytest.approx(1 - len(want) / len(numbers))
    assert all(row.differences == [] for row in found.alone if row.temperature == 1)


def test_the_report_its_table_and_its_page_show_them(planted: Planted, tmp_path: Path) -> None:
    row = next(row for row in decoded(planted).alone if row.category == ALL)
    (one,) = row.differences
    one = dataclasses.replace(one, autoregressive="<this>", speculative="that", gap=0.0123)
    example = example_report()
    parted = dataclasses.replace(example.best, identical_outputs=23 / 24, differences=[one])
    results = [parted if row == example.best else row for row in example.results]
    report = dataclasses.replace(example, best=parted, results=results)
    write_report(report, tmp_path)
    tree = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert tree["best"]["differences"] == [dataclasses.asdict(one)]
    report.write(tmp_path)
    assert Report.read(tmp_path) == report
    headers, rows = summary_table(report)
    shown = [cells[headers.index("identical")] for cells in rows]
    assert shown.count("23/24 (gap 0.012)") == 1
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "&lt;this&gt;" in page and "<td>0.0123</td>" in page
    assert "Where outputs part" in page
    write_report(example, tmp_path)
    assert "Where outputs part" not in (tmp_path / "index.html").read_text(encoding="utf-8")
