"""Time and size of ``report.html`` and of the slices beside it, on generated cases.

Example::

    python benchmarks/report_time.py --cases 200 --out report_time.json

The report is given the records and arrays of generated prostates, as a run gives them, and writes its page
and every slice into a run folder that is removed afterwards. ``--entropy`` adds the map of entropy of every
case, as ``adapt --save-uncertainty`` keeps it. The second row is the same without the slices beside the page
and without any picture in it: what is left is the price of the figures, the difference that of the drawing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tesla_med.config.files import load_pipeline, load_site
from tesla_med.demo.volumes import make_case, preset
from tesla_med.models.checkpoint import versions
from tesla_med.records import CaseResult
from tesla_med.reports.base import RunContext, make_reports
from tesla_med.scoring.metrics import score_case
from tesla_med.types import CaseView

DIFFERENT = 6
"""Generated volumes; the other cases are these, moved within the field."""
SITE = "prostate/F"


def generate(slices: int, size: int, entropy: bool) -> list[tuple[CaseResult, CaseView]]:
    """Return records and arrays of ``DIFFERENT`` cases; the masks are moved and shrunk references."""
    from scipy.ndimage import binary_erosion, gaussian_filter

    settings, classes = preset("prostate"), load_pipeline("prostate").classes
    made = []
    for number in range(DIFFERENT):
        generator = np.random.default_rng(number)
        image, truth, affine = make_case("prostate", settings, generator, (size, size, slices))
        spacing = tuple(float(step) for step in np.linalg.norm(affine[:3, :3], axis=0))
        mask = np.roll(truth, 1 + number % 3, axis=0)
        source = np.roll(binary_erosion(truth, iterations=2).astype(truth.dtype), 4, axis=1)
        near = gaussian_filter((mask > 0).astype(np.float32), 2)
        heat = 4 * near * (1 - near) if entropy else None
        view = CaseView(image.astype(np.float32), source, mask, truth, affine, spacing, None, heat)
        scores = score_case(mask, source, truth, classes, spacing)
        of = {"site": "F", "method": "tesla", "protocol": "N-O", "status": "ok", "used": "adapted"}
        made.append((CaseResult(case="", slices=slices, scores=scores, **of), view))
    return made


def moved(view: CaseView, steps: int) -> CaseView:
    """Return the arrays moved within the field, so that no two cases are the same."""
    names = ("image", "source_mask", "mask", "reference")
    arrays = {name: np.roll(getattr(view, name), steps, axis=(0, 1)) for name in names}
    return dataclasses.replace(view, **arrays)


def measure(
    made: list[tuple[CaseResult, CaseView]], cases: int, folder: Path, texts: list[str]
) -> dict[str, Any]:
    """Write the report of ``cases`` cases and return what it took.

    Args:
        made: records and arrays to choose from.
        cases: their number.
        folder: of the run.
        texts: settings over the pipeline.
    """
    pipeline = load_pipeline("prostate", texts)
    run = RunContext(folder, load_site(SITE), pipeline, "tesla", "N-O", 0, "case")
    (report,) = make_reports(["html"], run)
    results, drawing, busy = [], 0.0, 0.0
    for number in range(cases):
        result, view = made[number % len(made)]
        result = result.model_copy(update={"case": f"P{number // 10}/Case{number:04}"})
        view = moved(view, number // len(made))
        start, before = time.perf_counter(), time.process_time()
        report.unit([result], view)
        drawing += time.perf_counter() - start
        busy += time.process_time() - before
        results.append(result)
    start, before = time.perf_counter(), time.process_time()
    (page,) = report.finish(results)
    finishing = time.perf_counter() - start
    busy += time.process_time() - before
    beside = list((folder / "report" / "slices").rglob("*.js"))
    size = sum(path.stat().st_size for path in beside)
    return {
        "cases": cases,
        "settings": texts,
        "seconds": drawing + finishing,
        "seconds_of_page": finishing,
        "processor_seconds": busy,
        "ms_per_case": 1000 * drawing / cases,
        "page_mb": page.stat().st_size / 1e6,
        "slices_mb": size / 1e6,
        "slices_mb_per_case": size / 1e6 / cases,
        "files_beside": len(beside),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    lines = [
        f"{'':<18}{'cases':>6}{'seconds':>9}{'of processor':>14}{'ms per case':>13}"
        f"{'page MB':>9}{'slices MB':>11}{'files':>7}"
    ]
    for row in rows:
        name = "no pictures" if row["settings"] else "every slice"
        lines.append(
            f"{name:<18}{row['cases']:>6}{row['seconds']:>9.1f}"
            f"{row['processor_seconds']:>14.1f}{row['ms_per_case']:>13.1f}"
            f"{row['page_mb']:>9.1f}{row['slices_mb']:>11.1f}{row['files_beside']:>7}"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, write the reports, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--slices", type=int, default=24, help="slices per case")
    parser.add_argument("--size", type=int, default=256, help="pixels per side")
    parser.add_argument("--entropy", action="store_true", help="with the map of entropy")
    parser.add_argument("--quick", action="store_true", help="12 cases of 6 slices, 96 pixels per side")
    parser.add_argument("--device", default="cpu", help="not used: nothing is computed on a device")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if options.quick:
        options.cases, options.slices, options.size = 12, 6, 96
    made = generate(options.slices, options.size, options.entropy)
    rows = []
    for texts in ([], ["report.slices=false", "report.max_cases_with_overlays=0"]):
        with tempfile.TemporaryDirectory() as name:
            rows.append(measure(made, options.cases, Path(name), texts))
    print(table(rows))
    if options.out is not None:
        about = {
            "versions": versions(),
            "cores": os.cpu_count(),
            "slices": options.slices,
            "size": options.size,
        }
        content = {"command": "benchmarks/report_time.py", **about, "entropy": options.entropy, "rows": rows}
        options.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
