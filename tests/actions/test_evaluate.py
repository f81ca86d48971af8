from __future__ import annotations

import csv
import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from tesla_med.actions.evaluate import evaluate
from tesla_med.config.models import LabelClass
from tesla_med.errors import ConfigError, DataError
from tesla_med.io.masks import find_masks, mask_name
from tesla_med.io.pseudonyms import KeyFile
from tesla_med.scoring.masks import read_labels

AFFINE = np.diag([-1.0, -1.0, 2.0, 1.0])


def save(path, array, affine=AFFINE):
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(np.asarray(array, np.uint8), affine), path)
    return path


def box(low=4, high=12, value=1):
    array = np.zeros((16, 16, 8), np.uint8)
    array[low:high, 4:12, 2:6] = value
    return array


@pytest.fixture
def folders(tmp_path):
    return tmp_path / "predictions", tmp_path / "references"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("Case07_mask.nii.gz", "Case07"),
        ("p1/Case07_segmentation.nii", "p1/Case07"),
        ("Case07-seg.nrrd", "Case07"),
        ("Case07_gt_mask.mha", "Case07"),
        ("Case07_Segmentation.NII.GZ", "Case07"),
        ("sub-01_T2w.dseg.nii.gz", "sub-01_T2w"),
        ("Unmasked.nii.gz", "Unmasked"),
        ("Case_segment2.nii.gz", "Case_segment2"),
        ("masked_patient.nii.gz", "masked_patient"),
        ("label_3.nii.gz", "label_3"),
        ("mask.nii.gz", "mask"),
        ("_mask.nii.gz", "_mask"),
    ],
)
def test_names_lose_whole_parts_only(path, expected):
    assert mask_name(Path(path)) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"empty": "two"}, "empty: expected 'skip' or 'one', got 'two'"),
        ({"values": {1: "x"}}, "values: expected whole numbers for whole numbers"),
        ({"values": [1]}, "values: expected whole numbers for whole numbers"),
        ({"ignore": 1}, "ignore: expected whole numbers, as in"),
        ({"ignore": "12"}, "ignore: expected whole numbers, as in"),
    ],
)
def test_options_that_are_none(folders, options, words):
    with pytest.raises(ConfigError, match=words):
        evaluate(*folders, **options)


def test_scores_by_hand(folders):
    predictions, references = folders
    save(predictions / "a/Case1_mask.nii.gz", box(6, 14))
    save(references / "a/Case1_segmentation.nii.gz", box())
    result = evaluate(predictions, references)
    (case,) = result.cases
    (score,) = case.scores
    assert (case.case, case.status) == ("a/Case1", "ok")
    assert score.dice == pytest.approx(0.75)
    assert score.hd95_mm == pytest.approx(2.0)
    assert score.volume_ml == pytest.approx(8 * 8 * 4 * 2 / 1000)
    assert score.volume_ml_reference == score.volume_ml
    assert result.files == ()


@pytest.mark.parametrize(
    ("ours", "theirs", "cases"),
    [
        (("a/P1_0000_mask", "P2_mask"), ("a/P1", "P2_0000"), ("P2", "a/P1_0000")),
        (("P1_0000", "P1"), ("P1", "P3"), ("P1",)),
        (("P1",), ("P1_0000", "P1"), ("P1",)),
        (("P1_0001", "P2"), ("P1", "P2"), ("P2",)),
    ],
)
def test_the_first_channel_of_an_image_meets_its_reference(folders, ours, theirs, cases):
    for folder, names in zip(folders, (ours, theirs), strict=True):
        for name in names:
            save(folder / f"{name}.nii.gz", box())
    assert tuple(sorted(case.case for case in evaluate(*folders).cases)) == cases


def test_corrected_masks_are_not_scored_under_pseudonyms_either(folders, tmp_path):
    predictions, references = folders
    save(predictions / "masks" / "P1_mask.nii.gz", box())
    save(predictions / "masks" / "P2_mask.nii.gz", box(6, 14))
    (predictions / "masks" / "labels.json").write_text('{"labels": [{"value": 1, "name": "a"}]}')
    record = {"settings": {"corrections": {"P1": "0" * 64}}}
    (predictions / "run.json").write_text(json.dumps(record), encoding="utf-8")
    for name in ("P1", "P2"):
        save(references / f"{name}.nii.gz", box())
    plain = evaluate(predictions, references)
    hidden = evaluate(predictions, references, anonymise=True, key=tmp_path / "key.csv")
    assert plain.corrected == ("P1",)
    assert [len(item.corrected) for item in (plain, hidden)] == [1, 1]
    assert hidden.corrected != plain.corrected
    assert [[case.scores[0].dice for case in item.cases] for item in (plain, hidden)] == [[0.75], [0.75]]


def test_an_image_without_its_mask_is_no_reference(folders):
    predictions, references = folders
    for name in ("Case00", "Case01"):
        save(predictions / f"{name}_mask.nii.gz", box())
        save(references / f"{name}.nii.gz", 37 * box() + np.arange(16, dtype=np.uint8)[:, None, None])
    save(references / "Case00_segmentation.nii.gz", box())
    found = evaluate(predictions, references)
    assert [case.case for case in found.cases] == ["Case00"]
    assert found.only_predictions == ("Case01",)
    assert [score.label for score in found.cases[0].scores] == [1]


def test_volumes_on_a_sheared_grid_are_those_of_its_voxels(folders):
    predictions, references = folders
    sheared = AFFINE.copy()
    sheared[0, 2] = 2.0 * np.tan(np.radians(20.0))  # as a tilted gantry
    for folder in folders:
        save(folder / "P1.nii.gz", box(), sheared)
    (score,) = evaluate(predictions, references).cases[0].scores
    assert score.volume_ml == score.volume_ml_reference == pytest.approx(box().sum() * 2.0 / 1000)


def test_names_that_look_like_pseudonyms_meet_their_own_references(folders, tmp_path):
    predictions, references = folders
    names = ["case-0001", "case-0002", "anna", "bert"]
    for number, name in enumerate(names):
        save(predictions / f"{name}.nii.gz", box(4, 10 + number))
        save(references / f"{name}.nii.gz", box(4, 10))
    plain = [case.scores[0].dice for case in evaluate(predictions, references).cases]
    hidden = evaluate(predictions, references, anonymise=True, key=tmp_path / "key.csv")
    assert hidden.coverage == "scored 4 of 4 predictions and 4 of 4 references"
    assert sorted(case.scores[0].dice for case in hidden.cases) == sorted(plain)
    assert not {case.case for case in hidden.cases} & set(names)


@pytest.mark.parametrize("record", [True, False])
def test_pseudonyms_meet_references_by_the_key_alone(folders, tmp_path, record):
    """References are called as the pseudonyms of others are."""
    predictions, references = folders
    key = KeyFile(tmp_path / "key.csv")
    names = [f"P{number}" for number in range(6)]
    if record:
        key.assign("Y", names)  # cases of another site that are called the same
    entries = key.assign("X", names)
    key.save()
    (predictions / "masks").mkdir(parents=True)
    for number, name in enumerate(names):
        save(predictions / "masks" / f"{entries[name].pseudonym}_mask.nii.gz", box(4, 10 + number))
        save(references / f"{name}.nii.gz", box(4, 10))
    if record:
        (predictions / "masks" / "labels.json").write_text('{"labels": [{"value": 1, "name": "a"}]}')
        about = {"settings": {"anonymised": True, "site": {"id": "X"}}}
        (predictions / "run.json").write_text(json.dumps(about), encoding="utf-8")
    ours = predictions if record else predictions / "masks"
    found = evaluate(ours, references, anonymise=True, key=tmp_path / "key.csv")
    dice = {case.case: case.scores[0].dice for case in found.cases}
    assert [dice[entries[name].pseudonym] for name in names] == sorted(dice.values(), reverse=True)
    for name in names:
        (references / f"{name}.nii.gz").rename(references / f"{entries[name].pseudonym}.nii.gz")
    with pytest.raises(DataError, match=r"may be pseudonyms|0 of 6"):
        evaluate(ours, references, anonymise=True, key=tmp_path / "key.csv")


def test_unmatched_names_are_listed_both_ways_and_strict_refuses(folders, tmp_path):
    predictions, references = folders
    for number in range(5):
        save(predictions / f"Case{number}_mask.nii.gz", box())
    for number in range(3):
        save(references / f"Case{number}_segmentation.nii.gz", box())
    save(references / "Case3_final.nii.gz", box())
    result = evaluate(predictions, references, out=tmp_path / "out")
    assert result.only_predictions == ("Case3", "Case4")
    assert result.only_references == ("Case3_final",)
    assert result.coverage == "scored 3 of 5 predictions and 3 of 4 references"
    content = json.loads((tmp_path / "out/summary.json").read_text())
    assert content["coverage"] == result.coverage
    assert content["only_predictions"] == ["Case3", "Case4"]
    with pytest.raises(DataError, match=r"3 of 5 predictions have a reference.*Case3, Case4.*Case3_final"):
        evaluate(predictions, references, strict=True)


def test_files_written_hold_the_scores(folders, tmp_path):
    predictions, references = folders
    save(predictions / "Case1.nii.gz", box())
    save(references / "Case1.nii.gz", box())
    save(predictions / "Case2.nii.gz", box() * 0)
    save(references / "Case2.nii.gz", box())
    save(predictions / "Case3.nii.gz", box() * 0)
    save(references / "Case3.nii.gz", box() * 0)
    result = evaluate(predictions, references, out=tmp_path / "out")
    with (tmp_path / "out/metrics.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["dice"] for row in rows] == ["1", "0", ""]
    assert [row["hd95_mm"] for row in rows] == ["0", "", ""]
    assert [row["status"] for row in rows] == ["ok"] * 3
    assert {Path(path).name for path in result.files} == {"metrics.csv", "summary.json"}
    (summary,) = json.loads((tmp_path / "out/summary.json").read_text())["classes"]
    assert summary["cases"] == 3
    assert (summary["not_applicable"], summary["missed"], summary["false_positive"]) == (1, 1, 0)
    assert summary["dice_mean"] == pytest.approx(0.5)
    assert summary["dice_pooled"] == pytest.approx(2 / 3)
    assert summary["hd95_mm_mean"] == 0.0


def test_labels_found_in_any_case_make_a_row_in_every_case(folders):
    predictions, references = folders
    save(predictions / "Case1.nii.gz", box(value=2))
    save(references / "Case1.nii.gz", box(value=2))
    save(predictions / "Case2.nii.gz", box(value=5))
    save(references / "Case2.nii.gz", box(value=5))
    result = evaluate(predictions, references)
    assert [[score.label for score in case.scores] for case in result.cases] == [[2, 5], [2, 5]]
    assert [score.dice for score in result.cases[0].scores] == [1.0, None]
    assert [row["not_applicable"] for row in result.summary()] == [1, 1]


def test_labels_file_gives_names_and_unknown_labels_are_named(folders):
    predictions, references = folders
    labels = {
        "labels": [
            {"value": 0, "name": "background", "color": "#000000"},
            {"value": 1, "name": "prostate", "color": "#e6550d"},
        ]
    }
    save(predictions / "masks/Case1_mask.nii.gz", box())
    save(predictions / "source_masks/Case1_mask.nii.gz", box())
    (predictions / "masks/labels.json").write_text(json.dumps(labels))
    save(references / "Case1_seg.nii.gz", box())
    (case,) = evaluate(predictions, references).cases
    assert case.scores[0].name == "prostate"

    zones = box()
    zones[0, 0, 0] = 7
    save(references / "Case1_seg.nii.gz", zones)
    result = evaluate(predictions, references)
    assert result.cases[0].status == "unscored"
    assert "holds label 7, expected only 0, 1" in result.cases[0].reason
    assert result.coverage == "scored 0 of 1 predictions and 0 of 1 references"
    with pytest.raises(DataError, match="label 7"):
        evaluate(predictions, references, strict=True)
    both = (LabelClass(value=1, name="gland"), LabelClass(value=7, name="zone"))
    assert len(evaluate(predictions, references, classes=both).cases[0].scores) == 2


@pytest.mark.parametrize("content", ["[1, 2]", "{}", "not json", '{"labels": [{"value": "x"}]}'])
def test_broken_labels_file(tmp_path, content):
    path = tmp_path / "labels.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"labels\.json: expected"):
        read_labels(path)


def test_grids_that_differ_leave_the_case_unscored_and_the_others_scored(folders, tmp_path):
    predictions, references = folders
    shifted = AFFINE.copy()
    shifted[0, 3] = 0.5
    slightly = AFFINE.copy()
    slightly[0, 3] = 0.05
    for name, affine in (("far", shifted), ("near", slightly), ("same", AFFINE)):
        save(predictions / f"{name}.nii.gz", box())
        save(references / f"{name}.nii.gz", box(), affine)
    save(predictions / "shape.nii.gz", box())
    save(references / "shape.nii.gz", box()[:, :, :7])
    result = evaluate(predictions, references, out=tmp_path / "out")
    assert {item.case: item.status for item in result.cases} == {
        "far": "unscored",
        "near": "ok",
        "same": "ok",
        "shape": "unscored",
    }
    reasons = {item.case: item.reason for item in result.unscored}
    assert "0.5 mm apart" in reasons["far"]
    assert "16 x 16 x 7" in reasons["shape"]
    assert set(json.loads((tmp_path / "out/summary.json").read_text())["unscored"]) == {"far", "shape"}
    with pytest.raises(DataError, match=r"scored 2 of 4 predictions.*far: the grids differ"):
        evaluate(predictions, references, strict=True)


def test_image_beside_its_mask_is_not_taken_for_one(folders):
    predictions, references = folders
    save(predictions / "Case1_mask.nii.gz", box())
    save(references / "Case1.nii.gz", box() * 100)
    save(references / "Case1_segmentation.nii.gz", box())
    assert evaluate(predictions, references, strict=True).cases[0].scores[0].dice == 1.0


def test_two_masks_of_one_name_are_refused(tmp_path):
    save(tmp_path / "Case1_mask.nii.gz", box())
    save(tmp_path / "Case1_seg.nii.gz", box())
    with pytest.raises(DataError, match=r"Case1_mask.*Case1_seg.*'Case1'"):
        find_masks(tmp_path)
    other = tmp_path / "other"
    save(other / "Case1.nii.gz", box())
    save(other / "Case1.nii", box())
    with pytest.raises(DataError, match="both"):
        find_masks(other)


def test_hidden_files_are_left_out(tmp_path):
    save(tmp_path / "Case1.nii.gz", box())
    save(tmp_path / ".tmp-1.nii.gz", box())
    save(tmp_path / ".cache/Case2.nii.gz", box())
    assert list(find_masks(tmp_path)) == ["Case1"]


def test_folders_that_cannot_be_used(folders, tmp_path):
    predictions, references = folders
    with pytest.raises(DataError, match="does not exist"):
        evaluate(predictions, references)
    predictions.mkdir()
    with pytest.raises(DataError, match="no mask found"):
        evaluate(predictions, references)
    single = save(tmp_path / "one.nii.gz", box())
    with pytest.raises(DataError, match="it is a file"):
        evaluate(single, references)
    save(predictions / "a.nii.gz", box())
    save(references / "b.nii.gz", box())
    with pytest.raises(DataError, match=r"0 of 1 predictions have a reference.*: a.*: b"):
        evaluate(predictions, references)


def test_truncated_prediction_is_unscored_with_its_name(folders):
    predictions, references = folders
    path = save(predictions / "Case1.nii", box())
    path.write_bytes(path.read_bytes()[:600])
    save(references / "Case1.nii", box())
    save(predictions / "Case2.nii", box())
    save(references / "Case2.nii", box())
    result = evaluate(predictions, references)
    assert [item.status for item in result.cases] == ["unscored", "ok"]
    assert "Case1.nii" in result.cases[0].reason
