"""The command line, in-process: exit codes, what is said where, JSON, help."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
import small_site as small
from nnunet_folder import make_folder

from tesla_med import __version__
from tesla_med.cli.app import app, run
from tesla_med.io.volumes import read_volume, save_image
from tesla_med.tasks import volumes as volumes_module

pytestmark = pytest.mark.usefixtures("one_thread")
SETS = [text for item in (*small.SMALL, *small.FEW, *small.BARE) for text in ("--set", item)]
SITE = """\
institution: Nowhere
description: Füße und 画像
files:
  image: Case*.nii.gz
  masks:
    - {pattern: '*_segmentation.nii.gz', write: 1}
"""


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return small.train_weights(tmp_path_factory.mktemp("small"))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with two cases in nii/ and site prostate/X."""
    small.make_volumes(tmp_path / "nii", 2)
    (tmp_path / "site_configs/prostate").mkdir(parents=True)
    (tmp_path / "site_configs/prostate/X.yaml").write_text(SITE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands():
    """Every command as its words."""
    found = [[item.name or item.callback.__name__] for item in app.registered_commands]
    for group in app.registered_groups:
        found += [
            [group.name, item.name or item.callback.__name__]
            for item in group.typer_instance.registered_commands
        ]
    return found


def adapt(*more, weights=None, volumes="nii", site="X"):
    source = ["--weights", str(weights)] if weights else []
    return run(["adapt", "--site", site, "--volumes", volumes, *source, "--device", "cpu", *SETS, *more])


def one_object(text):
    """Return the only JSON object of a text; anything else in it is an error."""
    content = json.loads(text)
    assert isinstance(content, dict)
    return content


# ------------------------------------------------------------ help and lists


def test_every_command_is_known():
    names = {" ".join(words) for words in commands()}
    assert names >= {
        *("demo", "adapt", "predict", "train", "statistics", "evaluate", "tensorboard", "list"),
        *("sites list", "sites show", "sites check"),
    }


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_help_shows_an_example(words, capsys):
    assert run([*words, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"Example: tesla-med {' '.join(words)}" in " ".join(text.split())


def test_help_version_and_nothing(capsys):
    assert run(["--help"]) == 0
    assert "Not a medical device" in capsys.readouterr().out
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"tesla-med {__version__}\n"
    assert run([]) == 2
    assert "adapt" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("what", "entry"),
    [
        ("methods", "tesla"),
        ("ops", "gamma"),
        ("models", "unet"),
        ("reports", "html"),
        ("pipelines", "spinal_cord"),
    ],
)
def test_list(what, entry, capsys):
    assert run(["list", what]) == 0
    assert entry in capsys.readouterr().out.lower()
    assert run(["list", what, "--json"]) == 0
    rows = one_object(capsys.readouterr().out)[what]
    assert any(entry in str(row.values()).lower() for row in rows)


def test_list_of_something_else(capsys):
    assert run(["list", "wishes"]) == 2
    known = "methods, ops, models, reports, exports, metrics, tasks, pipelines"
    assert f"Known: {known}" in capsys.readouterr().err
    assert run(["list"]) == 2
    told = capsys.readouterr().err
    assert f"say what to list. Known: {known}" in told
    assert "tesla-med sites list" in told


def test_sites(place, capsys):
    assert run(["sites", "list"]) == 0
    text = capsys.readouterr().out
    assert "prostate/X" in text
    assert "Füße und 画像" in text
    assert run(["sites", "list", "--json"]) == 0
    ids = [item["id"] for item in one_object(capsys.readouterr().out)["sites"]]
    assert {"X", "A", "gm2018-UCL"} <= set(ids)
    assert run(["sites", "show", "X"]) == 0
    assert "spacing: header" in capsys.readouterr().out
    assert run(["sites", "show", "prostate/X", "--json"]) == 0
    assert one_object(capsys.readouterr().out)["institution"] == "Nowhere"
    assert run(["sites", "show", "nowhere"]) == 2


def test_sites_check(place, capsys):
    assert run(["sites", "check", "X", "--volumes", "nii"]) == 0
    assert "2 cases, 0 with a problem" in capsys.readouterr().out
    small.truncate(place / "nii/Case01.nii.gz")
    assert run(["sites", "check", "X", "--volumes", "nii", "--json"]) == 1
    cases = one_object(capsys.readouterr().out)["cases"]
    assert [len(case["problems"]) for case in cases] == [0, 1]
    assert run(["sites", "check", "X", "--volumes", "missing"]) == 2


def test_references_of_a_model_are_checked_against_its_classes(place, capsys):
    model = make_folder(place / "models", 2)
    layer = "    - {pattern: '*_segmentation.nii.gz'}\n"
    (place / "site_configs/nnunet").mkdir()
    text = SITE.replace("    - {pattern: '*_segmentation.nii.gz', write: 1}\n", layer)
    (place / "site_configs/nnunet/L.yaml").write_text(text, encoding="utf-8")
    for path in sorted((place / "nii").glob("*_segmentation.nii.gz")):
        mask = read_volume(path)
        values = np.asarray(mask.array[0], np.uint8)
        values[values.nonzero()[0][0]] *= 2  # of three classes
        save_image(path, values, mask.affine, dtype=np.uint8)
    assert run(["sites", "check", "nnunet/L", "--volumes", "nii"]) == 2
    assert "classes and channels come from the model; give it with --weights" in capsys.readouterr().err
    assert run(["sites", "check", "nnunet/L", "--volumes", "nii", "--weights", str(model)]) == 0
    assert "0,1,2" in capsys.readouterr().out
    path = model / "dataset.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["labels"] = {"background": 0, "a": 1, "ignore": 2}
    path.write_text(json.dumps(content), encoding="utf-8")
    assert run(["sites", "check", "nnunet/L", "--volumes", "nii", "--weights", str(model), "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)["cases"]
    assert [item["problems"] for item in checked] == [[], []]


# ------------------------------------------------------------ runs


def test_adapt(place, weights, capsys):
    assert adapt(weights=weights) == 0
    shown = capsys.readouterr()
    assert "Site X: 2 cases" in shown.out
    assert "Mean Dice: source" in shown.out
    assert "Error" not in shown.err
    assert (place / "runs/X/tesla-N-O/run.json").is_file()
    assert adapt("--resume", weights=weights) == 0
    assert adapt("--overwrite", weights=weights) == 0
    assert adapt(weights=weights) == 2
    assert "--resume" in capsys.readouterr().err


def test_adapt_json(place, weights, capsys):
    assert adapt("--json", weights=weights) == 0
    content = one_object(capsys.readouterr().out)
    assert [case["status"] for case in content["cases"]] == ["ok", "ok"]
    with (place / content["out"] / "report/metrics.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    for case, row in zip(content["cases"], rows, strict=True):
        assert case["scores"][0]["dice"] == pytest.approx(float(row["dice"]), rel=1e-5)
        assert case["scores"][0]["dice_source"] == pytest.approx(float(row["dice_source"]), rel=1e-5)
    means = [np.mean([float(row[key]) for row in rows]) for key in ("dice", "dice_source")]
    assert [content["mean_dice"], content["mean_dice_source"]] == pytest.approx(means, rel=1e-5)


def test_some_cases_failed(place, weights, capsys):
    small.truncate(place / "nii/Case00.nii.gz")
    small.copy_image(
        place / "nii/Case01_segmentation.nii.gz",
        place / "nii/Case01_segmentation.nii.gz",
        shift_mm=0.3,
        dtype=np.uint8,
    )
    assert adapt("--json", weights=weights) == 1
    shown = capsys.readouterr()
    assert [case["status"] for case in one_object(shown.out)["cases"]] == ["failed", "unscored"]
    assert "Case00: failed: " in shown.err
    assert "Case01: unscored: " in shown.err
    assert "0.3 mm" in shown.err
    assert "Traceback" not in shown.err
    assert (place / "runs/X/tesla-N-O/masks/Case01_mask.nii.gz").is_file()


def test_dry_run_writes_nothing(place, weights, capsys):
    before = small.files_below(place)
    assert adapt("--dry-run", weights=weights) == 0
    text = capsys.readouterr().out
    words = "Case00", "Case01", "32x32x4", "Region: whole field", "Estimate:", " s in all for 2 cases on cpu"
    for word in (*words, "memory of the process"):
        assert word in text
    assert adapt("--dry-run", "--json", weights=weights) == 0
    content = one_object(capsys.readouterr().out)
    assert [case["slices"] for case in content["cases"]] == [4, 4]
    assert content["seconds"] > 0
    assert content["memory_mib"] > 0
    small.truncate(place / "nii/Case00.nii.gz")
    before["nii/Case00.nii.gz"] = (place / "nii/Case00.nii.gz").read_bytes()
    assert adapt("--dry-run", weights=weights) == 1
    assert small.files_below(place) == before


def test_predict_and_evaluate(place, weights, capsys):
    assert adapt("--quiet", "--protocol", "N-M", weights=weights) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == ""
    checkpoint = "runs/X/tesla-N-M/checkpoints/adapted.safetensors"
    more = [text for item in small.BARE for text in ("--set", item)]
    frozen = ["predict", "--weights", checkpoint, "--volumes", "nii", "--site", "X", *more]
    assert run([*frozen, "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert run([*frozen, "--overwrite"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"^Mean Dice: [\d.]+ %$", told, re.MULTILINE)
    assert "source" not in told.replace("runs/X", "")  # one model, which may have been adapted
    runs = place / "runs/X"
    assert small.files_below(runs / "predict/masks") == small.files_below(runs / "tesla-N-M/masks")
    line = ["evaluate", "--predictions", "runs/X/tesla-N-M/masks", "--references", "nii"]
    assert run([*line, "--out", "scores", "--json"]) == 0
    content = one_object(capsys.readouterr().out)
    with (runs / "tesla-N-M/report/metrics.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    for case, row in zip(content["cases"], rows, strict=True):
        for name in ("dice", "hd95_mm", "assd_mm", "volume_ml"):
            assert case["scores"][0][name] == pytest.approx(float(row[name]), rel=1e-5)
    assert (place / "scores/metrics.csv").is_file()
    assert run([*line, "--quiet"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_train_and_statistics(place, capsys):
    line = ["train", "--pipeline", "prostate", "--sites", "X", "--volumes", "nii", "--out", "source"]
    short = [text for item in small.SMALL for text in ("--set", item)]
    short += ["--steps", "4", "--device", "cpu", "--set", "train.batch_size=2"]
    assert run([*line, *short, "--json"]) == 0
    content = one_object(capsys.readouterr().out)
    line = ["statistics", "--weights", content["weights"], "--sites", "X", "--volumes", "nii"]
    assert run([*line, "--out", "other.safetensors", "--device", "cpu", "--json"]) == 0
    assert (place / one_object(capsys.readouterr().out)["statistics"]).is_file()


@pytest.mark.slow
def test_quiet_is_silent_in_a_process_of_its_own(place, weights):
    line = ["adapt", "--site", "X", "--volumes", "nii", "--weights", str(weights), "--device", "cpu"]
    command = [sys.executable, "-m", "tesla_med", *line, *SETS, "--set", "reports=[table,tensorboard]"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--quiet"], capture_output=True, env=environment, check=False)  # noqa: S603
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# ------------------------------------------------------------ what goes wrong


def test_a_warning_that_every_cell_gives_is_said_once(place, weights, capsys):
    line = ["compare", "--pipeline", "prostate", "--sites", "X", "--volumes", "nii", "--methods", "source,bn"]
    line += [
        "--seeds",
        "1",
        "--weights",
        str(weights),
        "--device",
        "cpu",
        "--set",
        "preprocessing.orientation=LPS",
    ]
    assert run(line) == 0
    told = [text for text in capsys.readouterr().err.splitlines() if "--set departs from" in text]
    assert told
    assert len(told) == len(set(told))


def test_quiet_still_says_what_failed(place, weights, capsys):
    small.truncate(place / "nii/Case00.nii.gz")
    assert adapt("--quiet", weights=weights) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [line.split(":")[0] for line in shown.err.splitlines()] == ["Case00"]
    line = ["compare", "--pipeline", "prostate", "--sites", "X", "--volumes", "nii", "--methods", "ttac"]
    line += ["--protocols", "Y-O", "--seeds", "1", "--weights", str(weights), "--device", "cpu", *SETS]
    assert run([*line, "--quiet"]) == 1  # no statistics
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("Not run: X/ttac-Y-O/seed-0: ")


def say_once(capsys, arguments, words, kind=None):
    """Run a wrong command line with and without --json: exit code 2, one message, no traceback."""
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert [line for line in shown.out.splitlines() if not line.startswith("Site X: 2 cases")] == []
    assert shown.err.count("Error: ") == 1
    assert "Traceback" not in shown.err
    for word in words:
        assert word in shown.err
    assert run([*arguments, "--json"]) == 2
    error = one_object(capsys.readouterr().out)["error"]
    for word in words:
        assert word in error["message"]
    if kind:
        assert error["kind"] == kind


WRONG = [
    (["--site", "nowhere"], ["site 'nowhere'"], "ConfigError"),
    (["--method", "telsa"], ["'telsa'", "Did you mean 'tesla'"], "ConfigError"),
    (["--protocol", "N-X"], ["--protocol 'N-X'", "N-O, N-M"], "ConfigError"),
    (["--reset", "daily"], ["--reset 'daily'", "never, site, case"], "ConfigError"),
    (["--device", "tpu"], ["tpu", "auto, cpu, cuda"], "ConfigError"),
    (["--pipeline", "prostrate"], ["'prostrate'"], "ConfigError"),
    (["--pipeline", "spinal_cord"], ["site"], "ConfigError"),
    (["--set", "no_key=1"], ["no_key"], "ConfigError"),
    (["--set", "predict_batch"], ["key=value"], "ConfigError"),
    (["--set", "methods.tesla.no_key=1"], ["no_key", "methods.tesla"], "ConfigError"),
    (["--volumes", "missing"], ["missing", "no such file or folder"], "DataError"),
    (["--volumes", "empty"], ["empty", "Case*.nii.gz", "holds no files of its own"], "DataError"),
    (["--volumes", "dicom"], ["dicom", "2 .dcm", "convert"], "DataError"),
    (["--volumes", "others"], ["others", "Case*.nii.gz", "1 .nii.gz", "scan.nii.gz"], "DataError"),
    (["--volumes", "twice"], ["share a name", "Case00.nii.gz", "Case00.nii and"], "DataError"),
    (["--weights", "none.safetensors"], ["none.safetensors", "--weights"], "CheckpointError"),
    (["--weights", "bare.safetensors"], ["another architecture", "other shape"], "CheckpointError"),
    (["--weights", "text.pth"], ["text.pth"], "CheckpointError"),
    (["--out", "file"], ["file"], "OutputError"),
    (["--out", "file/below"], ["file/below"], "OutputError"),
    (["--out", "others"], ["not a run"], "OutputError"),
    (["--resume", "--overwrite"], ["not both"], "OutputError"),
]


@pytest.mark.parametrize(("more", "words", "kind"), WRONG, ids=[" ".join(item[0]) for item in WRONG])
def test_wrong_input(place, weights, capsys, more, words, kind):
    for name in ("empty", "dicom", "others", "twice"):
        (place / name).mkdir()
    for index in range(2):
        (place / f"dicom/{index}.dcm").write_bytes(b"DICM")
    small.copy_image(place / "nii/Case00.nii.gz", place / "others/scan.nii.gz")
    for name in ("Case00.nii.gz", "Case00.nii"):
        small.copy_image(place / "nii/Case00.nii.gz", place / "twice" / name)
    (place / "bare.safetensors").write_bytes(weights.read_bytes())
    (place / "text.pth").write_text("hello")
    (place / "file").write_text("in the way")
    before = small.files_below(place)
    line = ["adapt", "--site", "X", "--volumes", "nii", "--weights", str(weights), "--device", "cpu"]
    wide = ["--set", "model.params.width=8"] if "bare.safetensors" in more else []
    say_once(capsys, [*line, *wide, *more], words, kind)
    assert small.files_below(place) == before


def test_no_weights(place, capsys):
    line = ["adapt", "--site", "X", "--volumes", "nii", "--device", "cpu"]
    say_once(capsys, line, ["no weights", "--weights FILE"], "CheckpointError")


def test_classes_that_do_not_fit(place, weights, capsys):
    line = ["adapt", "--site", "gm2018-UCL", "--volumes", "nii/Case00.nii.gz", "--weights", str(weights)]
    say_once(capsys, [*line, "--device", "cpu"], ["1=prostate", "--pipeline prostate"], "CheckpointError")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["adapt"], "--volumes"),
        (["adapt", "--site", "X", "--volumes", "nii", "--sead", "1"], "--sead"),
        (["adapt", "--site", "X", "--volumes", "nii", "--seed", "one"], "--seed"),
        (["adapt", "--site", "X", "--volumes", "nii", "--seed", "-1"], "--seed"),
        (["adopt"], "adopt"),
    ],
)
def test_wrong_usage(place, capsys, arguments, word):
    say_once(capsys, arguments, [word], "UsageError")


@pytest.mark.parametrize(
    "line",
    [
        ["predict", "--weights", "none.safetensors", "--volumes", "nii", "--site", "X"],
        ["predict", "--weights", "none.safetensors", "--volumes", "nii"],
        ["train", "--pipeline", "nothing", "--sites", "X", "--volumes", "nii", "--out", "o"],
        ["train", "--pipeline", "prostate", "--sites", ",", "--volumes", "nii", "--out", "o"],
        ["train", "--pipeline", "prostate", "--sites", "X", "--volumes", "missing", "--out", "o"],
        ["statistics", "--weights", "none.pth", "--sites", "X", "--volumes", "nii"],
        ["evaluate", "--predictions", "missing", "--references", "nii"],
        ["sites", "show", "nowhere"],
        ["sites", "check", "X", "--volumes", "missing"],
        ["list", "wishes"],
        ["demo", "--task", "knee"],
    ],
    ids=" ".join,
)
def test_wrong_input_of_other_commands(place, capsys, line):
    say_once(capsys, line, [])


def test_tensorboard_needs_events(place, capsys):
    assert run(["tensorboard", "nii"]) == 2
    assert "no TensorBoard files" in capsys.readouterr().err
    assert run(["tensorboard", "missing"]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_tensorboard_starts_the_program(place, monkeypatch):
    (place / "runs").mkdir()
    (place / "runs/events.out.tfevents.1").write_bytes(b"")
    called = []
    monkeypatch.setattr(subprocess, "call", lambda command: called.append(command) or 0)
    assert run(["tensorboard", "runs", "--port", "0"]) == 0
    assert called[0][1:] == [
        *("-m", "tensorboard.main", "--logdir", "runs", "--port", "0", "--host", "localhost")
    ]


def test_tensorboard_opens_the_page_when_asked(place, monkeypatch, capsys):
    (place / "runs").mkdir(exist_ok=True)
    (place / "runs/events.out.tfevents.1").write_bytes(b"")
    opened, there = [], threading.Event()
    monkeypatch.setattr("tesla_med.cli.evaluating.SECONDS_TO_START", 0.0)
    monkeypatch.setattr("webbrowser.open", lambda address: (opened.append(address), there.set()))
    monkeypatch.setattr(subprocess, "call", lambda command: 0 if there.wait(10) else 1)
    assert run(["tensorboard", "runs", "--port", "7007", "--open"]) == 0
    assert opened == ["http://localhost:7007/"]
    assert run(["tensorboard", "runs", "--port", "0", "--open"]) == 2
    assert "--port 0" in capsys.readouterr().err


def test_interrupted(place, weights, monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(volumes_module, "encode_mask", stop)
        assert adapt(weights=weights) == 130
        assert "interrupted" in capsys.readouterr().err
        assert adapt("--resume", "--json", weights=weights) == 130
        assert one_object(capsys.readouterr().out)["error"]["kind"] == "Interrupted"
    assert adapt("--resume", weights=weights) == 0


def test_a_fault_of_the_program(place, weights, monkeypatch, capsys):
    def broken(*_, **__):
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr("tesla_med.reports.base.Reports.started", broken)
    assert adapt("--json", weights=weights) == 1
    shown = capsys.readouterr()
    assert one_object(shown.out)["error"]["kind"] == "ZeroDivisionError"
    assert "unexpected ZeroDivisionError: by nothing" in shown.err
    assert "Traceback" not in shown.err
    assert adapt("--verbose", "--overwrite", weights=weights) == 1
    assert "Traceback" in capsys.readouterr().err


def test_verbose_shows_where_a_case_broke(place, weights, monkeypatch, capsys):
    def broken(*_, **__):
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(volumes_module, "encode_mask", broken)
    assert adapt(weights=weights) == 1
    shown = capsys.readouterr().err
    assert "Case00.nii.gz: unexpected ZeroDivisionError: by nothing" in shown
    assert "Traceback" not in shown
    assert adapt("--verbose", "--overwrite", weights=weights) == 1
    assert "Traceback" in capsys.readouterr().err


def test_paths_with_odd_characters(place, weights, capsys):
    nii = place / "Größe 数据"
    small.make_volumes(nii / "Füße", 1, names=["Case é"])
    assert adapt("--out", "Läufe 一/a b", weights=weights, volumes=str(nii)) == 0
    assert (place / "Läufe 一/a b/masks/Füße/Case é_mask.nii.gz").is_file()
    assert "Füße/Case é" in capsys.readouterr().out
