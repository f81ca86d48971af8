"""Voxels that are not finite are set to the smallest finite value, with a count; a case without finite
voxels fails.
"""

import nibabel as nib
import numpy as np
import pytest
import small_site as small

CASE = 9
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return small.train_weights(tmp_path_factory.mktemp("small"))


def with_values(path, change):
    image = nib.load(path)
    array = np.array(image.dataobj, dtype=np.float32)
    change(array)
    nib.save(nib.Nifti1Image(array, image.affine), path)


def one(array):
    array[np.unravel_index(array.argmin(), array.shape)] = np.nan


def everything(array):
    array[:] = np.nan


def test_one_voxel_changes_nothing(weights, tmp_path):
    plain, broken = (small.make_volumes(tmp_path / name, 1)[0] for name in ("plain", "broken"))
    with_values(plain, lambda array: None)
    with_values(broken, one)
    runs = [
        small.run(path.parent, weights, tmp_path / f"out-{path.parent.name}", method="source")
        for path in (plain, broken)
    ]
    assert np.array_equal(*(small.labels(run.out, "Case00") for run in runs))
    notes = " ".join(runs[1].results[0].notes)
    assert "1 " in notes
    assert "finite" in notes


def test_nothing_finite_fails_that_case(weights, tmp_path):
    paths = small.make_volumes(tmp_path / "nii", 2)
    with_values(paths[0], everything)
    result = small.run(tmp_path / "nii", weights, tmp_path / "out", method="source")
    assert [item.status == "failed" for item in result.results] == [True, False]
