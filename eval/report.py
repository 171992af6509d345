"""A Report as files: report.json, its plots, the page around them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from conf.contracts import Report
from conf.run import write_atomically
from eval.page import render_page
from eval.plots import render_plots


def write_report(report: Report, folder: Path) -> dict[str, Path]:
    """Write report.json, plots/*.png and index.html below `folder`; returns the images by name.

    report.json has the content of the manifest, which the stage writes last.
    """
    images = {}
    for name, picture in render_plots(report).items():
        images[name] = folder / "plots" / f"{name}.png"
        write_atomically(images[name], picture)
    write_atomically(folder / "index.html", render_page(report, images))
    write_atomically(
        folder / "report.json",
        json.dumps(dataclasses.asdict(report), indent=1, ensure_ascii=False) + "\n",
    )
    return images
