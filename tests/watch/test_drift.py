"""A drift of known size is noticed and no drift is not; the figures of an image are what they say."""

from __future__ import annotations

import numpy as np
import pytest

from tesla_med.types import Volume
from tesla_med.watch.drift import REFERENCE, WINDOW, find_drifts
from tesla_med.watch.statistics import NAMES, image_statistics

FIGURES = (*NAMES, "predicted_dice")


def stream(seed, count=200):
    """Return figures of a site that does not drift."""
    generator = np.random.default_rng(seed)
    found = {name: generator.normal(10, 1, count) for name in FIGURES}
    found["slice_mm"] = np.full(count, 3.0)
    found["in_plane_mm"] = generator.choice([0.5, 0.625], count)
    return found


def lists(figures):
    return {name: values.tolist() for name, values in figures.items()}


@pytest.mark.parametrize("seed", range(3))
def test_no_drift_is_none(seed):
    assert find_drifts(lists(stream(seed))) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_drift_of_two_standard_deviations_is_noticed_within_a_window(seed):
    figures = stream(seed)
    figures["noise"][120:] += 2
    (found,) = find_drifts(lists(figures))
    assert (found.name, found.last, found.present) == ("noise", 199, True)
    assert 120 + 5 <= found.first < 120 + WINDOW
    assert found.before == np.median(figures["noise"][:REFERENCE])
    assert found.now == pytest.approx(np.median(figures["noise"][-WINDOW:]))
    assert found.now - found.before == pytest.approx(2, abs=0.7)


def test_another_thickness_of_slices_is_noticed_and_its_end_too():
    figures = stream(0)
    figures["slice_mm"][100:140] = 3.6
    (found,) = find_drifts(lists(figures))
    assert (found.name, found.present, found.before) == ("slice_mm", False, 3.0)
    assert 100 < found.first < 120
    assert 140 <= found.last < 140 + WINDOW


def test_before_there_is_a_window_nothing_is_said():
    figures = {"noise": [1.0] * REFERENCE + [2.0] * WINDOW}
    assert [item.first for item in find_drifts(figures)] == [REFERENCE + WINDOW - 1]
    assert find_drifts({"noise": figures["noise"][:-1]}) == []
    assert find_drifts({}) == []


def test_cases_without_a_value_are_passed_over():
    values = stream(4)["p50"]
    values[100:] += 3
    gaps = values.tolist()
    for index in range(0, 200, 4):
        gaps.insert(index, None)
    (found,) = find_drifts({"p50": gaps})
    assert found.present
    assert gaps[found.first] is not None
    (whole,) = find_drifts({"p50": values.tolist()})
    assert found.first == [index for index, value in enumerate(gaps) if value is not None][whole.first]


def test_a_drift_goes_on_while_a_figure_is_missing():
    values = stream(4)["p50"]
    values[100:] += 3
    (found,) = find_drifts({"p50": values.tolist()})
    for gaps in (1, 3):
        (same,) = find_drifts({"p50": [*values.tolist(), *[None] * gaps]})
        assert same == found
        assert same.present


def volume(array, spacing=(0.5, 0.5, 3.0), blank=False):
    data = np.asarray(array, np.float32)[None]
    return Volume(data, np.diag([*spacing, 1.0]), spacing, None, None, blank=blank)


def phantom(noise, seed=0):
    """Return a bright box with a step in it, on a dark ground."""
    generator = np.random.default_rng(seed)
    image = np.zeros((64, 64, 6))
    image[8:56, 8:56] = 100
    image[32:56, 8:56] = 140
    return image + generator.normal(0, noise, image.shape)


def test_figures_of_an_image():
    found = image_statistics(volume(phantom(4)))
    assert tuple(found) == NAMES
    assert found["noise"] * found["p50"] == pytest.approx(4, rel=0.1)
    assert found["body"] == pytest.approx((48 / 64) ** 2, abs=0.01)
    assert found["p05"] == pytest.approx(95, abs=2)
    assert found["p95"] == pytest.approx(145, abs=2)
    assert found["contrast"] == pytest.approx(50 / 240, abs=0.02)
    assert (found["in_plane_mm"], found["slice_mm"], found["slices"]) == (0.5, 3.0, 6)


def test_a_factor_changes_intensities_alone():
    one, other = (image_statistics(volume(factor * phantom(4))) for factor in (1, 7))
    for name in NAMES:
        scale = 7 if name in ("p05", "p50", "p95") else 1
        assert other[name] == pytest.approx(scale * one[name], rel=1e-4), name


def test_slices_lie_across_the_largest_voxels():
    turned = np.moveaxis(phantom(4), 2, 0)
    one = image_statistics(volume(phantom(4)))
    assert image_statistics(volume(turned, (3.0, 0.5, 0.5))) == pytest.approx(one)


def test_a_constant_image_has_a_grid_and_no_intensities():
    found = image_statistics(volume(np.ones((8, 8, 4)), blank=True))
    assert found == {"in_plane_mm": 0.5, "slice_mm": 3.0, "slices": 4.0}


def test_images_too_small_for_noise_have_the_other_figures():
    array = np.arange(2 * 8 * 4).reshape(2, 8, 4)
    assert "noise" not in image_statistics(volume(array))
    assert "p50" in image_statistics(volume(array))
