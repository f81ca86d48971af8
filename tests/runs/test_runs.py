"""The output folder: refusals, overwriting, resuming."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import small_site as small

from tesla_med.config.files import load_pipeline
from tesla_med.engine.driver import Driver
from tesla_med.errors import OutputError
from tesla_med.io.files import sha256
from tesla_med.records import CaseResult
from tesla_med.runs.folder import RunFolder
from tesla_med.tasks import volumes as volumes_module
from tesla_med.tasks.volumes import Volumes

pytestmark = pytest.mark.usefixtures("one_thread")
CASES = 5


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return small.train_weights(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def volumes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("volumes")
    small.make_volumes(folder, CASES)
    return folder


@pytest.fixture(scope="module")
def whole(weights, volumes, tmp_path_factory):
    """Uninterrupted runs by reset."""
    folder = tmp_path_factory.mktemp("whole")
    return {
        reset: small.run(volumes, weights, folder / reset, reset=reset, save_probs=True)
        for reset in ("case", "site")
    }


def comparable(out):
    """Everything of a run that must repeat: times and dates do not."""
    return {
        name: data
        for name, data in small.files_below(out).items()
        if not name.startswith((".cases/", ".tesla-med")) and name != "run.json"
    }


def interrupt_at(monkeypatch, number, error):
    """Raise ``error`` once instead of writing the mask of case ``number`` (from 1); return a counter."""
    original = volumes_module.encode_mask
    masks = []

    def write(path, mask, volume):
        if "source_masks" not in path.parts:
            masks.append(path.name)
            if len(masks) == number:
                raise error
        return original(path, mask, volume)

    monkeypatch.setattr(volumes_module, "encode_mask", write)
    return masks


@pytest.mark.parametrize("reset", ["case", "site"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OutputError("disk full"), SystemExit(3)])
def test_resumed_run_is_that_without_interruption(
    volumes, weights, whole, tmp_path, monkeypatch, reset, error
):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3, error)
        with pytest.raises(type(error)):
            small.run(volumes, weights, out, reset=reset, save_probs=True)
    found = small.files_below(out)
    assert not json.loads(found["run.json"])["complete"]
    assert [name for name in found if name.startswith("masks/Case")] == [
        f"masks/Case0{index}_mask.nii.gz" for index in range(2)
    ]
    assert not [name for name in found if ".tmp-" in name]
    for index in range(2):
        place = f"masks/Case0{index}_mask.nii.gz"
        assert found[place] == small.masks(whole[reset].out)[place]
    written = interrupt_at(monkeypatch, 0, error)
    result = small.run(volumes, weights, out, reset=reset, save_probs=True, resume=True)
    assert written == [f"Case0{index}_mask.nii.gz" for index in range(2, CASES)]
    assert comparable(out) == comparable(whole[reset].out)
    assert [item.scores for item in result.results] == [item.scores for item in whole[reset].results]
    assert small.record(out)["complete"]


def copied(whole, folder):
    """Return a copy of the complete run with reset case."""
    return Path(shutil.copytree(whole["case"].out, folder / "out"))


def damage_half(path):
    small.truncate(path)


def damage_flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


def damage_remove(path):
    path.unlink()


def damage_other(path):
    path.write_text("not an image")


@pytest.mark.parametrize("damage", [damage_half, damage_flip, damage_remove, damage_other])
@pytest.mark.parametrize("part", ["masks", "source_masks"])
def test_damaged_masks_are_redone(volumes, weights, whole, tmp_path, monkeypatch, damage, part):
    out = copied(whole, tmp_path)
    damage(out / part / "Case03_mask.nii.gz")
    written = interrupt_at(monkeypatch, 0, KeyboardInterrupt())
    small.run(volumes, weights, out, reset="case", save_probs=True, resume=True)
    assert written == ["Case03_mask.nii.gz"]
    assert comparable(out) == comparable(whole["case"].out)


def test_missing_probs_are_redone(volumes, weights, whole, tmp_path, monkeypatch):
    out = copied(whole, tmp_path)
    (out / "probs/Case01_prob.nii.gz").unlink()
    written = interrupt_at(monkeypatch, 0, KeyboardInterrupt())
    small.run(volumes, weights, out, reset="case", save_probs=True, resume=True)
    assert written == ["Case01_mask.nii.gz"]
    assert comparable(out) == comparable(whole["case"].out)


def test_failed_unscored_and_changed_cases_are_redone(weights, whole, tmp_path, monkeypatch):
    nii, out = tmp_path / "nii", tmp_path / "out"
    paths = small.make_volumes(nii, CASES)
    good = [path.read_bytes() for path in paths]
    reference = nii / "Case02_segmentation.nii.gz"
    reference_bytes = reference.read_bytes()
    small.truncate(paths[1])
    reference.write_text("nothing")
    small.copy_image(paths[3], paths[3], lambda image: np.minimum(image + 3, 999))
    first = small.run(nii, weights, out, reset="case", save_probs=True)
    assert [item.status for item in first.results] == ["ok", "failed", "unscored", "ok", "ok"]
    paths[1].write_bytes(good[1])
    paths[3].write_bytes(good[3])
    reference.write_bytes(reference_bytes)
    written = interrupt_at(monkeypatch, 0, KeyboardInterrupt())
    second = small.run(nii, weights, out, reset="case", save_probs=True, resume=True)
    assert written == [f"Case0{index}_mask.nii.gz" for index in (1, 2, 3)]
    assert {item.status for item in second.results} == {"ok"}
    assert comparable(out) == comparable(whole["case"].out)


def test_scores_are_those_of_the_references_that_are_there(weights, tmp_path, monkeypatch):
    nii, out = tmp_path / "nii", tmp_path / "out"
    small.make_volumes(nii, 3)
    references = [nii / f"Case0{index}_segmentation.nii.gz" for index in range(3)]
    kept = references[2].read_bytes()
    references[2].unlink()
    first = small.run(nii, weights, out, reset="case", method="source")
    assert first.results[2].mean_dice is None
    references[2].write_bytes(kept)
    small.copy_image(references[0], references[0], lambda mask: np.roll(mask, 3, axis=0))
    written = interrupt_at(monkeypatch, 0, KeyboardInterrupt())
    second = small.run(nii, weights, out, reset="case", method="source", resume=True)
    assert written == ["Case00_mask.nii.gz", "Case02_mask.nii.gz"]
    assert second.results[0].mean_dice != first.results[0].mean_dice
    assert second.results[1].mean_dice == first.results[1].mean_dice
    assert second.results[2].mean_dice is not None


def test_a_case_that_fails_when_redone_leaves_no_old_mask(weights, tmp_path):
    nii, out = tmp_path / "nii", tmp_path / "out"
    paths = small.make_volumes(nii, 2)
    small.run(nii, weights, out, reset="site")
    small.truncate(paths[1])
    result = small.run(nii, weights, out, reset="site", resume=True)
    assert [item.status for item in result.results] == ["ok", "failed"]
    assert not [name for name in small.files_below(out) if "Case01_mask" in name]


@pytest.mark.parametrize("place", [".tmp-0123456789ab.json", "report/.tmp-0123456789ab.csv"])
def test_what_a_killed_run_was_writing_is_cleared(volumes, weights, whole, tmp_path, place):
    out = copied(whole, tmp_path)
    (out / place).write_text("{", encoding="utf-8")
    (out / "notes.txt").write_text("mine", encoding="utf-8")
    small.run(volumes, weights, out, reset="case", save_probs=True, resume=True)
    assert not list(out.rglob(".tmp-*"))
    assert (out / "notes.txt").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("left", [".tmp-0123456789ab.json", ".write-check"])
def test_a_run_that_was_killed_before_it_had_a_record_is_begun_again(volumes, weights, whole, tmp_path, left):
    out = tmp_path / "out"
    out.mkdir()
    (out / left).write_text("{", encoding="utf-8")
    small.run(volumes, weights, out, resume=True, save_probs=True)
    assert comparable(out) == comparable(whole["case"].out)


def test_resuming_a_complete_run_changes_nothing(volumes, weights, whole, tmp_path, monkeypatch):
    out = copied(whole, tmp_path)
    written = interrupt_at(monkeypatch, 0, KeyboardInterrupt())
    small.run(volumes, weights, out, reset="case", save_probs=True, resume=True)
    assert written == []
    assert comparable(out) == comparable(whole["case"].out)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"seed": 1}, "seed"),
        ({"protocol": "N-M"}, "protocol"),
        ({"method": "bn"}, "method"),
        ({"reset": "site"}, "reset"),
        ({"save_probs": True}, "save_probs"),
        ({"overrides": ("methods.tesla.learning_rate=0.1",)}, "pipeline"),
        ({"overrides": ("methods.source.statistics=volume",)}, "pipeline"),
        ({"site": small.site(terms="Other terms.")}, "site"),
    ],
)
def test_resume_refuses_other_settings(volumes, weights, tmp_path, change, key):
    out = tmp_path / "out"
    image = volumes / "Case00.nii.gz"
    small.run(image, weights, out)
    before = small.files_below(out)
    with pytest.raises(OutputError, match=key) as caught:
        small.run(image, weights, out, resume=True, **change)
    assert "differ" in str(caught.value)
    assert small.files_below(out) == before


def test_resume_refuses_other_weights_and_cases(volumes, weights, tmp_path):
    out = tmp_path / "out"
    small.run(volumes / "Case00.nii.gz", weights, out)
    with pytest.raises(OutputError, match="cases"):
        small.run(volumes / "Case01.nii.gz", weights, out, resume=True)
    other = out / "checkpoints" / "Case00.safetensors"
    with pytest.raises(OutputError, match="weights_sha256"):
        small.run(volumes / "Case00.nii.gz", other, out, resume=True)


def test_reports_may_change_when_resumed(volumes, weights, tmp_path):
    out = tmp_path / "out"
    image = volumes / "Case00.nii.gz"
    small.run(image, weights, out)
    small.run(image, weights, out, resume=True, reports=("reports=[table, html]",))
    assert (out / "report/report.html").is_file()


@pytest.mark.parametrize("flag", [{}, {"resume": True}, {"overwrite": True}])
@pytest.mark.parametrize(
    "content", [None, "[]", "{}", '{"settings": []}', '{"other": "tool"}', "{broken"], ids=str
)
def test_a_folder_that_is_no_run_is_left_alone(volumes, weights, tmp_path, flag, content):
    out = tmp_path / "out"
    (out / "masks").mkdir(parents=True)
    (out / "masks/mine.nii.gz").write_text("precious")
    if content is not None:
        (out / "run.json").write_text(content)
    before = small.files_below(out)
    with pytest.raises(OutputError, match="not a run of tesla-med"):
        small.run(volumes, weights, out, **flag)
    assert small.files_below(out) == before


def test_refusals_without_a_trace(volumes, weights, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match="is a file"):
        small.run(volumes, weights, tmp_path / "file")
    with pytest.raises(OutputError, match=r"in the way|cannot be"):
        small.run(volumes, weights, tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "in the way"
    with pytest.raises(OutputError, match="not both"):
        small.run(volumes, weights, tmp_path / "new", resume=True, overwrite=True)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["file"]


def test_two_runs_in_one_folder(volumes, weights, tmp_path):
    from tesla_med.io.locks import output_lock

    out = tmp_path / "out"
    with output_lock(out), pytest.raises(OutputError, match="another run"):
        small.run(volumes, weights, out)
    assert set(small.files_below(out)) == {".tesla-med.lock"}
    small.run(volumes / "Case00.nii.gz", weights, out, method="source")


def test_a_finished_case_needs_its_record_and_its_files(tmp_path, volumes, weights):
    out = tmp_path / "out"
    small.run(volumes / "Case00.nii.gz", weights, out)
    task = Volumes(small.site(), load_pipeline("prostate", small.SMALL), wanted=("probs",))
    plain = Volumes(small.site(), load_pipeline("prostate", small.SMALL))
    (ref,) = plain.refs(plain.find(volumes / "Case00.nii.gz", ()), 0, 1)
    folder = RunFolder(out)
    records, digest = folder.kept("Case00", CaseResult)
    assert [item.case for item in records] == ["Case00"]
    assert plain.intact(folder, ref, records, digest)
    assert not task.intact(folder, ref, records, digest)  # there are no probabilities
    folder.done("Case00").write_text('{"case": "Case00"}')
    assert folder.kept("Case00", CaseResult) is None
    folder.done("Case00").unlink()
    assert folder.kept("Case00", CaseResult) is None


# ------------------------------------------------------------ killed at any moment

STREAMS = {
    "N-O": {"protocol": "N-O", "reset": "site"},
    "N-M": {"protocol": "N-M", "reset": "site"},
    "bn": {"protocol": "N-O", "reset": "never", "method": "bn"},
    "views": {"protocol": "N-M", "reset": "site", "overrides": ("methods.tesla.predict_views=2",)},
}


class Killed(BaseException):
    """Stands for a kill: nothing in the package catches it."""


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    small.make_volumes(folder, 3)
    return folder


def kill_at(monkeypatch, number):
    """Raise instead of the ``number``-th renaming of a finished file; return a counter."""
    original, renamed = Path.replace, []

    def replace(path, target):
        renamed.append(target)
        if len(renamed) == number:
            raise Killed
        return original(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    return renamed


@pytest.mark.slow
@pytest.mark.parametrize("stream", STREAMS)
def test_a_stream_killed_at_any_write_goes_on_bit_for_bit(three, weights, tmp_path, monkeypatch, stream):
    options = STREAMS[stream]
    with monkeypatch.context() as patch:
        renamed = kill_at(patch, 0)
        small.run(three, weights, tmp_path / "whole", **options)
    want = comparable(tmp_path / "whole")
    for number in range(1, len(renamed) + 1, 2 if stream == "N-O" else 5):
        out = tmp_path / f"killed-{number}"
        with monkeypatch.context() as patch:
            kill_at(patch, number)
            with pytest.raises(Killed):
                small.run(three, weights, out, **options)
        with monkeypatch.context() as patch:
            kill_at(patch, 0)
            resume = (out / "run.json").is_file()
            small.run(three, weights, out, resume=resume, **options)
        assert comparable(out) == want, renamed[number - 1].name
        assert not (out / ".state").exists()


def test_a_stream_goes_on_without_repeating_what_is_done(three, weights, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            small.run(three, weights, out, **STREAMS["N-M"])
    passes = []
    original = Driver.adapt_to_site

    def adapt_to_site(self, slices, progress, *, start, on_pass):
        passes.append(start)
        return original(self, slices, progress, start=start, on_pass=on_pass)

    monkeypatch.setattr(Driver, "adapt_to_site", adapt_to_site)
    written = interrupt_at(monkeypatch, 0, KeyboardInterrupt())
    small.run(three, weights, out, resume=True, **STREAMS["N-M"])
    assert passes == [2]
    assert written == ["Case02_mask.nii.gz"]


def test_resuming_a_complete_stream_changes_nothing(three, weights, tmp_path, monkeypatch):
    out = tmp_path / "out"
    small.run(three, weights, out, **STREAMS["N-O"])
    before = comparable(out)
    written = interrupt_at(monkeypatch, 0, KeyboardInterrupt())
    small.run(three, weights, out, resume=True, **STREAMS["N-O"])
    assert written == []
    assert comparable(out) == before


@pytest.mark.slow
@pytest.mark.parametrize("damage", [damage_half, damage_other, damage_remove])
@pytest.mark.parametrize("part", ["cursor.pt", "state-2.pt"])
def test_a_damaged_state_means_starting_over(three, weights, tmp_path, monkeypatch, damage, part):
    small.run(three, weights, tmp_path / "whole", **STREAMS["N-O"])
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            small.run(three, weights, out, **STREAMS["N-O"])
    damage(out / ".state" / part)
    written = interrupt_at(monkeypatch, 0, KeyboardInterrupt())
    small.run(three, weights, out, resume=True, **STREAMS["N-O"])
    assert len(written) == 3
    assert comparable(out) == comparable(tmp_path / "whole")


def test_the_chain_of_weights_leads_back_to_the_source(three, weights, tmp_path):
    out = tmp_path / "out"
    small.run(three, weights, out, **STREAMS["N-O"])
    parent, cases = sha256(weights), []
    for name in ("Case00", "Case01", "Case02"):
        path = out / f"checkpoints/after/{name}.safetensors"
        extra = json.loads(path.with_suffix(".json").read_text())["extra"]
        cases.append(name)
        assert extra["parent_sha256"] == parent
        assert extra["source_sha256"] == sha256(weights)
        assert extra["cases_seen"] == cases
        parent = sha256(path)
    last = out / "checkpoints/adapted.safetensors"
    assert sha256(last) == parent
    extra = json.loads(last.with_suffix(".json").read_text())["extra"]
    assert extra["parent_sha256"] == sha256(out / "checkpoints/after/Case01.safetensors")


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import small_site as small
original, count = Path.replace, [0]
def replace(path, target):
    count[0] += 1
    if count[0] == {number}:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(path, target)
Path.replace = replace
small.run(Path({volumes!r}), Path({weights!r}), Path({out!r}), protocol="N-O", reset="site")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_killed_process_goes_on_bit_for_bit(three, weights, tmp_path):
    small.run(three, weights, tmp_path / "whole", **STREAMS["N-O"])
    out = tmp_path / "out"
    values = {
        "tests": str(Path(__file__).parents[1]),
        "number": 14,
        "volumes": str(three),
        "weights": str(weights),
        "out": str(out),
    }
    done = subprocess.run([sys.executable, "-c", KILLED.format(**values)], check=False)  # noqa: S603
    assert done.returncode == -signal.SIGKILL
    assert 0 < len(list((out / "masks").glob("*.nii.gz"))) < 3
    small.run(three, weights, out, resume=True, **STREAMS["N-O"])
    assert comparable(out) == comparable(tmp_path / "whole")
    assert not list(out.rglob(".tmp-*"))
