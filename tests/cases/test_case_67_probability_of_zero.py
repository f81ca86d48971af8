"""Log-loss clips probabilities to at least 1e-12 and counts where that mattered; Brier is unaffected."""

import json

import nibabel as nib
import numpy as np
import pytest
from lines import adapt, work_there

CASE = 67
EPSILON = 1e-12


def test_in_the_figures_of_a_run(tmp_path, known_weights, monkeypatch):
    """The network is as good as certain, and wrong in places."""
    work_there(tmp_path, monkeypatch, 1)
    assert adapt(known_weights(), "--method", "source", "--save-probs", reports="[calibration]") == 0
    content = json.loads((tmp_path / "out/report/calibration.json").read_text(encoding="utf-8"))
    assert content["epsilon"] == EPSILON
    probs = np.asarray(nib.load(tmp_path / "out/probs/Case00_prob.nii.gz").dataobj, np.float64)[..., 1]
    truth = np.asarray(nib.load(tmp_path / "nii/Case00_segmentation.nii.gz").dataobj) > 0
    of_truth = np.where(truth, probs, 1 - probs)
    figures = content["all"]["source"]["1"]
    assert figures["voxels"] == truth.size
    assert figures["clipped"] == np.count_nonzero(of_truth < EPSILON) > 0
    assert figures["nll"] == pytest.approx(-np.log(np.maximum(of_truth, EPSILON)).mean(), rel=1e-3)
    assert figures["brier"] == pytest.approx(((probs - truth) ** 2).mean(), rel=1e-3)
