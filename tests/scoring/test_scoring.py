"""Scores of finished masks; what is wrong with a reference, in words."""

from __future__ import annotations

import numpy as np
import pytest

from tesla_med.config.models import Files, LabelClass, MaskLayer, PipelineConfig, SiteConfig
from tesla_med.io.nifti import slice_axis
from tesla_med.io.volumes import read_volume, save_image
from tesla_med.scoring.areas import boundary_band
from tesla_med.scoring.score import class_indices, incomplete, label_values, normalised_entropy, score
from tesla_med.scoring.text import gathered
from tesla_med.types import Case, Prediction

AFFINE = np.diag([1.0, 2.0, 3.0, 1.0])


def pipeline(*values):
    classes = tuple(LabelClass(value=value, name=f"c{value}") for value in values)
    return PipelineConfig(name="p", title="P", sites="p", classes=classes)


def site(*layers, **files):
    return SiteConfig(
        id="S", pipeline="p", institution="", files=Files(image=("*.nii.gz",), masks=layers, **files)
    )


@pytest.mark.parametrize("values", [(0, 1), (0, 5, 2), (0, 300, 7, 65535)])
def test_labels_and_indices_are_inverse(values):
    config = pipeline(*values)
    rng = np.random.default_rng(0)
    probs = rng.random((len(values), 5, 4, 3)).astype(np.float32)
    mask = label_values(probs, config)
    assert mask.dtype == np.uint16
    assert set(np.unique(mask)) == set(values)
    assert np.array_equal(class_indices(mask, config), probs.argmax(axis=0))
    assert np.array_equal(np.asarray(values)[class_indices(mask, config)], mask)


def test_ties_go_to_the_background():
    assert label_values(np.full((2, 1, 1, 1), 0.5, np.float32), pipeline(0, 9)).item() == 0


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_normalised_entropy(classes):
    even = np.full((classes, 1, 1, 1), 1 / classes, np.float32)
    assert normalised_entropy(even).item() == pytest.approx(1)
    sure = np.zeros((classes, 1, 1, 1), np.float32)
    sure[1] = 1
    assert normalised_entropy(sure).item() == 0
    rng = np.random.default_rng(1)
    drawn = rng.dirichlet(np.ones(classes), 50).T.reshape(classes, 50, 1, 1).astype(np.float32)
    expected = -(drawn * np.log(drawn)).sum(axis=0) / np.log(classes)
    assert np.allclose(normalised_entropy(drawn), expected, atol=1e-5)


@pytest.fixture
def scored(tmp_path):
    """Score source and adapted boxes against a reference: half and all of it are found."""
    truth = np.zeros((12, 8, 6), np.uint8)
    truth[2:10, 2:6, 1:5] = 1
    save_image(tmp_path / "a.nii.gz", np.random.default_rng(0).random(truth.shape), AFFINE)
    save_image(tmp_path / "a_mask.nii.gz", truth, AFFINE, dtype=np.uint8)
    volume = read_volume(tmp_path / "a.nii.gz")
    half = np.where(np.arange(12)[:, None, None] < 6, truth, 0)

    def prediction(mask):
        probs = np.stack([1 - mask, mask]).astype(np.float32) * 0.8 + 0.1
        return Prediction(probs, mask.astype(np.uint16))

    def run(layer, path="a_mask.nii.gz", where=site, orientation="RAS"):
        masks = (tmp_path / path if path else None,)
        case = Case("a", tmp_path / "a.nii.gz", masks)
        config = pipeline(0, 1)
        preprocessing = config.preprocessing.model_copy(update={"orientation": orientation})
        config = config.model_copy(update={"preprocessing": preprocessing})
        return score(case, volume, prediction(half), prediction(truth), where(layer), config)

    return run, tmp_path, truth


def test_source_and_adapted_are_not_swapped(scored):
    run, _, truth = scored
    result = run(MaskLayer(pattern="*_mask.nii.gz"))
    only = result.scores[0]
    assert (only.dice, only.dice_source) == (1.0, pytest.approx(2 / 3))
    assert only.volume_ml == pytest.approx(truth.sum() * 6e-3)
    assert only.volume_ml_source == pytest.approx(truth.sum() * 3e-3)
    assert (only.voxels, only.voxels_source, only.voxels_reference) == (128, 64, 128)
    assert only.hd95_mm == 0
    assert np.array_equal(result.reference, truth)
    assert not result.problem
    assert result.calibration is not None


@pytest.mark.parametrize(("orientation", "axis"), [("RAS", 2), ("RSA", 1)])
def test_calibration_has_the_boundary_of_the_reference_within_slices(scored, orientation, axis):
    run, _, truth = scored
    counts = run(MaskLayer(pattern="*_mask.nii.gz"), orientation=orientation).calibration
    expected = boundary_band(truth, 3, axis)
    assert expected.sum() not in (0, boundary_band(truth, 3, 3 - axis).sum())
    for model, wrong in (("source", truth[6:] & expected[6:]), ("adapted", truth[:0])):
        figures = counts[model]["boundary"]["1"]
        assert figures["voxels"] == expected.sum()
        # probabilities are 0.9 of what the mask says, and the source lacks half of the structure
        assert figures["brier"] == pytest.approx(
            0.01 * (expected.sum() - wrong.sum()) + 0.81 * wrong.sum(), rel=1e-5
        )
    assert list(counts["adapted"]) == ["region", "boundary", "all"]


def test_without_a_reference_there_are_volumes_only(scored):
    run, *_ = scored
    result = run(MaskLayer(pattern="*_mask.nii.gz"), path=None)
    assert result.problem == ""
    assert result.scores[0].dice is None
    assert result.scores[0].volume_ml > 0
    assert result.calibration is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shift": 0.3}, ("0.3 mm", "a_bad.nii.gz")),
        ({"value": 4}, ("label 4", "a_bad.nii.gz")),
        ({"crop": 1}, ("shape 11 x 8 x 6", "a_bad.nii.gz")),
        ({"dtype": np.float32, "value": 0.5}, ("integer labels", "a_bad.nii.gz")),
    ],
)
def test_a_reference_that_does_not_fit(scored, change, words):
    run, folder, truth = scored
    affine = AFFINE.copy()
    affine[1, 3] = change.get("shift", 0.0)
    array = truth[change.get("crop", 0) :] * np.asarray(change.get("value", 1))
    save_image(folder / "a_bad.nii.gz", array, affine, dtype=change.get("dtype", np.uint8))
    result = run(MaskLayer(pattern="*_bad.nii.gz"), path="a_bad.nii.gz")
    for word in words:
        assert word in result.problem
    assert result.reference is None
    assert result.calibration is None
    assert result.scores[0].dice is None
    assert result.scores[0].voxels == 128


def test_an_unexpected_error_leaves_the_case_unscored(scored, monkeypatch):
    run, *_ = scored

    def broken(*_, **__):
        raise MemoryError("12 GiB")

    monkeypatch.setattr("tesla_med.scoring.areas.count_case", broken)
    result = run(MaskLayer(pattern="*_mask.nii.gz"))
    assert "a.nii.gz" in result.problem
    assert "MemoryError: 12 GiB" in result.problem
    assert result.scores == ()


def test_incomplete(tmp_path):
    layers = (MaskLayer(pattern="*_r1.nii.gz"), MaskLayer(pattern="*_r2.nii.gz"))
    image, mask = tmp_path / "a.nii.gz", tmp_path / "a_r1.nii.gz"
    assert incomplete(Case("a", image, (None, None)), site(*layers)) == ""
    assert incomplete(Case("a", image, (mask, mask)), site(*layers)) == ""
    assert incomplete(Case("a", image), site()) == ""
    assert "*_r2.nii.gz" in incomplete(Case("a", image, (mask, None)), site(*layers))


@pytest.mark.parametrize(("order", "axis"), [((0, 1, 2), 2), ((2, 0, 1), 0), ((0, 2, 1), 1)])
def test_slice_axis(tmp_path, order, axis):
    affine = np.eye(4)
    affine[:3, :3] = (np.diag([1.0, 1.0, -4.0]))[:, order]
    save_image(tmp_path / "a.nii.gz", np.zeros((4, 5, 6)) + np.arange(6), affine)
    assert slice_axis(read_volume(tmp_path / "a.nii.gz").affine, "RAS") == axis
    assert slice_axis(read_volume(tmp_path / "a.nii.gz").affine, "LPI") == axis
    assert slice_axis(read_volume(tmp_path / "a.nii.gz").affine, "ASR") == order.index(0)


def test_remarks_on_two_channels_are_of_one_case():
    texts = [f"channel {number}: the header gives no unit" for number in (1, 2)]
    assert gathered([("P1", text) for text in texts])[0].startswith("1 case, the worst is P1: ")
