from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from tesla_med.config.models import LabelClass
from tesla_med.errors import DataError
from tesla_med.io.masks import check_labels
from tesla_med.scoring import metrics
from tesla_med.scoring.grids import bounding_box, field_diagonal, surface_distances
from tesla_med.scoring.metrics import MaskPair, assd, dice, hd95, score_case, surface_dice, volume_ml

CLASSES = (
    LabelClass(value=0, name="background", color="#000000"),
    LabelClass(value=2, name="cord"),
    LabelClass(value=5, name="grey matter"),
)


def ball(shape, centre, radius_mm, spacing):
    grids = np.ogrid[tuple(slice(0, size) for size in shape)]
    squared = sum(
        ((grid - middle) * step) ** 2 for grid, middle, step in zip(grids, centre, spacing, strict=True)
    )
    return squared <= radius_mm**2


def surface_by_hand(mask):
    """Indices of mask voxels with a face neighbour outside, one voxel at a time."""
    inside = {tuple(index) for index in np.argwhere(mask)}
    steps = [(1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1)]
    edge = [index for index in inside if any(tuple(np.add(index, step)) not in inside for step in steps)]
    return np.array(sorted(edge), dtype=float)


def distances_by_hand(reference, prediction, spacing):
    first = surface_by_hand(reference) * spacing
    second = surface_by_hand(prediction) * spacing
    table = np.sqrt(((first[:, None] - second[None]) ** 2).sum(-1))
    there, back = table.min(axis=1), table.min(axis=0)
    return (
        max(np.percentile(there, 95), np.percentile(back, 95)),
        (there.sum() + back.sum()) / (there.size + back.size),
    )


def distances(reference, prediction, spacing):
    """HD95 and ASSD in mm."""
    pair = MaskPair(reference, prediction, spacing)
    return hd95(pair), assd(pair)


def test_dice_of_overlapping_boxes_is_exact():
    reference = np.zeros((10, 10, 4), np.uint8)
    prediction = np.zeros_like(reference)
    reference[2:6, 2:6, 1:3] = 1  # 32 voxels
    prediction[4:8, 2:6, 1:3] = 7  # 32 voxels, 16 in common
    assert dice(reference, prediction) == pytest.approx(0.5)
    assert dice(reference, reference) == 1.0


def test_dice_of_empty_masks():
    empty = np.zeros((4, 4, 4), np.uint8)
    some = empty.copy()
    some[1:3, 1:3, 1:3] = 1
    assert dice(empty, empty) is None
    assert dice(empty, some) == 0.0
    assert dice(some, empty) == 0.0


def test_empty_masks_of_a_case_have_no_figures_or_count_as_one():
    empty = np.zeros((16, 16, 8), np.uint8)
    assert dice(empty, empty, "one") == 1.0
    for score in score_case(empty, empty, empty, CLASSES, (1, 1, 3)):
        assert (score.dice, score.dice_source, score.hd95_mm, score.assd_mm) == (None,) * 4
        assert score.value("nsd") is None


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_dice_is_that_of_the_volume_whichever_way_the_slices_run(axis):
    reference = np.zeros((16, 16, 20), np.uint8)
    reference[4:8, 4:8, 8:12] = 2
    found = np.where(np.arange(20) < 10, reference, 0).astype(np.uint8)
    reference, found = (np.moveaxis(item, 2, axis) for item in (reference, found))
    score, _ = score_case(found, found, reference, CLASSES, (1, 1, 3))
    assert (score.dice, score.dice_source) == (pytest.approx(2 / 3), pytest.approx(2 / 3))


@pytest.mark.parametrize("dtype", [np.float16, np.uint8])
def test_counts_beyond_half_precision(dtype):
    mask = np.ones((512, 512, 1), dtype)
    assert dice(mask, mask) == 1.0
    assert volume_ml(mask, (1, 1, 1)) == pytest.approx(512 * 512 / 1000)


def test_the_diagonal_of_a_field():
    assert field_diagonal((24, 24, 4), (1, 1, 3)) == pytest.approx(np.sqrt(24**2 + 24**2 + 12**2))


def test_different_shapes_are_refused_by_name():
    with pytest.raises(DataError, match=r"\(4, 4, 4\) and \(4, 4, 5\)"):
        dice(np.zeros((4, 4, 4)), np.zeros((4, 4, 5)))


@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (0.5, 0.7, 3.0)])
@pytest.mark.parametrize("seed", range(4))
def test_surface_distances_match_brute_force(seed, spacing):
    rng = np.random.default_rng(seed)
    reference = ball((14, 13, 9), (6, 6, 4), 3.0 * min(spacing[:2]) + 0.5, spacing)
    prediction = np.roll(reference, (rng.integers(0, 3), rng.integers(0, 3), 1), axis=(0, 1, 2))
    prediction = prediction | (rng.random(reference.shape) > 0.99)
    expected = distances_by_hand(reference, prediction, np.array(spacing))
    assert distances(reference, prediction, spacing) == pytest.approx(expected, rel=1e-5)


def test_shifted_box_has_known_distances():
    reference = np.zeros((40, 20, 10), bool)
    reference[5:25, 4:16, 2:8] = True
    moved = np.roll(reference, 4, axis=0)
    largest, mean = distances(reference, moved, (0.5, 2.0, 3.0))
    assert largest == pytest.approx(2.0)  # 4 voxels of 0.5 mm
    assert 0 < mean < largest
    assert distances(reference, reference, (0.5, 2.0, 3.0)) == (0.0, 0.0)


def test_concentric_spheres_are_their_radii_apart():
    spacing = (0.5, 0.5, 0.5)
    inner, outer = (ball((64, 64, 64), (32, 32, 32), radius, spacing) for radius in (8.0, 12.0))
    largest, mean = distances(outer, inner, spacing)
    assert largest == pytest.approx(4.0, abs=0.5)
    assert mean == pytest.approx(4.0, abs=0.5)


def test_mask_that_touches_the_edge_of_the_grid_keeps_its_surface_there():
    full = np.ones((6, 6, 6), bool)
    part = full.copy()
    part[:, :, 4:] = False
    assert distances(full, part, (1, 1, 1)) == pytest.approx(
        distances_by_hand(full, part, np.ones(3)), rel=1e-5
    )


@pytest.mark.parametrize("axis", range(3))
def test_the_surface_of_one_slice_is_the_outline_in_it(axis):
    inner, outer = (ball((100, 100, 1), (50, 50, 0), radius, (1, 1, 1)) for radius in (20.0, 26.0))
    flat = distances(inner[..., 0], outer[..., 0], (1, 1))
    inner, outer = (np.moveaxis(item, 2, axis) for item in (inner, outer))
    assert distances(inner, outer, np.insert([1.0, 1.0], axis, 3.0)) == pytest.approx(flat)
    assert flat[1] == pytest.approx(6.0, abs=0.3)


def test_missed_structure_has_no_distance_and_dice_zero():
    reference = ball((16, 16, 8), (8, 8, 4), 3.0, (1, 1, 1))
    missed = np.zeros_like(reference)
    assert surface_distances(reference, missed, (1, 1, 1)) is None
    assert surface_distances(missed, reference, (1, 1, 1)) is None
    assert surface_distances(missed, missed, (1, 1, 1)) is None
    assert distances(reference, missed, (1, 1, 1)) == (None, None)
    assert dice(reference, missed) == 0.0


@pytest.mark.parametrize("tolerance", [0.0, 0.7, 1.0, 3.5])
@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (0.5, 0.7, 3.0)])
def test_surface_dice_is_that_of_monai(spacing, tolerance):
    from monai.metrics import compute_surface_dice

    rng = np.random.default_rng(0)
    reference = ball((20, 19, 9), (9, 8, 4), 3.0 * min(spacing[:2]) + 0.5, spacing)
    prediction = np.roll(reference, (2, 1, 1), axis=(0, 1, 2)) | (rng.random(reference.shape) > 0.995)
    batches = [torch.from_numpy(mask)[None, None] for mask in (prediction, reference)]
    expected = compute_surface_dice(*batches, [tolerance], include_background=True, spacing=spacing).item()
    found = surface_dice(MaskPair(reference, prediction, spacing), tolerance)
    assert found == pytest.approx(expected, abs=1e-6)


def test_surface_dice_counts_surface_voxels_within_the_tolerance():
    reference = np.zeros((24, 12, 6), bool)
    reference[4:12, 2:10, 1:5] = True
    moved = np.roll(reference, 1, axis=0)
    assert surface_dice(MaskPair(reference, moved, (1.0, 1.0, 1.0))) == 1.0
    # 2 mm apart now: of both surfaces the planes at the two ends are too far, but for their common voxels
    first, second = (surface_by_hand(mask) * (2.0, 1.0, 1.0) for mask in (reference, moved))
    table = np.sqrt(((first[:, None] - second[None]) ** 2).sum(-1))
    near = (table.min(axis=1) <= 1.0).sum() + (table.min(axis=0) <= 1.0).sum()
    expected = near / (len(first) + len(second))
    assert 0.5 < expected < 1.0
    assert surface_dice(MaskPair(reference, moved, (2.0, 1.0, 1.0))) == pytest.approx(expected)
    assert surface_dice(MaskPair(reference, moved, (2.0, 1.0, 1.0)), tolerance=2.0) == 1.0


def test_rounding_of_the_voxel_size_does_not_decide_the_surface_dice():
    reference = np.zeros((24, 12, 6), bool)
    reference[4:12, 2:10, 1:5] = True
    moved = np.roll(reference, 1, axis=0)
    assert surface_dice(MaskPair(reference, moved, (1.0000012, 1.0, 1.0))) == 1.0


def test_surface_dice_of_empty_masks():
    some = ball((16, 16, 8), (8, 8, 4), 3.0, (1, 1, 1))
    nothing = np.zeros_like(some)
    assert surface_dice(MaskPair(nothing, nothing, (1, 1, 1))) is None
    assert surface_dice(MaskPair(some, nothing, (1, 1, 1))) == 0.0
    assert surface_dice(MaskPair(nothing, some, (1, 1, 1))) == 0.0
    assert surface_dice(MaskPair(some, some, (1, 1, 1))) == 1.0


def test_metrics_of_one_pair_share_the_distances(monkeypatch):
    calls = []
    real = metrics.surface_distances
    monkeypatch.setattr(metrics, "surface_distances", lambda *parts: calls.append(1) or real(*parts))
    mask = np.zeros((12, 12, 6), np.uint8)
    mask[2:8, 2:8, 1:5] = 2
    cord, grey = score_case(mask, mask, mask, CLASSES, (1.0, 1.0, 2.0))
    assert (cord.hd95_mm, cord.assd_mm, cord.value("nsd")) == (0.0, 0.0, 1.0)
    assert grey.value("nsd") is None
    assert len(calls) == 2  # one a class


def test_a_pair_without_a_reference_has_nothing_to_compare():
    mask = np.ones((3, 3, 3), bool)
    with pytest.raises(DataError, match="a reference is needed"):
        hd95(MaskPair(None, mask, (1, 1, 1)))
    with pytest.raises(DataError, match=r"\(3, 3, 4\) and \(3, 3, 3\)"):
        MaskPair(np.ones((3, 3, 4), bool), mask, (1, 1, 1))


@pytest.mark.parametrize("spacing", [(1.0, 1.0), (1.0, 0.0, 1.0), (1.0, -1.0, 1.0), (1.0, np.nan, 1.0)])
def test_wrong_voxel_size_is_refused(spacing):
    mask = np.ones((3, 3, 3), bool)
    with pytest.raises(DataError, match="3 positive numbers in mm"):
        surface_distances(mask, mask, spacing)
    with pytest.raises(DataError, match="3 positive numbers in mm"):
        volume_ml(mask, spacing)


def test_volume_of_a_sphere():
    spacing = (0.5, 0.5, 1.0)
    mask = ball((64, 64, 40), (32, 32, 20), 12.0, spacing)
    assert volume_ml(mask, spacing) == pytest.approx(4 / 3 * np.pi * 12.0**3 / 1000, rel=0.02)


def test_score_case_scores_foreground_classes_by_value():
    reference = np.zeros((12, 12, 6), np.int16)
    reference[2:8, 2:8, 1:5] = 2
    reference[4:6, 4:6, 2:4] = 5
    source = np.where(reference == 5, 2, reference)
    mask = reference.copy()
    cord, grey = score_case(mask, source, reference, CLASSES, (1.0, 1.0, 2.0))
    assert (cord.label, cord.name, grey.label, grey.name) == (2, "cord", 5, "grey matter")
    assert (cord.dice, grey.dice, grey.dice_source) == (1.0, 1.0, 0.0)
    assert cord.dice_source == pytest.approx(2 * 136 / (136 + 144))
    assert (grey.hd95_mm, grey.assd_mm) == (0.0, 0.0)
    assert grey.volume_ml == pytest.approx(8 * 2.0 / 1000)
    assert (grey.volume_ml_source, grey.voxels_source, grey.voxels_reference) == (0.0, 0, 8)


def test_score_case_without_reference_gives_volumes_only():
    mask = np.full((4, 4, 4), 2, np.uint8)
    cord, grey = score_case(mask, mask, None, CLASSES, (1, 1, 1))
    assert cord.dice is None
    assert cord.dice_source is None
    assert cord.hd95_mm is None
    assert cord.voxels_reference is None
    assert cord.value("nsd") is None
    assert cord.volume_ml == pytest.approx(0.064)
    assert grey.volume_ml == 0.0


def test_nominal_voxel_size_leaves_mm_and_ml_blank_but_not_dice():
    mask = np.full((4, 4, 4), 2, np.uint8)
    cord, _ = score_case(mask, mask, mask, CLASSES, (1, 1, 1), nominal=True)
    assert cord.dice == 1.0
    assert (cord.hd95_mm, cord.assd_mm, cord.volume_ml, cord.volume_ml_source) == (None, None, None, None)
    assert cord.more == {"nsd": None}
    assert cord.voxels == 64


def test_false_positive_on_an_empty_reference_counts_as_zero_and_shows_its_volume():
    reference = np.zeros((6, 6, 6), np.uint8)
    mask = reference.copy()
    mask[2:4, 2:4, 2:4] = 2
    cord, grey = score_case(mask, reference, reference, CLASSES, (1, 1, 1))
    assert cord.dice == 0.0
    assert cord.dice_source is None
    assert cord.hd95_mm is None
    assert cord.value("nsd") == 0.0
    assert cord.volume_ml == pytest.approx(0.008)
    assert grey.dice is None
    assert grey.value("nsd") is None


def test_unknown_label_in_the_reference_is_named():
    reference = np.zeros((4, 4, 4), np.uint8)
    reference[0, 0, 0] = 3
    with pytest.raises(DataError, match="reference holds label 3, expected only 0, 2, 5"):
        score_case(reference * 0, reference * 0, reference, CLASSES, (1, 1, 1))
    check_labels(reference, [3], "the mask")


def test_bounding_box():
    mask = np.zeros((5, 6, 7), bool)
    assert mask[bounding_box(mask)].size == 0
    mask[1:3, 2:6, 4] = True
    assert bounding_box(mask) == (slice(1, 3), slice(2, 6), slice(4, 5))


def test_clinical_volume_takes_about_a_second():
    shape, spacing = (448, 448, 15), (0.45, 0.45, 3.6)
    reference = ball(shape, (220, 230, 7), 25.0, spacing).astype(np.uint8) * 2
    mask = ball(shape, (224, 228, 8), 24.0, spacing).astype(np.uint8) * 2
    surface_distances(mask[:8, :8], mask[:8, :8], spacing)  # first import of the library
    start = time.perf_counter()
    score_case(mask, mask, reference, CLASSES, spacing)
    assert time.perf_counter() - start < 4.0  # about 0.3 s on an idle machine
