"""Matching to a histogram: by hand, through preparation, and under the Y protocols."""

import numpy as np
import pytest
import small_site as small
import torch
from pydantic import ValidationError

from tesla_med.config.models import Intensity, Preprocessing, Region
from tesla_med.errors import DataError
from tesla_med.io.volumes import read_volume
from tesla_med.models.checkpoint import read_card
from tesla_med.models.statistics import load_statistics, statistics_path
from tesla_med.prepare.histogram import COUNT, Histogram, HistogramMatching, matched
from tesla_med.prepare.transforms import Preprocessor


def test_matched_values_have_the_quantiles_of_the_target():
    torch.manual_seed(0)
    target = (np.linspace(0, 1, COUNT) ** 2).tolist()
    for values in (torch.rand(20, 20, 5), 1000 * torch.rand(20, 20, 5) ** 3 - 7):
        found = matched(values, target)
        assert np.allclose(np.quantile(found.numpy(), np.linspace(0, 1, COUNT)), target, atol=0.01)
        order = values.flatten().argsort()
        assert bool((found.flatten()[order].diff() >= 0).all())


def test_equal_values_stay_equal():
    values = torch.cat([torch.zeros(600), torch.rand(400)]).view(10, 10, 10)
    found = matched(values, np.linspace(0, 1, COUNT).tolist())
    assert len(torch.unique(found[values == 0])) == 1
    assert float(found.max()) == 1.0
    assert torch.equal(matched(torch.ones(4, 4, 2), [0.0, 0.5, 1.0]), torch.full((4, 4, 2), 0.5))


def test_quantiles_of_many_images():
    torch.manual_seed(0)
    histogram = Histogram()
    assert histogram.quantiles() == ()
    images = torch.rand(6, 2, 50, 50)
    images[:, 1] = images[:, 1] ** 2
    for part in images.split(2):
        histogram.add(part)
    found = histogram.quantiles()
    assert [len(item) for item in found] == [COUNT, COUNT]
    for channel in range(2):
        want = np.quantile(images[:, channel].numpy(), np.linspace(0, 1, COUNT))
        assert np.allclose(found[channel], want, atol=0.005)


@pytest.mark.parametrize(
    "bad",
    [
        {"scaling": "histogram"},
        {"scaling": "minmax", "quantiles": [[0, 1]]},
        {"scaling": "histogram", "quantiles": [[1, 0]]},
        {"scaling": "histogram", "quantiles": [[0, 2]]},
        {"scaling": "histogram", "quantiles": [[0]]},
    ],
)
def test_wrong_quantiles_are_refused(bad):
    with pytest.raises(ValidationError):
        Intensity(**bad)


def test_another_number_of_channels_is_refused():
    with pytest.raises(DataError, match="2 channels, not 1"):
        HistogramMatching(((0.0, 1.0), (0.0, 1.0)))({"image": torch.zeros(1, 2, 2, 2)})


def test_a_matched_volume_is_prepared_and_comes_back(tmp_path):
    (path,) = small.make_volumes(tmp_path, 1)
    target = tuple((np.linspace(0, 1, COUNT) ** 3).tolist())
    intensity = Intensity(scaling="histogram", quantiles=(target,))
    prepared = Preprocessor(Preprocessing(intensity=intensity), Region(), 2)(read_volume(path))
    found = np.quantile(prepared.images.numpy(), np.linspace(0, 1, COUNT))
    assert np.abs(found - target).max() < 0.02
    assert prepared.restore(torch.ones(small.SLICES, 2, 32, 32) / 2).shape[1:] == read_volume(path).shape


@pytest.mark.usefixtures("one_thread")
def test_under_y_the_histogram_of_the_source_is_a_candidate(tmp_path):
    weights = small.weights_with_statistics(tmp_path)
    _, card = load_statistics(statistics_path(weights))
    assert [len(item) for item in card.intensities] == [COUNT]
    small.make_volumes(tmp_path / "nii", 1, name="source")
    choice = ("scaling.candidates=[{scaling: minmax}]", "scaling.shifted=0", "scaling.gain=1")
    options = {"overrides": choice, "method": "tesla_s", "reset": "case"}
    known = small.run(tmp_path / "nii", weights, tmp_path / "y", protocol="Y-O", **options)
    (case,) = known.results
    assert "scaling_distance_the histogram of the source" in case.signals
    if case.scaling == "the histogram of the source":
        saved = read_card(known.out / "checkpoints/Case00.safetensors")
        assert saved.preprocessing.intensity.quantiles == card.intensities
    options["method"] = "tesla"
    without = small.run(tmp_path / "nii", weights, tmp_path / "n", protocol="N-O", **options)
    assert not any("histogram" in name for name in without.results[0].signals)
