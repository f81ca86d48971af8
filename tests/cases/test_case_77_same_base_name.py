"""Outputs mirror sub-folders; images whose results would share a name stop the run before it starts."""

import nibabel as nib
import pytest
import small_site as small

import tesla_med

CASE = 77


@pytest.fixture
def site():
    return small.site(files={"image": ("*",), "masks": small.site().files.masks})


def test_two_patients_with_one_base_name(small_weights, tmp_path, site):
    first, second = small.make_volumes(tmp_path / "source", 2)
    small.copy_image(first, tmp_path / "nii/p1/image.nii.gz")
    small.copy_image(second, tmp_path / "nii/p2/image.nii.gz", lambda array: array[:, :, :3])
    result = small.run(
        tmp_path / "nii", small_weights, tmp_path / "out", site=site, save_probs=True, save_uncertainty=True
    )
    assert [item.case for item in result.results] == ["p1/image", "p2/image"]
    for part, kind in (
        *(("masks", "mask"), ("source_masks", "mask")),
        *(("probs", "prob"), ("uncertainty", "entropy")),
    ):
        shapes = [nib.load(tmp_path / f"out/{part}/{p}/image_{kind}.nii.gz").shape[:3] for p in ("p1", "p2")]
        assert shapes == [(32, 32, 4), (32, 32, 3)]
    table = (tmp_path / "out/report/metrics.csv").read_text()
    assert "\np1/image," in table
    assert "\np2/image," in table


@pytest.mark.parametrize(
    "names", [("a.nii", "a.nii.gz"), ("a.nii.gz", "A.NII.GZ"), ("p1/a.nii", "p1/a.nii.gz")]
)
def test_a_clash_is_listed_before_anything_is_written(small_weights, tmp_path, site, names):
    (image,) = small.make_volumes(tmp_path / "source", 1)
    for name in names:
        small.copy_image(image, tmp_path / "nii" / name)
    if len(list((tmp_path / "nii").rglob("*.*"))) < len(names):
        pytest.skip("this file system does not tell upper from lower case")
    with pytest.raises(tesla_med.TeslaMedError, match="would share a name") as error:
        small.run(tmp_path / "nii", small_weights, tmp_path / "out", site=site)
    assert all(name.rpartition("/")[2] in str(error.value) for name in names)
    assert not (tmp_path / "out").exists()
