"""A constant image is flagged as blank, not adapted to nor trained on, and gets an empty mask on its grid."""

import json

import nibabel as nib
import numpy as np
import pytest
import small_site as small
from lines import run, sets, work_there

CASE = 11
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return small.train_weights(tmp_path_factory.mktemp("small"))


def make_constant(path, value):
    """Give an image one value everywhere; return its shape."""
    image = nib.load(path)
    nib.save(nib.Nifti1Image(np.full(image.shape, value, np.float32), image.affine), path)
    return image.shape


@pytest.mark.parametrize("value", [0.0, 5.0])
def test_one_value_everywhere(weights, tmp_path, value):
    paths = small.make_volumes(tmp_path / "nii", 2)
    shape = make_constant(paths[0], value)
    result = small.run(tmp_path / "nii", weights, tmp_path / "out", save_probs=True)
    assert [item.status == "blank" for item in result.results] == [True, False]
    assert not small.labels(result.out, "Case00").any()
    assert nib.load(result.out / "masks/Case00_mask.nii.gz").shape == shape
    assert np.isfinite(np.asarray(nib.load(result.out / "probs/Case00_prob.nii.gz").dataobj)).all()
    assert not (result.out / "checkpoints/Case00.safetensors").exists()


def train(texts=("train.steps=1", "train.validate_every=1", "train.batch_size=2")):
    words = ["--pipeline", "prostate", "--sites", "X", "--volumes", "nii", "--out", "weights"]
    return run(["train", *words, "--device", "cpu", *sets(*small.SMALL, *texts)])


def test_training(tmp_path, monkeypatch, capsys):
    work_there(tmp_path, monkeypatch, 3)
    make_constant(tmp_path / "nii/Case01.nii.gz", 7.0)
    assert train() == 0
    record = json.loads((tmp_path / "weights/train.json").read_text())
    assert record["left_out"] == ["X/Case01: blank: the image is constant"]
    assert record["training_cases"] == ["X/Case00", "X/Case02"]
    assert "Left out: 1, listed in train.json" in capsys.readouterr().out


def test_training_on_nothing_else(tmp_path, monkeypatch, capsys):
    work_there(tmp_path, monkeypatch, 1)
    make_constant(tmp_path / "nii/Case00.nii.gz", 7.0)
    assert train() == 2
    assert "X/Case00: blank: the image is constant" in capsys.readouterr().err
    assert not (tmp_path / "weights").exists()
