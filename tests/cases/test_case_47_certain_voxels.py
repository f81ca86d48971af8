"""Logarithms are log-softmax; a loss that is not finite leaves no trace, and the source mask is kept."""

import nibabel as nib
import numpy as np
import pytest
import small_site as small
from events import values
from safetensors.numpy import load_file, save_file

CASE = 47


@pytest.fixture
def certain_weights(small_weights, tmp_path):
    """Return weights of a network whose every voxel is fully certain: its last layer times a million."""
    path = tmp_path / "certain" / small_weights.name
    path.parent.mkdir()
    tensors = load_file(small_weights)
    for name in [key for key in tensors if key.startswith("outc.")]:
        tensors[name] = np.ascontiguousarray(tensors[name] * np.float32(1e6))
    save_file(tensors, path)
    path.with_suffix(".json").write_bytes(small_weights.with_suffix(".json").read_bytes())
    return path


@pytest.mark.parametrize("method", ["tesla", "tent"])
def test_a_network_that_is_fully_certain_is_adapted(certain_weights, tmp_path, method):
    small.make_volumes(tmp_path / "nii", 1)
    reports = ("reports=[table,tensorboard]",)
    result = small.run(
        tmp_path / "nii", certain_weights, tmp_path / "out", method=method, reports=reports, save_probs=True
    )
    (case,) = result.results
    assert (case.status, case.used) == ("ok", "adapted")
    probs = np.asarray(nib.load(result.out / "probs/Case00_prob.nii.gz").dataobj)
    assert np.isin(probs, (0, 1)).mean() > 0.9
    losses = [value.simple_value for tag, _, value in values(result.out) if tag.startswith("loss/")]
    assert losses
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("options", [{"reset": "case"}, {"reset": "site"}, {"protocol": "N-M"}], ids=str)
def test_a_loss_that_is_not_finite_leaves_no_trace(small_weights, tmp_path, options):
    small.make_volumes(tmp_path / "nii", 2)
    overrides = ("methods.tesla.learning_rate=1e30",)
    result = small.run(tmp_path / "nii", small_weights, tmp_path / "out", overrides=overrides, **options)
    for case in result.results:
        assert (case.status, case.used, case.share) == ("collapsed", "source", 0.0)
        assert "not finite" in case.reason
        files = small.masks(result.out)
        assert files[f"masks/{case.case}_mask.nii.gz"] == files[f"source_masks/{case.case}_mask.nii.gz"]
    assert not list((result.out / "checkpoints").rglob("*.safetensors"))
    plain = small.run(tmp_path / "nii", small_weights, tmp_path / "plain", method="source")
    assert small.files_below(plain.out / "source_masks") == small.files_below(result.out / "source_masks")
