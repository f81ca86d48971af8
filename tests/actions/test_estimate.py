"""What a run would be, before it is done."""

from __future__ import annotations

import pytest
import small_site as small

from tesla_med.actions.estimate import estimate
from tesla_med.actions.forecast import _Meter
from tesla_med.config.models import Region
from tesla_med.plan import RunRequest, make_plan

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return small.train_weights(tmp_path_factory.mktemp("small"))


@pytest.fixture
def volumes(tmp_path):
    small.make_volumes(tmp_path / "nii", 3)
    return tmp_path / "nii"


def of(volumes, weights, **options):
    site = options.pop("site", small.site())
    return estimate(make_plan(RunRequest(site, volumes, weights=weights, device="cpu", **options)))


def test_lists_every_case(volumes, weights):
    path = volumes / "Case01.nii.gz"
    small.copy_image(path, path, lambda image: image * 0)
    small.truncate(volumes / "Case02.nii.gz")
    (volumes / "Case01_segmentation.nii.gz").unlink()
    before = small.files_below(volumes.parent)
    result = of(volumes, weights)
    assert small.files_below(volumes.parent) == before
    assert [item.slices for item in result.cases] == [small.SLICES, 0, 0]
    assert [item.labelled for item in result.cases] == [True, False, True]
    assert [bool(item.problem) for item in result.cases] == [False, False, True]
    assert result.cases[0].shape == (32, 32, 4)
    assert "truncated" in result.cases[2].problem
    assert result.size == (32, 32)
    assert result.region == "whole field"
    assert result.forecast.seconds > 0
    assert result.forecast.memory_mib > 0


def test_adapting_costs_more_than_predicting(volumes, weights, monkeypatch):
    monkeypatch.setattr(_Meter, "_timed", lambda self, work, **_: (50.0, 2.0**20))  # on any machine
    source, tesla = (of(volumes, weights, method=name).forecast for name in ("source", "tesla"))
    assert tesla.seconds > 3 * source.seconds
    assert tesla.seconds_per_unit > 3 * source.seconds_per_unit
    assert {text for text, _ in source.faster} < {text for text, _ in tesla.faster}


def test_nothing_readable(volumes, weights):
    for path in volumes.glob("Case0?.nii.gz"):
        small.truncate(path)
    result = of(volumes, weights)
    assert (result.forecast.seconds, result.forecast.memory_mib, result.size) == (0.0, 0.0, None)


@pytest.mark.parametrize(
    ("region", "words"),
    [
        (Region(kind="square", size_mm=90), "square of 90 mm, centred"),
        (Region(kind="mask", size_mm=90, pattern="*_segmentation.nii.gz"), "about *_segmentation"),
        (Region(kind="point", size_mm=90, point_mm=(0, 0, 0)), "about (0.0, 0.0, 0.0) mm"),
    ],
)
def test_region_in_words(volumes, weights, region, words):
    result = of(volumes, weights, site=small.site(region=region))
    assert words in result.region
