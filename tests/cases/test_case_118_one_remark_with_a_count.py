"""Remarks on many cases that say the same are one line with their number and the worst case, and what is
normal, such as following the card of the weights, is no warning.
"""

import json
import shutil

import pytest
import small_site as small
from lines import adapt, run, write_site

CASE = 118
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def place(tmp_path, small_weights, monkeypatch):
    """Six cases of coarse voxels, one coarser still, and weights of fine ones with their card."""
    small.make_volumes(tmp_path / "nii", 6)
    for number in range(6):
        for path in (tmp_path / "nii").glob(f"Case0{number}*.nii.gz"):
            coarser(path, 40.0 if number == 4 else 20.0 + number)
    write_site(tmp_path)
    for path in small_weights.parent.glob(f"{small_weights.stem}.*"):
        shutil.copy(path, tmp_path / path.name)
    weights = tmp_path / small_weights.name
    card = json.loads(weights.with_suffix(".json").read_text(encoding="utf-8"))
    card["acquisition"] = {"spacing_mm": [[0.1, 9], [0.1, 9], [3, 4]], "field_mm": [[1, 900], [1, 900]]}
    weights.with_suffix(".json").write_text(json.dumps(card), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return weights


def coarser(path, step):
    import nibabel as nib

    image = nib.load(path)
    affine = image.affine.copy()
    affine[:3, 2] *= step / (affine[:3, 2] ** 2).sum() ** 0.5
    nib.save(nib.Nifti1Image(image.get_fdata().astype("int16"), affine), path)


@pytest.mark.parametrize(
    "more", [("--method", "source"), ("--method", "bn", "--protocol", "N-M"), ("--dry-run",)], ids=" ".join
)
def test_one_line_for_all(place, capsys, more):
    assert adapt(place, *more) == 0
    said = capsys.readouterr()
    far = [line for line in (said.out + said.err).splitlines() if "voxel size along the slice axis" in line]
    assert len(far) == 1
    assert "6 cases, the worst is Case04: " in far[0]
    assert "40 mm, far from the 3 to 4 mm" in far[0]
    assert far[0] in said.err


def test_following_the_card_is_no_warning(place, capsys):
    assert adapt(place, "--method", "source", "--set", "preprocessing.orientation=LPS") == 0
    said = capsys.readouterr()
    assert (said.out + said.err).count("--set departs from") == 1
    words = ["adapt", "--site", "prostate/X", "--volumes", "nii", "--weights", str(place), "--out", "new"]
    few = [word for text in ("reports=[table]", "guard.enabled=false") for word in ("--set", text)]
    assert run([*words, "--method", "source", "--device", "cpu", *few]) == 0
    said = capsys.readouterr()
    assert "WARNING" not in said.err
    assert (said.out + said.err).count("taken from the weights' card") == 2  # network and preprocessing
