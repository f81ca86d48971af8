"""A reference on another grid is refused with shape, voxel size, origin and orientation of both sides, and
with which of them differ.
"""

import json

import numpy as np
import pytest
import small_site as small
from lines import adapt, run, write_site
from small_volumes import blocks, diagonal, write

CASE = 34
pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = (12, 10, 4)
TURNED = np.array([[0, 1.0, 0, 0], [1.0, 0, 0, 0], [0, 0, 3.0, 0], [0, 0, 0, 1]])
OTHERS = {
    "voxel size": (SHAPE, diagonal(1.1, 1.1, 3), "voxel size 1.1 x 1.1 x 3 mm"),
    "origin": (SHAPE, diagonal(1, 1, 3, origin=(5, -2.5, 0)), "origin 5 x -2.5 x 0 mm"),
    "shape": ((12, 10, 5), diagonal(1, 1, 3), "shape 12 x 10 x 5"),
    "orientation": (SHAPE, TURNED, "orientation ARS"),
}
OWN = ("shape 12 x 10 x 4", "voxel size 1 x 1 x 3 mm", "origin 0 x 0 x 0 mm", "orientation RAS")


@pytest.mark.parametrize("what", OTHERS)
def test_evaluate(tmp_path, capsys, what):
    shape, affine, text = OTHERS[what]
    write(tmp_path / "masks/a_mask.nii.gz", blocks(SHAPE, 1).astype(np.uint8))
    write(tmp_path / "references/a.nii.gz", blocks(shape, 1).astype(np.uint8), affine)
    folders = ["--predictions", str(tmp_path / "masks"), "--references", str(tmp_path / "references")]
    assert run(["evaluate", *folders, "--json"]) == 1
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert f"the grids differ in {what}" in case["reason"]
    for part in (*OWN, text):
        assert part in case["reason"]


@pytest.mark.parametrize("what", OTHERS)
def test_a_run(tmp_path, known_weights, monkeypatch, capsys, what):
    shape, affine, text = OTHERS[what]
    write(tmp_path / "nii/Case00.nii.gz", blocks(SHAPE))
    write(tmp_path / "nii/Case00_segmentation.nii.gz", blocks(shape, 1).astype(np.uint8), affine)
    write_site(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert adapt(known_weights(), "--method", "source") == 1
    (case,) = small.record(tmp_path / "out")["cases"]
    assert case["status"] == "unscored"
    assert f"the grids differ in {what}" in case["reason"]
    for part in (*OWN, text):
        assert part in case["reason"]


def test_rounding_noise_is_no_difference(tmp_path):
    write(tmp_path / "masks/a_mask.nii.gz", blocks(SHAPE, 1).astype(np.uint8))
    write(tmp_path / "references/a.nii.gz", blocks(SHAPE, 1).astype(np.uint8), diagonal(1.00001, 1, 3))
    folders = ["--predictions", str(tmp_path / "masks"), "--references", str(tmp_path / "references")]
    assert run(["evaluate", *folders]) == 0
