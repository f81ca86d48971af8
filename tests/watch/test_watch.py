"""A watched folder: every case is done once, as ``adapt`` would, whatever happens meanwhile."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import small_site as small
import yaml
from dicom_files import write_series

from tesla_med.cli.app import run
from tesla_med.review.content import Content

QUICK = ("--once", "--settle", "0")
SETTINGS = (*small.SMALL, *small.FEW, *small.BARE, "report.max_cases_with_overlays=0")


def sets(*texts):
    return [word for text in texts for word in ("--set", text)]


def without_references(folder, count):
    paths = small.make_volumes(folder, count)
    for path in folder.glob("*_segmentation.nii.gz"):
        path.unlink()
    return paths


@pytest.fixture(scope="module")
def made(one_thread, tmp_path_factory):
    """Three images without references, weights, and what ``adapt`` makes of them."""
    folder = tmp_path_factory.mktemp("watch")
    weights = small.train_weights(folder)
    images = without_references(folder / "nii", 3)
    small.run(folder / "nii", weights, folder / "adapted")
    return folder, weights, images


class Place:
    """A folder to be watched, and the command that watches it."""

    def __init__(self, top, weights):
        self.inbox, self.out, self.weights = top / "in", top / "out", weights
        content = small.site().model_dump(mode="json", exclude={"id", "pipeline"}, exclude_defaults=True)
        target = top / "site_configs" / "prostate" / "X.yaml"
        target.parent.mkdir(parents=True)
        target.write_text(yaml.safe_dump(content), encoding="utf-8")
        self.inbox.mkdir()

    def words(self, *more):
        words = ["watch", "in", "--site", "X", "--weights", str(self.weights), "--device", "cpu"]
        return [*words, "--out", "out", *sets(*SETTINGS), *more]

    def __call__(self, *more):
        return run(self.words(*QUICK, *more))

    def plain(self, *more):
        """Watch with the source model alone, where only the comings and goings matter."""
        return self("--method", "source", *more)

    def times(self):
        return {path: path.stat().st_mtime_ns for path in self.out.rglob("*_mask.nii.gz")}

    def masks(self):
        """Return the masks of all cases by the names that one run on all would give them."""
        parts = ("masks", "source_masks")
        found = [(part, path) for part in parts for path in self.out.rglob(f"{part}/*_mask.nii.gz")]
        return {f"{part}/{path.name}": path.read_bytes() for part, path in found}

    def history(self):
        return (self.out / "history.csv").read_text(encoding="utf-8").splitlines()[1:]

    def page(self):
        return (self.out / "watch.html").read_text(encoding="utf-8")


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path, made[1])


def adapted(out):
    return {name: data for name, data in small.masks(out).items() if name.endswith(".nii.gz")}


def test_every_case_once_as_adapt_does(place, made, capsys):
    folder, _, images = made
    shutil.copy(images[2], place.inbox)
    assert place() == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("Case02: adapted, ")
    before = place.times()
    assert len(before) == 2
    for path in images[:2]:
        shutil.copy(path, place.inbox)
    assert place("--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert ([item["case"] for item in told["done"]], told["in_all"]) == (["Case00", "Case01"], 3)
    assert place.masks() == adapted(folder / "adapted")
    assert {path: when for path, when in place.times().items() if path in before} == before
    for part in ("checkpoints/Case00.safetensors", "masks/labels.json"):
        ours = place.out / "cases" / "Case00" / part
        assert ours.read_bytes() == (folder / "adapted" / part).read_bytes()
    assert small.record(place.out / "cases" / "Case00")["complete"]
    assert [line.split(",")[:2] for line in place.history()] == [
        ["0", "Case02"],
        ["1", "Case00"],
        ["2", "Case01"],
    ]
    assert 'href="cases/Case01/report/report.html"' not in place.page()  # BARE has no page of a case
    assert "3 adapted" in place.page()
    assert list((place.out / "tensorboard").glob("events.out.tfevents.*"))
    listed = Content(place.out, place.inbox, "ann").listed()["cases"]
    assert sorted(item["title"] for item in listed) == [f"cases/Case0{i}: Case0{i}" for i in range(3)]


def test_images_in_the_folder_of_the_site_are_done(place, made):
    (place.inbox / "X").mkdir()
    shutil.copy(made[2][0], place.inbox / "X")
    assert place.plain() == 0
    assert len(place.history()) == 1
    assert len(place.times()) == 2


def test_the_folder_that_is_looked_through_stays_the_same(place, made, capsys):
    images = made[2]
    assert place.plain() == 0  # empty, as where a share is mounted later: nothing is settled
    assert "where" not in json.loads((place.out / "watch.json").read_text(encoding="utf-8"))
    shutil.copy(images[0], place.inbox)
    assert place.plain() == 0
    (place.inbox / "X").mkdir()
    shutil.copy(images[1], place.inbox)
    shutil.copy(images[2], place.inbox / "X")
    assert place.plain() == 0
    assert [line.split(",")[1] for line in place.history()] == ["Case00", "Case01", "X/Case02"]
    assert "Not looked at" not in capsys.readouterr().out


def test_what_lies_beside_the_folder_of_the_site_is_named(place, made, capsys):
    (place.inbox / "X").mkdir()
    shutil.copy(made[2][0], place.inbox)
    assert place.plain() == 0
    said = f"Not looked at, as {Path('in', 'X')} is the folder of the site: Case00.nii.gz beside it"
    assert said in capsys.readouterr().out
    assert "beside X, the folder of the site" in place.page()
    assert not place.history()
    (place.inbox / "X").rmdir()
    assert place.plain() == 1
    assert f"{Path('in', 'X')}: no such folder any more" in capsys.readouterr().out
    assert not place.history()


def test_a_mask_by_its_name_waits_for_its_image(place, made, capsys):
    words = place.words(*QUICK, "--method", "source")
    words = [word for word in words if word not in ("--site", "X")]
    mask = place.inbox / "Case00_segmentation.nii.gz"
    shutil.copy(made[2][0], mask)
    assert run(words) == 0
    assert "Named as masks, waiting for their images: Case00_segmentation; " in capsys.readouterr().out
    assert "Waits for its image, as it is named as a mask" in place.page()
    assert not place.history()
    shutil.copy(made[2][0], place.inbox)
    assert run([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["without_image"] == []
    assert [line.split(",")[1] for line in place.history()] == ["Case00"]
    mask.rename(place.inbox / "Case07_segmentation.nii.gz")
    assert place.plain("--out", "other", *sets("site.files.image='*'", "site.files.masks=[]")) == 0
    assert "waiting for their images: Case07_segmentation" in capsys.readouterr().out


def test_a_report_that_cannot_be_made_is_named(place, made, monkeypatch, capsys):
    from tesla_med.reports.table import TableReport

    def broken(self, results):
        raise OSError("no space")

    shutil.copy(made[2][0], place.inbox)
    with monkeypatch.context() as patch:
        patch.setattr(TableReport, "finish", broken)
        assert place.plain("--json") == 1
        reason = "unexpected OSError: no space"
        assert json.loads(capsys.readouterr().out)["reports_failed"] == {"Case00": {"table": reason}}
        (place.out / ".done" / "Case00.json").unlink()
        assert place.plain() == 1
    said = capsys.readouterr().out
    assert f"Case00: report table not made: {reason}; the mask is complete; " in said
    assert f"once {Path('out', '.done', 'Case00.json')} is removed, it is made again" in said
    assert len(place.history()) == 1
    (place.out / ".done" / "Case00.json").unlink()
    before = place.times()
    assert place.plain() == 0
    assert (place.out / "cases/Case00/report/metrics.csv").is_file()
    assert place.times() == before


def test_a_broken_file_is_set_aside_and_tried_again_when_it_changes(place, made, capsys):
    images = made[2]
    shutil.copy(images[0], place.inbox)
    whole = images[1].read_bytes()
    late = place.inbox / images[1].name
    late.write_bytes(whole[: len(whole) // 2])
    assert place.plain() == 1
    said = capsys.readouterr().out
    assert "Set aside: Case01: " in said
    assert "truncated or corrupt" in said
    assert "truncated or corrupt" in place.page()
    assert [line.split(",")[1] for line in place.history()] == ["Case00"]
    assert not (place.out / "cases" / "Case01").exists()
    late.write_bytes(whole)
    assert place.plain() == 0
    assert [line.split(",")[1] for line in place.history()] == ["Case00", "Case01"]
    assert "truncated or corrupt" not in place.page()


def test_what_is_still_being_copied_is_waited_for(place, made, capsys):
    image = made[2][0]
    shutil.copy(image, place.inbox)
    late = place.inbox / made[2][1].name
    stop = threading.Event()

    def copy():
        with late.open("wb") as stream:
            while not stop.wait(0.02):
                stream.write(b"\0")
                stream.flush()

    writer = threading.Thread(target=copy)
    writer.start()
    try:
        assert run(place.words("--once", "--settle", "0.4", "--method", "source")) == 0
    finally:
        stop.set()
        writer.join()
    assert "Not settled yet: Case01" in capsys.readouterr().out
    assert [line.split(",")[1] for line in place.history()] == ["Case00"]
    shutil.copy(made[2][1], late)
    assert place.plain() == 0
    assert len(place.history()) == 2


def test_another_image_under_the_name_of_a_done_case_is_named_and_not_done(place, made, capsys):
    images = made[2]
    path = Path(shutil.copy(images[0], place.inbox))
    assert place.plain() == 0
    before = place.times()
    os.utime(path, (1, 1))  # the same content, copied again
    assert place.plain() == 0
    assert "changed" not in capsys.readouterr().out
    shutil.copy(images[1], path)
    assert place.plain() == 0
    assert "Case00: has changed since it was done" in capsys.readouterr().out
    assert "Give a new image a new name" in place.page()
    shutil.copy(images[0], path)  # put back, its time with it
    os.utime(path, (1, 1))
    assert place.plain() == 0
    assert "Give a new image a new name" not in place.page()
    shutil.copy(images[1], path)
    assert place.plain() == 0
    path.unlink()
    assert place.plain() == 0
    assert "Give a new image a new name" not in place.page()
    assert place.times() == before
    assert len(place.history()) == 1


def test_what_cannot_be_one_case_does_not_stop_the_others(place, made, capsys):
    images = made[2]
    for name in ("Case01.nii.gz", "Case02.nii.gz"):
        shutil.copy(images[0], place.inbox / name)
    shutil.copy(images[0], place.inbox / "Case01.nii")
    assert place.plain() == 1
    assert "images whose results would share a name" in capsys.readouterr().out
    assert [line.split(",")[1] for line in place.history()] == ["Case02"]


def test_nothing_there_yet_is_no_error_but_no_folder_is(place, capsys):
    assert place.plain() == 0
    assert "0 cases done now, 0 in all" in capsys.readouterr().out
    assert "none yet" in place.page()
    place.inbox.rmdir()
    assert place.plain() == 2
    assert "no such folder; create or mount it" in capsys.readouterr().err


def test_a_folder_that_cannot_be_looked_through_is_an_error_of_one_look(place, capsys):
    for name in ("X", "Nowhere"):
        (place.inbox / name).mkdir()
    assert place.plain() == 1
    said = capsys.readouterr().out
    assert "Cannot look: in: Nowhere and X are both named after this site" in said
    assert "trying again" not in said
    assert place.plain("--json") == 1
    assert "both named after this site" in json.loads(capsys.readouterr().out)["problem"]
    (place.inbox / "Nowhere").rmdir()
    assert place.plain("--json") == 0
    assert json.loads(capsys.readouterr().out)["problem"] is None


def test_other_settings_and_other_folders_are_refused(place, made, capsys):
    assert place.plain() == 0
    assert place.plain("--seed", "1") == 2
    assert "settings differ (seed: 0 then, 1 now)" in " ".join(capsys.readouterr().err.split())
    shutil.rmtree(place.out)
    place.out.mkdir()
    (place.out / "thesis.tex").write_text("words", encoding="utf-8")
    assert place.plain() == 2
    assert "holds files that are not of tesla-med watch (thesis.tex)" in capsys.readouterr().err
    assert place.plain("--window", "3") == 2
    assert "--window 3" in capsys.readouterr().err


def test_a_dicom_series_is_done_when_all_of_it_is_there(place, made, capsys):
    array = np.random.default_rng(0).integers(0, 900, (32, 32, 4)).astype(np.uint16)
    series = place.inbox / "P1" / "t2"
    paths = write_series(series, array, NumberOfSeriesRelatedInstances=4)
    kept = {path: path.read_bytes() for path in (paths[1], paths[3])}
    paths[1].unlink()
    assert place.plain() == 1
    assert "3 of the 4 slices of the series" in capsys.readouterr().out
    paths[1].write_bytes(kept[paths[1]])
    paths[3].unlink()  # the last slice leaves no gap
    assert place.plain() == 1
    assert "3 of the 4 slices of the series" in capsys.readouterr().out
    paths[3].write_bytes(kept[paths[3]])
    assert place.plain() == 0
    assert [line.split(",")[1] for line in place.history()] == ["P1/t2"]
    assert (place.out / "cases/P1/t2/masks/P1/t2_mask.nii.gz").is_file()


def test_series_beside_each_other_are_set_aside_by_patient(place, capsys):
    array = np.random.default_rng(0).integers(0, 900, (32, 32, 4)).astype(np.uint16)

    def copy(patient, kind, number):
        about = {"SeriesDescription": kind, "PatientID": patient, "StudyInstanceUID": f"1.2.{ord(patient)}"}
        write_series(place.inbox / f"{patient}{kind}", array, number=number, **about)

    copy("P", "t2", 1)
    assert place.plain() == 0
    copy("P", "xdc", 2)
    for number, kind in enumerate(("adc", "t2")):
        copy("Q", kind, number)
    assert place.plain() == 1
    said = capsys.readouterr().out
    for name, other in (("Pt2", "Pxdc"), ("Qadc", "Qt2")):
        start = f"Set aside: {name}: {Path('in', name)} and {Path('in', other)}: several series: "
        assert start in said
    assert "'t2' (number 1, 32 x 32 x 4 voxels, axial), 'xdc' (number 2, " in said
    assert "has changed" not in said
    assert "share a name" not in said
    shutil.rmtree(place.inbox / "Pxdc")
    shutil.rmtree(place.inbox / "Qadc")
    assert place.plain() == 0
    assert [line.split(",")[1] for line in place.history()] == ["Pt2", "Qt2"]


def test_a_termination_ends_it_cleanly(place, made, capsys):
    shutil.copy(made[2][0], place.inbox)

    def end():
        until = time.monotonic() + 60
        while not (place.out / ".done" / "Case00.json").is_file() and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    before = signal.getsignal(signal.SIGTERM)
    words = ("--settle", "0", "--poll", "0.05", "--method", "source")
    assert run(place.words(*words)) == 0
    assert "Stopped: 1 case done now" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is before
    assert "1 case done" in place.page()
    assert place.plain() == 0  # the lock is gone
    assert len(place.history()) == 1


def killed_at(place, number):
    """Watch in a process of its own, killed when the given file gets its name; return whether it was."""

    def renamed(event, arguments):
        nonlocal number
        if event == "os.rename":
            number -= 1
            if number == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        code = 70
        try:
            sys.addaudithook(renamed)
            code = place.plain("--quiet")
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


@pytest.mark.slow
def test_a_kill_at_every_file_that_gets_its_name(place, made):
    images = made[2]
    for path in images[:2]:
        shutil.copy(path, place.inbox)
    number = 1
    while killed_at(place, number):
        number += 1
    assert number > 10
    assert [line.split(",")[:2] for line in place.history()] == [["0", "Case00"], ["1", "Case01"]]
    assert not list(place.out.rglob(".tmp-*"))
    killed = place.masks()
    for name in ("out", "in"):
        Path(name).rename(f"{name}-killed")
    place.inbox.mkdir()
    for path in images[:2]:
        shutil.copy(path, place.inbox)
    assert place.plain() == 0
    assert place.masks() == killed
    assert len(killed) == 4


@pytest.mark.slow
def test_twenty_cases_in_any_order_with_two_kills(made, tmp_path, monkeypatch):
    """Two files are copied slowly, one is broken, and the process is killed twice."""
    monkeypatch.chdir(tmp_path)
    place = Place(tmp_path, made[1])
    images = without_references(tmp_path / "nii", 20)
    small.run(tmp_path / "nii", made[1], tmp_path / "adapted")
    order = random.Random(3).sample(range(20), 20)
    command = [sys.executable, "-m", "tesla_med", *place.words("--settle", "0.5", "--poll", "0.1")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}

    def start():
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)  # noqa: S603

    def until(count):
        limit = time.monotonic() + 240
        while len(list((place.out / ".done").glob("[!.]*.json"))) < count:
            assert time.monotonic() < limit
            assert watch.poll() is None
            time.sleep(0.02)

    half = [order[4], order[11]]
    (place.inbox / "Case99.nii.gz").write_bytes(b"no image at all")
    watch = start()
    for number, index in enumerate(order):
        target = place.inbox / images[index].name
        data = images[index].read_bytes()
        target.write_bytes(data[: len(data) // 2] if index in half else data)
        if number in (7, 14):
            until(number - 4)
            watch.send_signal(signal.SIGKILL)
            assert watch.wait() == -signal.SIGKILL
            first = place.times()
            watch = start()
    until(18)
    assert {path: when for path, when in place.times().items() if path in first} == first
    for index in half:
        (place.inbox / images[index].name).write_bytes(images[index].read_bytes())
    until(20)
    watch.send_signal(signal.SIGTERM)
    said = watch.communicate()[0]
    assert watch.returncode == 0
    assert "Stopped: " in said
    assert "Set aside: Case99: " in said
    assert place.masks() == adapted(tmp_path / "adapted")
    assert len(place.masks()) == 40
    assert sorted(line.split(",")[1] for line in place.history()) == [
        f"Case{index:02d}" for index in range(20)
    ]
    assert [line.split(",")[0] for line in place.history()] == [str(index) for index in range(20)]
    assert not list(place.out.rglob(".tmp-*"))


@pytest.mark.slow
def test_the_guard_judges_every_case_as_in_adapt(place, made, tmp_path):
    _, weights, images = made
    guarded = ["guard.enabled=true", "report.max_cases_with_overlays=1", "reports=[table,quality,html]"]
    for path in images[:2]:
        shutil.copy(path, place.inbox)
    assert place(*sets(*guarded), "--save-uncertainty") == 0
    small.run(place.inbox, weights, tmp_path / "adapted", overrides=guarded, save_uncertainty=True)
    assert place.masks() == adapted(tmp_path / "adapted")
    cases = small.record(tmp_path / "adapted")["cases"]
    rows = list(csv.DictReader((place.out / "history.csv").read_text(encoding="utf-8").splitlines()))
    for row, case in zip(rows, cases, strict=True):
        assert (row["case"], row["used"], row["reason"]) == (case["case"], case["used"], case["reason"])
        assert 0 < float(row["predicted_dice"]) < 1
        assert f'href="cases/{case["case"]}/report/report.html"' in place.page()
    assert "predicted Dice of 2 cases, from 0 to 1" in place.page()
