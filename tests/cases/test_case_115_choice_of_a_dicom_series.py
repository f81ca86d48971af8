"""`site.files.series` chooses among the DICOM series of a patient by description or protocol name; without
it the patient fails with description, size and orientation of each; `sites check` says that it read DICOM.
"""

import json

import numpy as np
import pytest
import small_site as small
from dicom_files import write_series
from lines import run, sets

CASE = 115
T2, DWI = (32, 28, 4), (16, 16, 3)
CORONAL = (1.0, 0.0, 0.0, 0.0, 0.0, -1.0)


def values(shape):
    return np.random.default_rng(0).integers(0, 900, shape).astype(np.uint16)


def series(folder, shape, description, *, number=None, **fields):
    return write_series(folder, values(shape), number=number, SeriesDescription=description, **fields)


@pytest.fixture(params=["folders", "one folder"])
def patients(tmp_path, monkeypatch, request):
    """Make two patients of two series each, without numbers; the first also has only-one-series company."""
    apart = request.param == "folders"
    for name in ("P1", "P2"):
        first = series(tmp_path / "dicom" / name / "T2_ax", T2, "T2_ax", series=f"1.{name[1]}.1")
        series(tmp_path / "dicom" / name / "DWI", DWI, "DWI", series=f"1.{name[1]}.2", direction=CORONAL)
        if not apart:
            for path in first:
                path.rename(path.parent.parent / f"A{path.name}")
            for path in (tmp_path / "dicom" / name / "DWI").iterdir():
                path.rename(path.parent.parent / f"B{path.name}")
    (tmp_path / "site_configs/prostate").mkdir(parents=True)
    (tmp_path / "site_configs/prostate/X.yaml").write_text("institution: Nowhere\n")
    monkeypatch.chdir(tmp_path)
    return ["P1/T2_ax", "P2/T2_ax"] if apart else ["P1", "P2"]


def check(capsys, *words):
    code = run(["sites", "check", "X", "--volumes", "dicom", "--json", *words])
    shown = json.loads(capsys.readouterr().out)
    return code, shown.get("cases", shown)


def test_several_are_refused_with_what_they_are(patients, capsys):
    code, cases = check(capsys)
    assert code == 1
    assert [case["case"] for case in cases] == ["P1", "P2"]
    for case in cases:
        (problem,) = case["problems"]
        for words in ("'T2_ax' (", "32 x 28 x 4 voxels, axial", "'DWI' (", "16 x 16 x 3 voxels, coronal"):
            assert words in problem
        assert "site.files.series" in problem
        assert "?" not in problem


@pytest.mark.parametrize("pattern", ["t2*", "T2_AX"])
def test_one_is_chosen(patients, pattern, capsys):
    code, cases = check(capsys, "--set", f"site.files.series={pattern}")
    assert code == 0
    assert [case["case"] for case in cases] == patients
    assert [tuple(case["shape"]) for case in cases] == [T2, T2]
    assert all(any("DICOM" in note for note in case["notes"]) for case in cases)


def test_a_pattern_that_chooses_none_or_several(patients, capsys):
    for pattern, words in (("FLAIR*", "no series matches"), ("'*'", "series")):
        code, cases = check(capsys, "--set", f"site.files.series={pattern}")
        assert code == 1
        assert all(words in case["problems"][0] and "T2_ax" in case["problems"][0] for case in cases)


def test_a_run_takes_the_chosen_one(patients, tmp_path, known_weights, capsys):
    words = ["--site", "X", "--volumes", "dicom", "--weights", str(known_weights()), "--device", "cpu"]
    words += ["--out", "out", *sets("reports=[table]", "model.params.width=4")]
    assert run(["predict", *words]) == 1
    assert "'DWI' (" in capsys.readouterr().err
    assert run(["predict", *words, "--overwrite", "--set", "site.files.series=T2*"]) == 0
    assert [small.labels(tmp_path / "out", name).shape for name in patients] == [T2, T2]


def test_the_folder_of_one_patient(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    series(tmp_path / "dicom/T2", T2, "T2_ax")
    series(tmp_path / "dicom/DWI", DWI, "DWI")
    words = ["sites", "check", "prostate/F", "--volumes", "dicom", "--set", "site.files.image=[x]", "--json"]
    assert run(words) == 1
    assert len(json.loads(capsys.readouterr().out)["cases"]) == 1


def test_the_protocol_is_looked_at_and_time_points_stay_apart(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number, time in enumerate(("2020", "2021")):
        uid = f"1.2.{number}"
        series(
            tmp_path / "dicom/P1" / time,
            T2,
            "",
            ProtocolName="t2_tse",
            StudyInstanceUID=uid,
            series=f"{uid}.1",
        )
    words = ["sites", "check", "prostate/F", "--volumes", "dicom", "--set", "site.files.image=[x]", "--json"]
    assert run([*words, "--set", "site.files.series=T2*"]) == 0
    assert [case["case"] for case in json.loads(capsys.readouterr().out)["cases"]] == ["P1/2020", "P1/2021"]
