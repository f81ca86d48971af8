"""A mask without foreground is a valid mask on the image's grid; the case is called `empty`."""

import nibabel as nib
import numpy as np
import pytest
import small_site as small
import torch

from tesla_med.models.unet import UNet

CASE = 36
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return small.train_weights(tmp_path_factory.mktemp("small"))


def test_background_everywhere(weights, tmp_path, monkeypatch):
    original = UNet.logits

    def background(self, images):
        return original(self, images) * 0 + torch.tensor([9.0, -9.0]).view(1, 2, 1, 1)

    monkeypatch.setattr(UNet, "logits", background)
    path = small.make_volumes(tmp_path / "nii", 1)[0]
    result = small.run(
        tmp_path / "nii", weights, tmp_path / "out", method="source",
        overrides=("keep_largest=true",), reports=("reports=[table, calibration, html]",),
    )  # fmt: skip
    assert result.results[0].status == "empty"
    image, mask = nib.load(path), nib.load(tmp_path / "out/masks/Case00_mask.nii.gz")
    assert not np.asarray(mask.dataobj).any()
    assert mask.shape == image.shape
    assert np.array_equal(mask.affine, image.affine)
