"""A header that contradicts the anatomy cannot be detected: pictures carry directions, unsure masks are
for review.

"""

import re

import nibabel as nib
import numpy as np
import small_site as small

CASE = 38
REPORTS = ("reports=[table,html]",)


def relabelled(path):
    """Write the image again with its first axis called posterior to anterior; the voxels stay."""
    image = nib.load(path)
    affine = image.affine[:, [1, 0, 2, 3]]
    nib.save(nib.Nifti1Image(np.asarray(image.dataobj), affine), path)


def test_the_pictures_say_what_the_header_says(small_weights, tmp_path):
    for name, change in (("plain", lambda path: None), ("turned", relabelled)):
        (path,) = small.make_volumes(tmp_path / name, 1)
        for reference in path.parent.glob("*_segmentation*"):
            reference.unlink()
        change(path)
        options = {"method": "source", "reports": REPORTS}
        result = small.run(path.parent, small_weights, tmp_path / f"out-{name}", **options)
        page = (result.out / "report/report.html").read_text(encoding="utf-8")
        assert "data:image/jpeg" in page
        letters = re.findall(r'<span class="letter">(.)</span>', page)
        assert letters[:4] == ["R", "L", "A", "P"]
        assert set(letters) == set("RLAP")
        (beside,) = (result.out / "report/slices").glob("*.js")
        assert '"letters":["R","L","A","P"]' in beside.read_text(encoding="utf-8")


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
