"""Fill, voxels of one value joined to the border, is found and counted from a stated size on: kept out of the
intensity range, of adaptation, of calibration and of the mask, and said in check, preview and report.
"""

import json
import shutil

import nibabel as nib
import numpy as np
import pytest
import small_site as small
from lines import adapt, run, sets, write_site

CASE = 37
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
SHAPE, COUNT = (64, 64, 8), 8608
ON, OFF = "preprocessing.fill.enabled=true", "preprocessing.fill.enabled=false"


def corners():
    """Return the 1,076 voxels of every slice that are furthest from its centre."""
    i, j = np.ogrid[: SHAPE[0], : SHAPE[1]]
    distance = np.hypot(i - 31.4, j - 31.6)
    outside = distance >= np.sort(distance.ravel())[-COUNT // SHAPE[2]]
    return np.repeat(outside[..., None], SHAPE[2], axis=2)


def write_case(folder, number, *, filled):
    """Write tissue of 100 to 200 with a dark organ of 10 to 40, its mask and, if asked for, corners of 0."""
    generator = np.random.default_rng(number)
    image = generator.integers(100, 201, SHAPE).astype(np.int16)
    i, j = np.ogrid[: SHAPE[0], : SHAPE[1]]
    organ = np.hypot(i - 32, j - 28 - number % 5) < 9
    image[organ] = generator.integers(10, 41, (organ.sum(), SHAPE[2]))
    image[corners() & filled] = 0
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in (("", image), ("_segmentation", np.repeat(organ[..., None], SHAPE[2], axis=2))):
        nib.save(
            nib.Nifti1Image(array.astype(np.int16), np.diag([1.0, 1.0, 3.0, 1.0])),
            folder / f"Case0{number}{name}.nii.gz",
        )


@pytest.fixture(scope="module")
def likes_dark(one_thread, tmp_path_factory):
    """Return weights that take dark pixels for the organ, trained by the command on volumes without fill."""
    folder = tmp_path_factory.mktemp("dark")
    for number in range(3):
        write_case(folder / "nii", number, filled=False)
    few = ("train.steps=40", "train.validate_every=20", "train.batch_size=4", "train.learning_rate=0.01")
    words = ["train", "--pipeline", "prostate", "--sites", str(write_site(folder)), "--device", "cpu"]
    words += ["--volumes", str(folder / "nii"), "--out", str(folder / "out")]
    assert run([*words, *sets(*small.SMALL, *few, "train.augment=none", "train.intensity=null")]) == 0
    return folder / "out/source.safetensors"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """One volume with corners of 0 and one without."""
    for number in (6, 7):
        write_case(tmp_path / "nii", number, filled=number == 6)
    write_site(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def labelled(out, name="Case06"):
    """Return how many voxels of the corners the source mask and the mask of a case label."""
    return [np.count_nonzero(small.labels(out, name, part)[corners()]) for part in ("source_masks", "masks")]


def every_voxel(out):
    """Return how many voxels the calibration of the source model counts outside the region too."""
    content = json.loads((out / "report/calibration.json").read_text(encoding="utf-8"))
    return content["all"]["source"]["all"]["voxels"] if "all" in content else content


@pytest.mark.parametrize(
    "words",
    [("--method", "source"), (), pytest.param(("--protocol", "N-M"), marks=pytest.mark.slow)],
    ids=str,
)
def test_no_corner_is_labelled(place, likes_dark, words):
    assert adapt(likes_dark, *words, "--set", OFF, out="off") == 0
    assert labelled(place / "off")[0] > 0.8 * COUNT  # the problem is there
    assert adapt(likes_dark, *words) == 0
    assert labelled(place / "out") == [0, 0]
    cases = small.record(place / "out")["cases"]
    assert [case["fill_voxels"] for case in cases] == [COUNT, 0]
    organ = small.labels(place / "out", "Case06", "source_masks")
    assert np.count_nonzero(organ) > 1000


def test_it_is_said_in_check_preview_record_and_report(place, likes_dark, capsys):
    told = f"fill: {COUNT} voxels (26.3 %) joined to the border are 0"
    words = ["sites", "check", "site_configs/prostate/X.yaml", "--volumes", "nii"]
    assert run(words) == 0
    assert f"fill: {COUNT}" in " ".join(capsys.readouterr().out.split())
    assert run([*words, "--json"]) == 0
    assert told in capsys.readouterr().out
    assert adapt(likes_dark, "--dry-run") == 0
    assert told in "".join(capsys.readouterr())
    assert adapt(likes_dark, "--method", "source", reports="[table,calibration,html]") == 0
    assert told in "".join(capsys.readouterr())
    assert any(told in note for note in small.record(place / "out")["cases"][0]["notes"])
    assert told in (place / "out/report/report.html").read_text(encoding="utf-8")


def test_it_is_not_calibrated(place, likes_dark):
    for name, setting in (("out", ON), ("off", OFF)):
        assert (
            adapt(likes_dark, "--method", "source", "--set", setting, reports="[calibration]", out=name) == 0
        )
    assert every_voxel(place / "off") - every_voxel(place / "out") == COUNT


def test_whatever_the_value_the_range_is_that_of_the_tissue(place, likes_dark):
    image = nib.load(place / "nii/Case06.nii.gz")
    assert adapt(likes_dark, "--method", "source") == 0
    for value in (-2000, 4095):
        array = np.where(corners(), value, np.asarray(image.dataobj)).astype(np.int16)
        nib.save(nib.Nifti1Image(array, image.affine), place / "nii/Case06.nii.gz")
        assert adapt(likes_dark, "--method", "source", out=f"{value}") == 0
        assert (small.labels(place / f"{value}", "Case06") == small.labels(place / "out", "Case06")).all()


def test_off_where_it_must_be(place, likes_dark, capsys):
    paper = ("--pipeline", "prostate_paper", "--method", "source")
    assert adapt(likes_dark, *paper, out="paper") == 0
    foreign = place / "foreign.safetensors"
    shutil.copy(likes_dark, foreign)  # without its card
    assert adapt(foreign, "--method", "source", out="foreign") == 0
    assert "weights without a card: fill is left alone" in "".join(capsys.readouterr())
    for name in ("paper", "foreign"):
        assert labelled(place / name)[0] > 0.8 * COUNT
        assert small.record(place / name)["cases"][0]["fill_voxels"] == 0
    assert adapt(foreign, "--method", "source", "--set", ON) == 0
    assert labelled(place / "out") == [0, 0]


@pytest.mark.parametrize("words", [(), pytest.param(("--protocol", "N-M"), marks=pytest.mark.slow)], ids=str)
def test_without_fill_and_below_the_size_every_byte_stays(place, likes_dark, words):
    for name in ("nii/Case06.nii.gz", "nii/Case06_segmentation.nii.gz"):
        (place / name).rename(place / name.replace("Case06", "Case05"))
    large = "preprocessing.fill.least_share=0.3"
    assert adapt(likes_dark, *words, "--set", large) == 0
    assert adapt(likes_dark, *words, "--set", OFF, out="off") == 0
    one, two = (small.files_below(place / name / "masks") for name in ("out", "off"))
    assert one == two
    for name in ("checkpoints/adapted.safetensors", "checkpoints/Case07.safetensors"):
        assert (place / "out" / name).is_file() == (place / "off" / name).is_file()
        if (place / "out" / name).is_file():
            assert (place / "out" / name).read_bytes() == (place / "off" / name).read_bytes()
    assert [case["fill_voxels"] for case in small.record(place / "out")["cases"]] == [0, 0]
