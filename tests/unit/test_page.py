"""The page: complete without a network, safe with any text, and honest in its first line."""

from __future__ import annotations

import ast
import dataclasses
import html
import json
import re
import shlex
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from conf.contracts import Report
from eval.page import break_even_acceptance, render_page, steps
from eval.report import write_report
from eval.table import COLUMNS
from tests.reports import COST, SPARSE, example_report, example_result, example_sample

VOID = {"meta", "img", "br"}


class _Checked(HTMLParser):
    """Fails on tags that do not nest; collects the text and what the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def _parsed(page: str) -> _Checked:
    parser = _Checked()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    parser.text = " ".join(parser.text.split())
    return parser


def _body(page: str) -> str:
    """Text of the page after its head."""
    return _parsed(page[page.index("<body>") : page.index("</html>")]).text


def test_page_holds_everything_and_loads_nothing(tmp_path: Path) -> None:
    report = example_report()
    images = write_report(report, tmp_path)
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    parsed = _parsed(page)
    embedded = [link for link in parsed.links if link.startswith("data:image/png;base64,")]
    assert len(embedded) == len(images)
    assert [link for link in parsed.links if link not in embedded] == ["#columns"]
    assert "url(" not in page
    assert "@import" not in page
    assert not {"script", "link", "iframe"} & set(parsed.tags)
    for column in COLUMNS:
        assert column.definition in parsed.text
    assert report.provenance.git_commit in parsed.text
    assert "make distill" in parsed.text


def test_first_line_is_the_big_number_and_the_verdict() -> None:
    report = example_report()
    body = _body(render_page(report, {}))
    assert body.startswith(f"{report.best.speedup.median:.2f}× {report.verdict}")


@pytest.mark.parametrize("hostile", ["<script>alert(1)</script>", '"><img src=x onerror=y>'])
def test_text_of_models_and_prompts_is_escaped(hostile: str) -> None:
    sample = {**example_sample(text=hostile), "prompt": hostile, "category": hostile}
    report = example_report(
        samples=[sample],
        warnings=[hostile],
        verdict=hostile,
        target={"name": hostile, hostile: hostile},
    )
    parsed = _parsed(render_page(report, {}))
    assert not {"script", "img"} & set(parsed.tags)
    assert parsed.text.count(" ".join(hostile.split())) >= 6


def test_warnings_come_before_everything_that_is_explained() -> None:
    page = render_page(example_report(warnings=["Acceptance differs from its estimate."]), {})
    assert page.index("Acceptance differs from its estimate.") < page.index("<h2>")
    assert 'role="alert"' not in render_page(example_report(), {})


def test_below_one_the_first_line_says_so_with_the_break_even() -> None:
    slow = example_result("all", 0.0, 1, alpha=0.1)
    assert slow.speedup.median < 1
    report = example_report(results=[slow], best=slow, verdict="Slower than without it.")
    body = _body(render_page(report, {}))
    alpha = COST.c + COST.v["2"] - 1
    start = f"{slow.speedup.median:.2f}× No speedup. Slower than without it. Why: "
    assert body.startswith(start)
    assert f"must have {alpha:.2f} of its tested tokens accepted" in body[: len(start) + 200]
    assert "run the target without this draft" in body


def test_below_one_by_overhead_alone_is_told_apart() -> None:
    row = example_result("all", 0.0, 1, alpha=0.3)
    assert row.predicted_speedup > 1
    speedup = dataclasses.replace(row.speedup, low=0.8, median=0.9, high=0.95)
    slow = dataclasses.replace(row, speedup=speedup, efficiency=0.9 / row.predicted_speedup)
    body = _body(render_page(example_report(results=[slow], best=slow), {}))
    assert "Acceptance is not the obstacle" in body


def test_a_draft_too_dear_for_any_acceptance_is_told_apart() -> None:
    slow = dataclasses.replace(example_result("all", 0.0, 1, alpha=0.1), predicted_speedup=0.5)
    cost = dataclasses.replace(COST, c=1.2)
    body = _body(render_page(example_report(results=[slow], best=slow, cost=cost), {}))
    assert "even a draft whose every token is accepted could not pay" in body


def test_an_interval_that_holds_one_is_no_gain() -> None:
    report = example_report()
    doubtful = dataclasses.replace(report.best.speedup, low=0.97)
    best = dataclasses.replace(report.best, speedup=doubtful)
    assert "A gain is not shown" in _body(render_page(dataclasses.replace(report, best=best), {}))
    assert "A gain is not shown" not in _body(render_page(report, {}))


@pytest.mark.parametrize("gamma", [1, 2, 3, 4])
def test_break_even_acceptance_solves_its_equation(gamma: int) -> None:
    alpha = break_even_acceptance(COST, gamma)
    assert alpha is not None
    length = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    assert length == pytest.approx(gamma * COST.c + COST.v[str(gamma + 1)])


def test_break_even_acceptance_at_gamma_one_and_where_v_is_missing() -> None:
    assert break_even_acceptance(COST, 1) == pytest.approx(COST.c + COST.v["2"] - 1)
    assert break_even_acceptance(COST, 5) is None
    free = dataclasses.replace(COST, c=0.0, v={"2": 0.98})
    assert break_even_acceptance(free, 1) == 0


def test_physical_limit_is_bytes_over_bandwidth() -> None:
    target, draft = steps(COST)
    assert target.limit_ms == pytest.approx(269e6 / 14.2e9 * 1e3)
    assert draft.limit_ms == pytest.approx(74e6 / 14.2e9 * 1e3)


def test_commands_can_be_pasted() -> None:
    report = example_report()
    code, serve, _ = re.findall(r"<pre>(.*?)</pre>", render_page(report, {}), flags=re.DOTALL)
    assert "assistant_model" in ast.unparse(ast.parse(html.unescape(code)))
    words = shlex.split(html.unescape(serve).replace("\\\n", ""))  # a shell joins these lines
    assert words[:3] == ["vllm", "serve", report.target["name"]]
    assert json.loads(words[4]) == {
        "method": "draft_model",
        "model": "outputs/main/draft/model",
        "num_speculative_tokens": report.best.usual_length,
    }


def test_commands_do_not_load_a_file_that_nothing_loads() -> None:
    """A GGUF target was converted to a folder."""
    report = example_report()
    report.target["name"] = "model.gguf"
    code, serve, _ = re.findall(r"<pre>(.*?)</pre>", render_page(report, {}), flags=re.DOTALL)
    assert "# model.gguf was converted once, to a folder" in code
    assert "model.gguf" not in ast.unparse(ast.parse(html.unescape(code))) + serve


@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE.keys())
def test_sparse_reports_render(make: Callable[[], Report]) -> None:
    report = make()
    assert report.verdict in _parsed(render_page(report, {})).text


def test_engines_are_told_what_the_average_call_drafted() -> None:
    """Their drafts have one length; ours end early."""
    report = example_report()
    calls = report.best.num_target_calls
    for num_drafted, told in ((round(1.7 * calls), 2), (round(3.2 * calls), 3), (calls // 3, 1)):
        report.best = dataclasses.replace(report.best, gamma=4, num_drafted=num_drafted)
        page = html.unescape(render_page(report, {}))
        assert f'"num_speculative_tokens": {told},' in page
        assert f"num_assistant_tokens = {told}\n" in page
