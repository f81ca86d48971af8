"""Scans and tiles of one patient stay on one side of a split: a patient is what `site.files.subject` says,
else `sub-`, else a folder of its own, else the case; train.json says by what was split.
"""

import json
import shutil

import pytest
import small_site as small
import tile_site
from lines import run

CASE = 99
SITE = (
    "institution: Nowhere\nfiles: {image: '*_T*.nii.gz', masks: [{pattern: '*_T*_seg.nii.gz', write: 1}]%s}\n"
)
LAYOUTS = {
    "folders": ("P0{0}/P0{0}_T{1}", "", "the folder of each patient"),
    "deeper folders": ("data/P0{0}/visit{1}/s_T1", "", "the folder of each patient"),
    "bids": ("batch{1}/sub-0{0}_T{1}", "", "sub-<id> in the name"),
    "pattern": ("P0{0}_T{1}", ", subject: '*_T?'", "site.files.subject '*_T?'"),
    "pattern of folders": ("centre/P0{0}/a_T{1}", ", subject: 'P*/*'", "site.files.subject 'P*/*'"),
}
PATIENTS = range(1, 7)


def patient(name):
    """Return the number of the patient in a name."""
    return name.partition("0")[2][0]


def train(tmp_path, site, *words):
    (tmp_path / "site_configs/prostate").mkdir(parents=True, exist_ok=True)
    (tmp_path / "site_configs/prostate/X.yaml").write_text(site)
    texts = (*small.SMALL, "train.steps=1", "train.validate_every=1", "train.batch_size=2")
    words = [*words, *(part for text in texts for part in ("--set", text))]
    common = ["--sites", "X", "--volumes", "nii", "--out", "out", "--device", "cpu"]
    assert run(["train", "--pipeline", "prostate", *common, *words]) == 0
    return json.loads((tmp_path / "out/train.json").read_text())


@pytest.fixture
def fill(tmp_path, monkeypatch, one_thread):
    """Write two time points of six patients."""
    monkeypatch.chdir(tmp_path)
    made = small.make_volumes(tmp_path / "made", 1)[0]
    reference = made.with_name(made.name.replace(".nii.gz", "_segmentation.nii.gz"))

    def write(name):
        for number in PATIENTS:
            for time in (1, 2):
                path = tmp_path / "nii" / name.format(number, time)
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(made, f"{path}.nii.gz")
                shutil.copy(reference, f"{path}_seg.nii.gz")

    return write


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_time_points(layout, fill, tmp_path):
    name, subject, by = LAYOUTS[layout]
    fill(name)
    record = train(tmp_path, SITE % subject)
    training, held = (
        {patient(case) for case in record[f"{part}_cases"]} for part in ("training", "validation")
    )
    assert len(held) == 1
    assert len(record["validation_cases"]) == 2
    assert len(training) == 5
    assert record.get("split_by") == {"X": by}


def test_a_flat_folder(fill, tmp_path):
    fill("P0{0}_T{1}")
    record = train(tmp_path, SITE % "")
    assert record.get("split_by") == {"X": "the case"}
    assert len(record["validation_cases"]) == 2


@pytest.mark.parametrize(("folder", "held"), [("P07", 0), ("all/P07", 0), ("imagesTr", 2)])
def test_everything_in_one_folder(folder, held, fill, tmp_path):
    """That of a single patient, who is not split, or of all of them, whose cases are."""
    fill(folder + "/S0{0}_T{1}")
    record = train(tmp_path, SITE % "")
    assert record.get("split_by") == {"X": "the case" if held else "the folder of each patient"}
    assert len(record["validation_cases"]) == held


def test_a_name_without_a_subject_is_named(fill, tmp_path, capsys):
    fill("P0{0}_T{1}")
    (tmp_path / "site_configs/prostate").mkdir(parents=True)
    (tmp_path / "site_configs/prostate/X.yaml").write_text(SITE % ", subject: 'Q*_T?'")
    words = ["--pipeline", "prostate", "--sites", "X", "--volumes", "nii", "--out", "out", "--device", "cpu"]
    assert run(["train", *words]) == 2
    assert "P01_T1: does not match site.files.subject" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["folders", "one folder", "pattern", "flat"])
def test_tiles(kind, tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)
    for path in tile_site.make_tiles(tmp_path / "made", 10):
        number = int(path.stem) // 2
        own = f"P0{number}_{path.name}"
        own = {"folders": f"P0{number}/{path.name}", "one folder": f"P07/{own}"}.get(kind, own)
        target = tmp_path / "tiles" / path.parent.name / own
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target)
    subject = {"pattern": "files: {subject: '*_?'}\n"}.get(kind, "")
    (tmp_path / "site_configs/kather").mkdir(parents=True)
    text = f"institution: Nowhere\ntiles: {json.dumps(tile_site.FOLDERS)}\n{subject}"
    (tmp_path / "site_configs/kather/X.yaml").write_text(text)
    sets = [part for text in (*tile_site.SMALL, "train.steps=1") for part in ("--set", text)]
    words = ["--sites", "X", "--volumes", "tiles", "--out", "out", "--device", "cpu"]
    assert run(["train", "--pipeline", "kather", *words, *sets]) == 0
    record = json.loads((tmp_path / "out/train.json").read_text())
    training, held = (
        {patient(name) for name in record[f"{part}_cases"]} for part in ("training", "validation")
    )
    assert len(record["training_cases"]) + len(record["validation_cases"]) == 40
    by = {"pattern": "site.files.subject '*_?'", "flat": "the tile"}
    assert record.get("split_by") == {"X": by.get(kind, "the folder of each patient")}
    if kind == "one folder":
        assert not held
    elif kind != "flat":
        assert len(held) == 1
        assert not training & held
