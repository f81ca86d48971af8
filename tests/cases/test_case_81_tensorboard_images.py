"""Pictures are windowed to [0, 1] whatever the range of the image: one stated window for all panels."""

import io
import re

import nibabel as nib
import numpy as np
import pytest
from events import values
from lines import adapt, work_there
from PIL import Image

CASE = 81
RANGES = {"Hounsfield": (-1000.0, 3000.0), "unit": (0.0, 1.0)}


def scale(path, low, high):
    """Bring the intensities of an image to a range."""
    image = nib.load(path)
    array = np.asarray(image.dataobj, np.float32)
    array = (array - array.min()) / np.ptp(array) * (high - low) + low
    nib.save(nib.Nifti1Image(array.astype(np.float32), image.affine), path)


@pytest.fixture
def logged(tmp_path, known_weights, monkeypatch):
    """Return picture and text that TensorBoard is given for a case of each range."""
    found = {}
    for name, ends in RANGES.items():
        (tmp_path / name).mkdir()
        work_there(tmp_path / name, monkeypatch, 1)
        scale(tmp_path / name / "nii/Case00.nii.gz", *ends)
        assert adapt(known_weights(), "--method", "source", reports="[tensorboard]") == 0
        picture = text = None
        for tag, _, value in values(tmp_path / name / "out"):
            if value.image.encoded_image_string:
                encoded = value.image.encoded_image_string
                picture = np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB")).astype(int)
            elif tag.startswith("overlay/"):
                text = value.tensor.string_val[0].decode()
        found[name] = picture, text
    return found


def test_the_same_picture_whatever_the_range(logged):
    first, second = (logged[name][0] for name in RANGES)
    assert np.abs(first - second).max() <= 3
    for picture in (first, second):
        grey = picture[np.ptp(picture, axis=2) == 0]
        assert len(np.unique(grey)) > 50  # neither black nor white
    for name, (low, high) in RANGES.items():
        text = logged[name][1]
        assert "source | adapted | reference" in text
        assert "the same for every panel" in text
        shown = re.search(r"display window (\S+) to (\S+),", text)
        assert low <= float(shown[1]) < float(shown[2]) <= high
