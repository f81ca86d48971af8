"""A header that contradicts the anatomy cannot be detected: pictures carry directions, unsure masks are
for review.

"""

import nibabel as nib
import numpy as np
import pytest
import small_site as small
from matplotlib.axes import Axes

CASE = 38
REPORTS = ("reports=[table,html]",)


def relabelled(path):
    """Write the image again with its first axis called posterior to anterior; the voxels stay."""
    image = nib.load(path)
    affine = image.affine[:, [1, 0, 2, 3]]
    nib.save(nib.Nifti1Image(np.asarray(image.dataobj), affine), path)


@pytest.fixture
def letters(monkeypatch):
    """Return the single letters that are written into pictures, left, right, top and bottom of each."""
    found, text = [], Axes.text

    def note(self, x, y, words, *more, **options):
        if len(words) == 1 and words in "LRAPSI":
            found.append(words)
        return text(self, x, y, words, *more, **options)

    monkeypatch.setattr(Axes, "text", note)
    return found


def test_the_pictures_say_what_the_header_says(small_weights, tmp_path, letters):
    for name, change in (("plain", lambda path: None), ("turned", relabelled)):
        (path,) = small.make_volumes(tmp_path / name, 1)
        for reference in path.parent.glob("*_segmentation*"):
            reference.unlink()
        change(path)
        options = {"method": "source", "reports": REPORTS}
        result = small.run(path.parent, small_weights, tmp_path / f"out-{name}", **options)
        assert "data:image/jpeg" in (result.out / "report/report.html").read_text(encoding="utf-8")
        assert letters[:4] == ["R", "L", "A", "P"]
        assert set(letters) == set("RLAP")
        letters.clear()


def test_an_unsure_mask_is_for_review(small_weights, tmp_path):
    path = small.make_volumes(tmp_path / "nii", 1)[0]
    relabelled(path)
    overrides = ("guard.enabled=true", "quality.review_below=1.0")
    result = small.run(
        tmp_path / "nii", small_weights, tmp_path / "out", overrides=overrides, reports=REPORTS
    )
    page = (result.out / "report/report.html").read_text(encoding="utf-8")
    assert result.results[0].scores[0].predicted_dice is not None
    assert "please review" in page
