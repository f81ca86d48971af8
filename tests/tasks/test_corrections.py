"""Corrected masks: they change the weights, are kept and never scored; what does not fit is refused."""

from __future__ import annotations

import csv
import json
import shutil

import nibabel as nib
import numpy as np
import pytest
import small_site as small

from tesla_med.errors import ConfigError, DataError, GeometryError, OutputError

pytestmark = pytest.mark.usefixtures("one_thread")

TAUGHT = ("corrections.first_updates=2",)


@pytest.fixture(scope="module")
def made(one_thread, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corrections")
    weights = small.train_weights(folder)
    small.make_volumes(folder / "nii", 3)
    correct(folder / "nii", folder / "fixed", "Case01")
    return folder, weights


def correct(volumes, folder, *names, change=lambda mask: mask):
    folder.mkdir(exist_ok=True)
    for name in names:
        image = nib.load(volumes / f"{name}_segmentation.nii.gz")
        mask = change(np.asarray(image.dataobj).copy())
        nib.save(nib.Nifti1Image(mask, image.affine, image.header), folder / f"{name}_mask.nii.gz")
    return folder


def run(made, out, *, corrections="fixed", **options):
    folder, weights = made
    given = None if corrections is None else folder / corrections
    texts = (*TAUGHT, *options.pop("overrides", ()))
    return small.run(folder / "nii", weights, out, corrections=given, overrides=texts, **options)


OTHERS = [pytest.param(item, marks=pytest.mark.slow) for item in ({"reset": "site"}, {"protocol": "N-M"})]


@pytest.mark.parametrize("options", [{}, *OTHERS], ids=str)
def test_the_corrected_mask_is_kept_and_the_case_is_scored_nowhere(made, tmp_path, options):
    out = tmp_path / "out"
    reports = ("reports=[table,calibration,quality,tensorboard,html]", "guard.enabled=true")
    reports += ("quality.source_dice=0.9",)
    result = run(made, out, reports=reports, save_probs=True, **options)
    by_name = {item.case: item for item in result.results}
    corrected = by_name["Case01"]
    assert (corrected.status, corrected.used) == ("corrected", "corrected")
    assert np.array_equal(
        small.labels(out, "Case01"), np.asarray(nib.load(made[0] / "fixed/Case01_mask.nii.gz").dataobj)
    )
    assert corrected.headline is None
    assert corrected.headline_source is None
    assert corrected.predicted_dice is None
    assert corrected.calibration is None
    others = [by_name[name].mean_dice for name in ("Case00", "Case02")]
    assert result.mean == pytest.approx(sum(others) / 2)
    assert not (out / "probs" / "Case01_prob.nii.gz").exists()
    assert (out / "probs" / "Case00_prob.nii.gz").exists()
    rows = list(csv.DictReader((out / "report" / "metrics.csv").open(encoding="utf-8")))
    row = next(row for row in rows if row["case"] == "Case01")
    measured = {
        name for name, text in row.items() if text and name in ("dice", "dice_source", "hd95_mm", "nsd")
    }
    assert measured == set()
    assert (row["status"], row["predicted_dice"]) == ("corrected", "")
    assert float(row["volume_ml"]) > 0
    dice = scalars(out)["dice/mean"] | scalars(out)["dice_source/mean"]
    assert set(dice) == {0, 2}  # numbers of the cases
    quality = json.loads((out / "report" / "predicted_dice.json").read_text(encoding="utf-8"))
    assert {item["case"] for item in quality["cases"]} == {"Case00", "Case02"}
    assert json.loads((out / "report" / "calibration.json").read_text(encoding="utf-8"))["scored_cases"] == 2
    page = (out / "report" / "report.html").read_text(encoding="utf-8")
    assert "corrected by hand" in page
    assert "took part in every update with weight" in page
    assert set(small.record(out)["corrections"]) == {"Case01"}


def scalars(out):
    """Return every scalar of TensorBoard by tag and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(out / "tensorboard"), {"scalars": 0})
    found.Reload()
    return {tag: {e.step: e.value for e in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


def test_corrected_slices_change_the_other_cases_and_cards_name_them(made, tmp_path):
    from safetensors.numpy import load_file

    run(made, tmp_path / "with")
    run(made, tmp_path / "without", corrections=None)
    weights = [
        load_file(tmp_path / name / "checkpoints" / "Case00.safetensors") for name in ("with", "without")
    ]
    assert any(not np.array_equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert not (tmp_path / "with" / "checkpoints" / "Case01.safetensors").exists()
    card = json.loads((tmp_path / "with" / "checkpoints" / "Case00.json").read_text(encoding="utf-8"))
    assert card["extra"]["corrections"] == ["Case01"]


@pytest.mark.slow
def test_cases_stay_independent(made, tmp_path):
    """Under reset case each case is what it is alone, labelled slices included: nothing leaks."""
    folder, weights = made
    run(made, tmp_path / "all")
    for name in ("Case01", "Case02"):
        for suffix in ("", "_segmentation"):
            (tmp_path / "few").mkdir(exist_ok=True)
            shutil.copy(folder / "nii" / f"{name}{suffix}.nii.gz", tmp_path / "few")
    small.run(tmp_path / "few", weights, tmp_path / "two", corrections=folder / "fixed", overrides=TAUGHT)
    masks = small.masks(tmp_path / "all")
    assert small.masks(tmp_path / "two").items() <= masks.items()


def test_other_corrections_are_not_resumed(made, tmp_path):
    folder, _ = made
    own = correct(folder / "nii", tmp_path / "own", "Case01")
    out = tmp_path / "out"
    run(made, out, corrections=own)
    before = small.files_below(out / "masks")
    assert run(made, out, corrections=own, resume=True).complete
    assert small.files_below(out / "masks") == before
    correct(folder / "nii", own, "Case01", change=lambda mask: np.roll(mask, 1, axis=0))
    for given in (own, None):
        with pytest.raises(OutputError, match=r"its settings differ .*corrections"):
            run(made, out, corrections=given, resume=True)
    with pytest.raises(OutputError, match="settings differ"):
        run(made, out, corrections=own, overrides=("corrections.weight=2",), resume=True)


@pytest.mark.slow
def test_evaluating_and_rolling_back_leave_it_alone(made, tmp_path):
    from tesla_med.actions.evaluate import evaluate
    from tesla_med.actions.rollback import rollback

    out = tmp_path / "out"
    run(made, out)
    found = evaluate(out, made[0] / "nii")
    assert [item.case for item in found.cases] == ["Case00", "Case02"]
    assert found.corrected == ("Case01",)
    assert any("1 corrected by hand, not scored: Case01" in text for text in found.remarks())
    kept = small.labels(out, "Case01")
    rollback(out, "source")
    assert np.array_equal(small.labels(out, "Case01"), kept)
    status = {item["case"]: item["status"] for item in small.record(out)["cases"]}
    assert status["Case01"] == "corrected"
    assert set(small.record(out)["corrections"]) == {"Case01"}


# ------------------------------------------------------------ refusing


def test_a_mask_that_does_not_fit_is_refused_before_anything_is_written(made, tmp_path):
    folder, _ = made

    def refused(corrections, error, text, **options):
        with pytest.raises(error, match=text):
            run(made, tmp_path / "out", corrections=corrections, **options)
        assert not (tmp_path / "out").exists()

    def fixed(name, **options):
        return correct(folder / "nii", tmp_path / name, "Case01", **options)

    seven = fixed("seven", change=lambda mask: mask * 7)
    refused(seven, DataError, r"case Case01: .* holds label 7, expected only 0, 1; use the values of")
    refused(fixed("shape", change=lambda mask: mask[:, :, :-1]), GeometryError, "case Case01: .*32 x 32 x 3")
    moved = fixed("moved") / "Case01_mask.nii.gz"
    small.copy_image(moved, moved, shift_mm=5.0, dtype=np.uint8)
    refused(moved.parent, GeometryError, "case Case01")
    strange = fixed("strange")
    shutil.copy(strange / "Case01_mask.nii.gz", strange / "Case77_mask.nii.gz")
    refused(
        strange, DataError, "1 corrected mask of no case of site X: Case77_mask.nii.gz; .*3 cases: Case00"
    )
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", DataError, "no mask found")
    refused(tmp_path / "nowhere", DataError, "it does not exist")
    refused(folder / "nii", ConfigError, "keep them apart")
    refused("fixed", ConfigError, "method 'bn' does not learn", method="bn")
    refused("fixed", ConfigError, "method 'source' does not learn", method="source")


@pytest.mark.slow
def test_the_masks_of_a_run_are_no_corrections(made, tmp_path):
    run(made, tmp_path / "out")
    with pytest.raises(ConfigError, match="lies in the output folder of a run"):
        run(made, tmp_path / "next", corrections=tmp_path / "out" / "masks")


@pytest.mark.slow
def test_an_image_in_a_sub_folder_with_two_sizes(made, tmp_path):
    """Names with folders meet masks in the same folders; without a fixed size slices differ in size."""
    weights = made[1]
    small.make_volumes(tmp_path / "nii" / "one", 1)
    small.make_volumes(tmp_path / "nii" / "two", 1, matrix=40)
    drawn = correct(tmp_path / "nii" / "two", tmp_path / "drawn", "Case00")
    (drawn / "two").mkdir()
    (drawn / "Case00_mask.nii.gz").rename(drawn / "two" / "Case00_mask.nii.gz")
    sized = ("preprocessing.size=null", *TAUGHT)
    result = small.run(tmp_path / "nii", weights, tmp_path / "out", corrections=drawn, overrides=sized)
    assert [(item.case, item.status) for item in result.results] == [
        ("one/Case00", "ok"),
        ("two/Case00", "corrected"),
    ]


@pytest.mark.slow
def test_a_preview_lists_them(made, tmp_path, capsys, monkeypatch):
    from tesla_med.cli.app import run as command

    folder, weights = made
    words = ["adapt", "--volumes", str(folder / "nii"), "--pipeline", "prostate", "--weights", str(weights)]
    words += [
        "--device",
        "cpu",
        "--dry-run",
        "--corrections",
        str(folder / "fixed"),
        "--out",
        str(tmp_path / "out"),
    ]
    words += ["--set", "site.files.image=['Case0?.nii.gz']"]
    words += [word for text in (*small.SMALL, *small.FEW, *TAUGHT) for word in ("--set", text)]
    assert command(words) == 0
    said = capsys.readouterr().out
    assert "Corrected masks of 1 case would take part in every update with weight 1" in said
    assert command([*words, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert list(content["corrections"]) == ["Case01"]
    assert [item["corrected"] for item in content["cases"]] == [False, True, False]
    assert not (tmp_path / "out").exists()
