"""A header that contradicts the anatomy cannot be detected: pictures carry directions, unsure masks are
for review.

"""

import nibabel as nib
import numpy as np
import small_site as small

from tesla_med.reports.overlays import layout

CASE = 38


def relabelled(path):
    """Write the image again with its first axis called posterior to anterior; the voxels stay."""
    image = nib.load(path)
    affine = image.affine[:, [1, 0, 2, 3]]
    nib.save(nib.Nifti1Image(np.asarray(image.dataobj), affine), path)
    return affine


def test_the_pictures_say_what_the_header_says(tmp_path):
    path = small.make_volumes(tmp_path, 1)[0]
    spacing = (1.0, 1.0, 3.0)
    before = layout(nib.load(path).affine, spacing, 2).letters
    after = layout(relabelled(path), spacing, 2).letters
    assert set(before) == set(after) == {"L", "R", "A", "P"}
    turned = nib.load(path).affine
    assert layout(turned, spacing, 2).letters == after


def test_an_unsure_mask_is_for_review(small_weights, tmp_path):
    path = small.make_volumes(tmp_path / "nii", 1)[0]
    relabelled(path)
    overrides = ("guard.enabled=true", "quality.review_below=1.0")
    result = small.run(
        tmp_path / "nii",
        small_weights,
        tmp_path / "out",
        overrides=overrides,
        reports=("reports=[table,html]",),
    )
    page = (result.out / "report/report.html").read_text(encoding="utf-8")
    assert result.results[0].scores[0].predicted_dice is not None
    assert "please review" in page
