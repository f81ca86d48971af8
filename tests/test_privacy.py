"""Names of cases and what DICOM headers say are in no byte of what an anonymised run writes."""

from __future__ import annotations

import csv
import gzip
import stat
import zipfile

import nibabel as nib
import numpy as np
import pytest
import small_site as small
from dicom_files import write_series

from tesla_med.actions.evaluate import evaluate
from tesla_med.actions.export import export
from tesla_med.actions.rollback import rollback
from tesla_med.demo.volumes import make_case
from tesla_med.errors import ConfigError, DataError, OutputError
from tesla_med.exports.base import EXPORTS
from tesla_med.io.files import sha256
from tesla_med.io.pseudonyms import KeyFile, Renamer, default_key
from tesla_med.review.content import Content

pytestmark = pytest.mark.usefixtures("one_thread")
PATIENTS = ("Quimby_Zelda", "Wiggum_Ralph")
REPORTS = ("reports=[table,calibration,quality,tensorboard,html]", "guard.enabled=true")
UIDS = ("SOPInstanceUID", "SeriesInstanceUID", "StudyInstanceUID", "FrameOfReferenceUID")


@pytest.fixture(scope="module")
def made(one_thread, tmp_path_factory):
    """Two DICOM series that name their patients, and a third that cannot be read."""
    import pydicom

    folder = tmp_path_factory.mktemp("privacy")
    secrets = {*PATIENTS, "Quimby", "Zelda", "Wiggum", "Ralph", "Skinner", "identifier-4711", "secret words"}
    secrets |= {"19660606"}
    for seed, name in enumerate((*PATIENTS, "Skinner_Seymour")):
        image, _, _ = make_case("prostate", small.settings(), np.random.default_rng(seed))
        array = np.asarray(image, np.int16)
        places = [0.0, 3.0, 6.0, 30.0] if name.startswith("Skinner") else None
        family, given = name.split("_")
        about = {"PatientName": f"{family}^{given}", "PatientBirthDate": "19660606", "places": places}
        about |= {"FrameOfReferenceUID": pydicom.uid.generate_uid(entropy_srcs=["frame", name])}
        paths = write_series(folder / "dicom" / name, array, **about)
        for path in paths:
            item = pydicom.dcmread(path)
            secrets |= {str(item[key].value) for key in UIDS if key in item}
    return folder, small.train_weights(folder), secrets


def site():
    from tesla_med.config.models import Files

    return small.site(files=Files(image=("*",), masks=()))


def run(made, out, **options):
    folder, weights, _ = made
    options = {"anonymise": True, "reports": REPORTS} | options
    if options["anonymise"]:
        options.setdefault("key", out.parent / "key.csv")
    return small.run(folder / "dicom", weights, out, site=site(), **options)


def every_byte(folder):
    """Yield what a file is called and all that it holds, unpacked too."""
    for name, content in small.files_below(folder).items():
        yield name, name.encode() + content
        if content[:2] == b"\x1f\x8b":
            yield name, gzip.decompress(content)
        if name.endswith(".zip"):
            with zipfile.ZipFile(folder / name) as archive:
                for item in archive.namelist():
                    inner = archive.read(item)
                    yield f"{name}/{item}", item.encode() + inner
                    if inner[:2] == b"\x1f\x8b":
                        yield f"{name}/{item}", gzip.decompress(inner)
        if name.endswith(".nrrd"):
            head, _, body = content.partition(b"\n\n")
            yield name, head + gzip.decompress(body)
        if name.endswith(".png"):
            from PIL import Image

            yield name, repr(Image.open(folder / name).info).encode()


def found_in(folder, secrets, *, but=()):
    return [
        (name, secret)
        for name, content in every_byte(folder)
        for secret in secrets
        if secret.lower().encode() in content.lower() and name not in but
    ]


def test_nothing_that_is_written_names_a_patient(made, tmp_path):
    folder, _, secrets = made
    out, key = tmp_path / "run" / "out", tmp_path / "key.csv"
    result = run(made, out, key=key, save_probs=True, save_uncertainty=True)
    assert sorted(item.status for item in result.results) == ["failed", "ok", "ok"]
    reason = next(item.reason for item in result.results if item.status == "failed")
    assert "slices missing" in reason
    content = Content(out, folder / "dicom", "Dr Hibbert", key)
    assert len(content.entries) == 2
    assert content.volume(0, "image")[:4] == (348).to_bytes(4, "little")
    content.decide(0, "accept", "good", sha256(content.entries[0].mask))
    made_by = {}
    for form in EXPORTS.names():
        more = {"dicom": folder / "dicom", "key": key} if EXPORTS.get(form).needs_series else {}
        made_by[form] = export(out, form, **more)
    assert set(made_by) == {"dicom-seg", "itksnap", "slicer", "zip"}
    assert all(len(item.cases) == 2 for item in made_by.values())
    assert made_by["dicom-seg"].unverified == ()  # found by the key, and the same bytes
    rollback(out, cases=[result.results[0].case])
    texts = "".join(str(path) for path in out.rglob("*"))
    assert {"tensorboard", "report", "export", "review.csv", "run.json"} <= {
        path.name for path in out.iterdir()
    }
    assert not any(secret.lower() in texts.lower() for secret in secrets)
    assert found_in(tmp_path / "run", secrets) == []
    assert found_in(tmp_path, {"Quimby_Zelda"}) == [
        ("key.csv", "Quimby_Zelda")
    ]  # what is sought can be found
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


@pytest.mark.slow
def test_the_same_run_without_the_option_does_name_them(made, tmp_path):
    run(made, tmp_path / "run", anonymise=False)
    assert found_in(tmp_path / "run", {"Quimby_Zelda"})


@pytest.mark.slow
def test_a_segmentation_has_identifiers_of_its_own_that_stay(made, tmp_path):
    import pydicom

    folder, _, _ = made
    key = tmp_path / "key.csv"
    run(made, tmp_path / "plain", anonymise=False, reports=small.BARE)
    more = {"dicom": folder / "dicom", "anonymise": True, "key": key}
    first, again = (export(tmp_path / "plain", "dicom-seg", out=tmp_path / name, **more) for name in "ab")
    names = {item.name for item in first.files}
    assert names == {item.name for item in again.files}
    for name in names:
        one, two = (pydicom.dcmread(where / name) for where in (tmp_path / "a", tmp_path / "b"))
        assert one.PatientID == str(one.PatientName) == name.removesuffix("_seg.dcm")
        assert one.PatientBirthDate == ""
        for keyword in ("StudyInstanceUID", "FrameOfReferenceUID", "SOPInstanceUID"):
            assert one[keyword].value == two[keyword].value
    assert found_in(tmp_path / "a", made[2]) == []


@pytest.mark.slow
def test_a_case_keeps_its_pseudonym(made, tmp_path):
    key = tmp_path / "key.csv"
    first = run(made, tmp_path / "one", reports=small.BARE)
    with key.open(encoding="utf-8", newline="") as stream:
        rows = {row["case"]: row["pseudonym"] for row in csv.DictReader(stream)}
    assert set(rows) == {*PATIENTS, "Skinner_Seymour"}
    assert (
        sorted(rows.values())
        == ["case-0001", "case-0002", "case-0003"]
        == [item.case for item in first.results]
    )
    assert small.record(tmp_path / "one")["settings"]["anonymised"] is True
    plain = run(made, tmp_path / "plain", anonymise=False, reports=small.BARE)
    by_name = {rows[item.case]: item for item in plain.results}
    for item in first.results:  # under reset case a result does not depend on the order
        assert item.input_sha256 == by_name[item.case].input_sha256
    masks = small.masks(tmp_path / "plain")
    for name, content in small.masks(tmp_path / "one").items():
        part, _, stem = name.partition("/")
        if stem == "labels.json":
            continue
        own = next(case for case, pseudonym in rows.items() if stem.startswith(pseudonym))
        assert content == masks[f"{part}/{own}_mask.nii.gz"]
    before = key.read_bytes()
    export(tmp_path / "plain", "zip", out=tmp_path / "zip", anonymise=True, key=key)
    assert key.read_bytes() == before
    with zipfile.ZipFile(tmp_path / "zip" / "masks.zip") as archive:
        names = {item for item in archive.namelist() if item.startswith("masks/")}
    assert names == {f"masks/{rows[name]}_mask.nii.gz" for name in PATIENTS}
    assert run(made, tmp_path / "one", reports=small.BARE, resume=True).results[0].case == "case-0001"
    with pytest.raises(OutputError, match=r"settings differ .*anonymised"):
        run(made, tmp_path / "one", reports=small.BARE, anonymise=False, resume=True)


@pytest.mark.slow
def test_scores_of_a_run_that_was_anonymised(made, tmp_path):
    """References keep their names; the key joins them, and nothing of it is written."""
    weights = made[1]
    small.make_volumes(tmp_path / "nii", 2, names=["Quimby_Zelda", "Wiggum_Ralph"])
    own = small.site(
        files={"image": ["*_*.nii.gz"], "masks": [{"pattern": "*_segmentation.nii.gz", "write": 1}]}
    )
    key, out = tmp_path / "key.csv", tmp_path / "out"
    result = small.run(tmp_path / "nii", weights, out, site=own, anonymise=True, key=key, reports=REPORTS)
    assert result.mean is not None
    assert found_in(out, PATIENTS) == []
    references = tmp_path / "nii"
    found = evaluate(out, references, out=tmp_path / "scores", anonymise=True, key=key)
    assert [item.case for item in found.cases] == ["case-0001", "case-0002"]
    dice = {item.case: item.scores[0].dice for item in found.cases}
    assert dice == pytest.approx({item.case: item.mean_dice for item in result.results})
    assert found_in(tmp_path / "scores", PATIENTS) == []
    broken = next(references.glob("Quimby*_segmentation.nii.gz"))
    small.copy_image(broken, broken, shift_mm=50.0, dtype=np.uint8)
    found = evaluate(out, references, out=tmp_path / "more", anonymise=True, key=key)
    assert len(found.unscored) == 1
    assert found_in(tmp_path / "more", PATIENTS) == []


@pytest.mark.slow
def test_corrections_go_with_pseudonyms(made, tmp_path):
    _, weights, _ = made
    small.make_volumes(tmp_path / "nii", 3)
    image = nib.load(tmp_path / "nii" / "Case02_segmentation.nii.gz")
    (tmp_path / "fixed").mkdir()
    nib.save(image, tmp_path / "fixed" / "Case02_mask.nii.gz")
    key, out = tmp_path / "key.csv", tmp_path / "out"
    options = {"corrections": tmp_path / "fixed", "overrides": ("corrections.first_updates=1",)}
    result = small.run(tmp_path / "nii", weights, out, anonymise=True, key=key, reports=REPORTS, **options)
    pseudonym = KeyFile(key).find("X", "Case02").pseudonym
    assert [item.case for item in result.results if item.status == "corrected"] == [pseudonym]
    assert set(small.record(out)["corrections"]) == {pseudonym}
    assert found_in(out, {"Case00", "Case01", "Case02"}) == []


# ------------------------------------------------------------ the key file


def test_a_key_file_grows_and_is_its_owner_s(tmp_path):
    path = tmp_path / "new" / "key.csv"
    key = KeyFile(path)
    first = key.assign("A", ["x", "y"])
    assert not path.exists()  # a preview writes nothing
    key.save()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    again = KeyFile(path)
    assert again.assign("A", ["y", "x"]) == {"y": first["y"], "x": first["x"]}
    other = again.assign("B", ["x"])["x"]
    assert other.pseudonym == "case-0003"
    again.save()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert KeyFile(path).find("B", "x") == other
    with pytest.raises(DataError, match="several sites"):
        KeyFile(path).find("", "x")


def test_a_case_keeps_its_pseudonym_once_its_site_is_known(tmp_path):
    path = tmp_path / "key.csv"
    key = KeyFile(path)
    first = key.assign("", ["x", "y"])  # as evaluate of a folder of masks does
    key.save()
    key = KeyFile(path)
    assert key.find("A", "x") == first["x"]
    assert key.assign("A", ["x"])["x"].pseudonym == first["x"].pseudonym
    key.save()
    key = KeyFile(path)
    assert [item.site for item in key.entries] == ["A" if item.case == "x" else "" for item in key.entries]
    assert key.find("", "x").pseudonym == key.find("A", "x").pseudonym == first["x"].pseudonym
    assert key.assign("B", ["x"])["x"].pseudonym not in {item.pseudonym for item in first.values()}
    assert key.assign("A", ["x"])["x"].secret == first["x"].secret


def test_no_pseudonym_is_the_name_of_another_case(tmp_path):
    key = KeyFile(tmp_path / "key.csv")
    found = key.assign("A", ["case-0001", "case-0003", "z"])
    assert not {item.pseudonym for item in found.values()} & {"case-0001", "case-0003"}
    assert len({item.pseudonym for item in found.values()}) == 3


def test_pseudonyms_do_not_follow_the_order_of_names():
    orders = set()
    for _ in range(40):
        key = KeyFile.__new__(KeyFile)
        key.entries, key._new, key._settled = [], [], {}
        found = key.assign("A", ["a", "b", "c"])
        orders.add(tuple(found[name].pseudonym for name in "abc"))
    assert len(orders) > 2


def test_two_commands_that_deal_out_the_same_pseudonym_are_told(tmp_path):
    path = tmp_path / "key.csv"
    one, two = KeyFile(path), KeyFile(path)
    one.assign("A", ["x"])
    two.assign("A", ["y"])
    one.save()
    before = path.read_bytes()
    with pytest.raises(OutputError, match="run this one again"):
        two.save()
    assert path.read_bytes() == before


def test_a_key_file_must_be_apart_and_readable(made, tmp_path):
    with pytest.raises(ConfigError, match="handed on"):
        run(made, tmp_path / "out", key=tmp_path / "out" / "key.csv")
    assert not (tmp_path / "out").exists()
    (tmp_path / "key.csv").write_text("something,else\n1,2\n", encoding="utf-8")
    with pytest.raises(DataError, match="cannot be read as a key file"):
        run(made, tmp_path / "out", key=tmp_path / "key.csv")
    assert not (tmp_path / "out").exists()


def test_the_key_of_a_user(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_key() == tmp_path / ".tesla-med" / "pseudonyms.csv"


def test_numbers_in_a_text_are_no_names(tmp_path):
    names = ["1", "2", "12", "p/Ann", "p/Bob", "Case07"]
    renamer = Renamer(KeyFile(tmp_path / "key.csv"), names, [tmp_path])
    text = "1: shape 16 x 2.50 mm, 0.12 and 12; parts of p; p/Ann, Bob.nii.gz, Case07_seg.nii.gz, Case077"
    found = renamer.text(text)
    one, twelve, ann = (renamer.name(name) for name in ("1", "12", "p/Ann"))
    bob, seven = renamer.name("p/Bob"), renamer.name("Case07")
    assert found == (
        f"{one}: shape 16 x 2.50 mm, 0.12 and {twelve}; parts of [withheld]; {ann}, {bob}.nii.gz, "
        f"{seven}_seg.nii.gz, Case077"
    )
