"""Accents, CJK and spaces in folders and names survive in masks, reports and TensorBoard; failures name
the path.

"""

import json

import pytest
import small_site as small

import tesla_med

CASE = 20
STATUS = "tested on Linux; Windows untested"
ODD = "Größe 前列腺 scan"


def test_a_run_below_such_a_folder(small_weights, tmp_path):
    small.make_volumes(tmp_path / ODD / "bilder", 1, names=["Case é 病"])
    out = tmp_path / f"{ODD} out"
    reports = ("reports=[table,html,tensorboard]",)
    result = small.run(tmp_path / ODD, small_weights, out, method="source", reports=reports)
    assert [item.status for item in result.results] == ["ok"]
    assert [path.name for path in (out / "masks").rglob("*.nii.gz")] == ["Case é 病_mask.nii.gz"]
    assert "Case é 病" in (out / "report/report.html").read_text(encoding="utf-8")
    assert "Case é 病" in (out / "report/metrics.csv").read_text(encoding="utf-8")
    assert json.loads((out / "run.json").read_text(encoding="utf-8"))["cases"][0]["case"].endswith(
        "Case é 病"
    )
    assert list((out / "tensorboard").rglob("events*"))


def test_a_failure_names_the_path(small_weights, tmp_path):
    with pytest.raises(tesla_med.TeslaMedError, match=ODD):
        small.run(tmp_path / ODD, small_weights, tmp_path / "out", method="source")
