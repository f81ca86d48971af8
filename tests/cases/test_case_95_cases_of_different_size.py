"""Cases of different in-plane size are adapted to together: no batch joins two shapes; a dry run agrees."""

import json

import nibabel as nib
import pytest
import small_site as small
from lines import run, sets, write_site

CASE = 95
SETTINGS = sets(*(*small.SMALL, *small.FEW, *small.BARE, "preprocessing.size=null"))


@pytest.fixture
def words(small_weights, tmp_path):
    """Return a call with three cases: 32x32, 48x48 and again 32x32."""
    made = []
    for index, matrix in enumerate((32, 48, 32)):
        folder = tmp_path / f"made{index}"
        made += small.make_volumes(folder, 1, seed=index, matrix=matrix)
    (tmp_path / "nii").mkdir()
    for index, image in enumerate(made):
        for path in image.parent.iterdir():
            path.rename(tmp_path / "nii" / path.name.replace("Case00", f"Case0{index}"))
    site = write_site(tmp_path)
    given = ["--site", str(site), "--volumes", str(tmp_path / "nii"), "--weights", str(small_weights)]
    return ["adapt", *given, "--out", str(tmp_path / "out"), "--device", "cpu", *SETTINGS]


@pytest.mark.parametrize("protocol", ["N-M", pytest.param("N-O", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "method",
    ["tesla", "tent", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cotta", "shot", "bn"))],
)
def test_every_case_gets_its_mask(method, protocol, words, tmp_path):
    given = [*words, "--method", method, "--protocol", protocol]
    assert run([*given, "--dry-run"]) == 0
    assert not (tmp_path / "out").exists()
    assert run(given) == 0
    for index, side in enumerate((32, 48, 32)):
        mask = nib.load(next((tmp_path / "out/masks").glob(f"Case0{index}*")))
        assert mask.shape[:2] == (side, side)
    record = json.loads((tmp_path / "out/run.json").read_text())
    assert [case["status"] for case in record["cases"]].count("failed") == 0
