"""A bad file fails alone: the others get their masks, the table gives its reason, and the exit code is 1."""

import csv

import pytest
import small_site as small
from lines import run, write_site

CASE = 82


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Five volumes, the second truncated, and site X."""
    small.make_volumes(tmp_path / "nii", 5)
    small.truncate(tmp_path / "nii/Case01.nii.gz")
    write_site(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("protocol", ["N-O", "N-M"])
def test_four_masks_and_a_reason(place, small_weights, capsys, protocol):
    sets = [text for item in (*small.SMALL, *small.FEW, *small.BARE) for text in ("--set", item)]
    words = ["adapt", "--site", "X", "--volumes", "nii", "--weights", str(small_weights), "--device", "cpu"]
    assert run([*words, "--protocol", protocol, "--out", "out", *sets]) == 1
    names = sorted(path.name for path in (place / "out/masks").glob("*.nii.gz"))
    assert names == [f"Case0{index}_mask.nii.gz" for index in (0, 2, 3, 4)]
    with (place / "out/report/metrics.csv").open(newline="") as stream:
        rows = {row["case"]: row for row in csv.DictReader(stream)}
    assert [name for name, row in rows.items() if row["status"] == "failed"] == ["Case01"]
    assert "Case01.nii.gz" in rows["Case01"]["reason"]
    assert rows["Case01"]["dice"] == ""
    assert all(0 <= float(row["dice"]) <= 1 for name, row in rows.items() if name != "Case01")
    shown = capsys.readouterr()
    assert "Case01" in shown.out
    assert "Case01.nii.gz" in shown.err
