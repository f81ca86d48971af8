"""One table of several comparisons: reads their tidy CSV files and prints Markdown.

Example::

    python benchmarks/merge_tables.py --table mri_prostate a/comparison.csv b/comparison.csv

So a comparison can be run in parts, on several machines. Each cell (row, protocol, site, seed) counts once,
from the first file that has it. Calibration and memory are in the comparisons' own tables only.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tesla_med.compare.figures import Cost, summarise
from tesla_med.compare.tables import sheets
from tesla_med.config.tables import load_table

NUMBERS = {"dice": float, "dice_source": float, "hd95_mm": float, "assd_mm": float}
NUMBERS |= {"seconds": float, "seed": int, "slices": int, "label": int}


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the rows of all files, each cell from the first file that has it."""
    rows: list[dict[str, Any]] = []
    seen: dict[tuple[Any, ...], Path] = {}
    for path in paths:
        with path.open(encoding="utf-8", newline="") as stream:
            for row in csv.DictReader(stream):
                cell = row["row"], row["protocol"], row["site"], row["seed"]
                if seen.setdefault(cell, path) != path:
                    continue
                numbers = {name: kind(row[name]) if row[name] else None for name, kind in NUMBERS.items()}
                rows.append(row | numbers)
    return rows


def costs(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str], Cost]:
    """Return seconds a slice by row and protocol: of the cases alone, without loading the weights."""
    cases = {
        (row["row"], row["protocol"], row["site"], row["seed"], row["case"]): (row["seconds"], row["slices"])
        for row in rows
    }
    found: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for (name, protocol, *_), (seconds, slices) in cases.items():
        if seconds and slices:
            found.setdefault((name, protocol), []).append((seconds, slices))
    return {
        key: Cost(sum(item[0] for item in items) / sum(item[1] for item in items), None)
        for key, items in found.items()
    }


def main() -> None:
    """Parse the command line, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", help="comparison.csv of each part")
    parser.add_argument("--table", required=True, help="name or file of the table, for the order of its rows")
    parser.add_argument(
        "--parts",
        nargs="+",
        default=["table"],
        choices=("table", "tests", "harm"),
        help="which tables to print",
    )
    parser.add_argument("--rows", nargs="+", help="print these rows alone; all of them are compared")
    parser.add_argument("--without-times", action="store_true", help="leave out milliseconds a slice")
    options = parser.parse_args()
    table, rows = load_table(options.table), read(options.files)
    there = {(row["row"], row["protocol"]) for row in rows}
    order = [
        (item.label, protocol)
        for item in table.rows
        for protocol in table.protocols
        if (item.label, protocol) in there
    ]
    sites = list(dict.fromkeys(row["site"] for row in rows))
    taken = {} if options.without_times else costs(rows)
    found = sheets(summarise(rows, sites=sites, order=order, baseline=table.baseline, costs=taken))
    for number, sheet in enumerate(sheet for sheet in found if sheet.stem in options.parts):
        if number:
            print()
        for line in (sheet.header, ["---"] * len(sheet.header), *sheet.body):
            if line[0] in (sheet.header[0], "---", *(options.rows or [line[0]])):
                print("| " + " | ".join(line) + " |")
        if sheet.stem != "table":
            print(f"\n{sheet.notes}")


if __name__ == "__main__":
    main()
