"""Tables joined from the CSV files of several comparisons."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks" / "merge_tables.py"
RESULTS = ROOT / "docs" / "reference" / "results"


def merged(table, *files):
    command = [sys.executable, str(PROGRAM), "--table", table, "--without-times", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - own file
    return done.stdout


@pytest.mark.parametrize("name", ["mri_prostate", "mri_spinal_cord"])
def test_the_tables_of_the_results_page_come_from_its_files(name):
    text = (ROOT / "docs" / "reference" / "results.md").read_text(encoding="utf-8")
    shown = text.split(f"<!-- {name} -->\n")[1].split(f"<!-- /{name} -->")[0]
    assert merged(name, RESULTS / f"{name}.csv") == shown


def test_the_tests_of_the_results_page_come_from_its_file():
    text = (ROOT / "docs" / "reference" / "results.md").read_text(encoding="utf-8")
    shown = text.split("<!-- mri_prostate_tests -->\n")[1].split("<!-- /mri_prostate_tests -->")[0]
    given = "--parts", "tests", "--rows", "tesla", "tesla_s"
    assert merged("mri_prostate", RESULTS / "mri_prostate.csv", *given) == shown


def test_parts_give_the_table_of_the_whole(tmp_path):
    whole = RESULTS / "mri_prostate.csv"
    with whole.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    parts = []
    for number in range(len({row["seed"] for row in rows})):
        parts.append(tmp_path / f"{number}.csv")
        with parts[-1].open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, rows[0].keys())
            writer.writeheader()
            # seed 0 is in every part, later with other figures, which must not count
            chosen = [row for row in rows if row["seed"] in ("0", str(number))]
            changed = [row | {"dice": "0.5"} if number and row["seed"] == "0" else row for row in chosen]
            writer.writerows(changed)
    assert merged("mri_prostate", *parts) == merged("mri_prostate", whole)
