"""Looking through a site's files: every kind of problem is found and named."""

from __future__ import annotations

import numpy as np
import pytest
import small_site as small

from tesla_med.actions.check import check_site
from tesla_med.config.files import load_pipeline
from tesla_med.config.models import Files, MaskLayer, Region
from tesla_med.errors import DataError

MASK = "Case01_segmentation.nii.gz"


@pytest.fixture
def volumes(tmp_path):
    small.make_volumes(tmp_path, 2)
    return tmp_path


def check(volumes, **changes):
    return check_site(small.site(**changes), load_pipeline("prostate"), volumes)


def second(volumes, **changes):
    """Check, and return the second case; the first must be fine."""
    result = check(volumes, **changes)
    assert result.cases[0].problems == ()
    assert result.problems == 1
    return result.cases[1]


def test_nothing_to_report(volumes):
    told = []
    result = check_site(small.site(), load_pipeline("prostate"), volumes, lambda *item: told.append(item))
    assert result.problems == 0
    assert [case.case for case in result.cases] == ["Case00", "Case01"]
    assert result.cases[0].shape == (32, 32, 4)
    assert result.cases[0].labels == (0, 1)
    assert result.cases[0].spacing == pytest.approx((150 / 32, 150 / 32, 3.6), rel=1e-3)
    assert [item[1:] for item in told] == [(1, 2), (2, 2)]


def test_unreadable_image(volumes):
    small.truncate(volumes / "Case01.nii.gz")
    case = second(volumes)
    assert case.shape is None
    assert "Case01.nii.gz: truncated" in case.problems[0]


def test_constant_image(volumes):
    path = volumes / "Case01.nii.gz"
    small.copy_image(path, path, lambda image: image * 0)
    assert second(volumes).problems == ("the image is constant",)


@pytest.mark.parametrize(
    ("change", "shift", "words"),
    [
        (lambda mask: mask, 0.3, "0.3 mm"),
        (lambda mask: mask[1:], 0.0, "shape"),
        (lambda mask: mask * 5, 0.0, "label 5"),
    ],
)
def test_references_that_do_not_fit(volumes, change, shift, words):
    small.copy_image(volumes / MASK, volumes / MASK, change, shift_mm=shift, dtype=np.uint8)
    files = Files(image=("Case*.nii.gz",), masks=(MaskLayer(pattern="*_segmentation.nii.gz"),))
    assert words in second(volumes, files=files).problems[0]


def test_incomplete_reference(volumes):
    small.copy_image(volumes / "Case00_segmentation.nii.gz", volumes / "Case00_two.nii.gz", dtype=np.uint8)
    layers = (
        MaskLayer(pattern="*_segmentation.nii.gz", write=1),
        MaskLayer(pattern="*_two.nii.gz", write=1),
    )
    case = second(volumes, files=Files(image=("Case*.nii.gz",), masks=layers))
    assert "*_two.nii.gz" in case.problems[0]


def test_region_mask(volumes):
    region = Region(kind="mask", size_mm=60, pattern="*_segmentation.nii.gz")
    small.copy_image(volumes / MASK, volumes / MASK, lambda mask: mask * 0, dtype=np.uint8)
    assert "empty" in second(volumes, region=region).problems[0]
    (volumes / MASK).unlink()
    assert "region comes from a mask" in second(volumes, region=region).problems[0]


def test_region_that_cannot_be_placed(volumes):
    result = check(volumes, region=Region(kind="point", size_mm=60, point_mm=(900, 0, 0)))
    assert all("outside the image" in case.problems[0] for case in result.cases)
    result = check(volumes, region=Region(kind="square", size_mm=0.5))
    assert result.problems == 2


def test_files_that_are_not_used(volumes):
    (volumes / "notes.txt").write_text("hello")
    (volumes / "Case01.nii.gz").unlink()
    result = check(volumes)
    reasons = {path.name: reason for path, reason in result.skipped}
    assert reasons[MASK] == "a mask without its image"
    assert reasons["notes.txt"].startswith("not ")


def test_no_images(tmp_path):
    with pytest.raises(DataError, match="no image of site X"):
        check(tmp_path)
