"""Calibration that is counted after runs leaves out what the runs took for fill."""

import nibabel as nib
import numpy as np
import pytest
import small_site as small

from tesla_med.config.files import load_pipeline
from tesla_med.runs.folder import RunFolder
from tesla_med.tasks._cases import fill_left_out
from tesla_med.tasks.volumes import Volumes

pytestmark = pytest.mark.usefixtures("one_thread")


def test_as_the_runs_did_and_not_as_the_pipeline_says(tmp_path):
    """The reference labels voxels beside the border, which are fill, so that the region reaches there."""
    weights = small.train_weights(tmp_path)
    (image,) = small.make_volumes(tmp_path / "nii", 1)
    for path, value in ((image, 0), (image.with_name("Case00_segmentation.nii.gz"), 1)):
        loaded = nib.load(path)
        array = np.asarray(loaded.dataobj).copy()
        array[:4] = value
        nib.save(nib.Nifti1Image(array, loaded.affine), path)
    runs = {}
    for name in ("true", "false"):
        options = {"method": "source", "save_probs": True}
        texts = (f"preprocessing.fill.enabled={name}",)
        small.run(tmp_path / "nii", weights, tmp_path / name, overrides=texts, **options)
        runs[name] = RunFolder(tmp_path / name)
    assert fill_left_out([runs["true"]]).enabled
    assert not fill_left_out([runs["false"], RunFolder(tmp_path / "nowhere")]).enabled
    voxels = {}
    for name, folder in runs.items():
        for enabled in ("true", "false"):
            texts = (*small.SMALL, f"preprocessing.fill.enabled={enabled}")
            task = Volumes(small.site(), load_pipeline("prostate", texts))
            (counts,) = task.recount(task.find(tmp_path / "nii", ()), {name: folder})
            voxels[name, enabled] = counts[name].voxels
    assert voxels["true", "true"] == voxels["true", "false"]
    assert voxels["false", "true"] == voxels["false", "false"]
    assert voxels["false", "true"] - voxels["true", "true"] >= 4 * 32 * small.SLICES
