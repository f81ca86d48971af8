"""Whole runs: output contract, repeatability, independence of cases, one bad case among good ones."""

from __future__ import annotations

import csv
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
import small_site as small
import torch
from nibabel.orientations import axcodes2ornt, inv_ornt_aff, io_orientation, ornt_transform

from tesla_med import losses
from tesla_med.actions.predict import predict
from tesla_med.adapt import adapt_site, run_plan
from tesla_med.config.files import load_pipeline
from tesla_med.config.models import Files, MaskLayer, Region
from tesla_med.engine.guard import VERDICTS
from tesla_med.errors import AdaptationError, CheckpointError, ConfigError, OutputError, TeslaMedError
from tesla_med.io.files import sha256
from tesla_med.io.volumes import save_image
from tesla_med.models.base import Network, build_model
from tesla_med.models.checkpoint import make_card, save_checkpoint
from tesla_med.models.loading import LoadedModel
from tesla_med.plan import RunRequest, make_plan
from tesla_med.reports.slices import read_slices
from tesla_med.reports.table import columns
from tesla_med.scoring import score as scoring
from tesla_med.tasks.volumes import Volumes
from tesla_med.tta.tesla import TeSLA
from tesla_med.types import Failure

pytestmark = pytest.mark.usefixtures("one_thread")
FLIPPED = "loss/flipped_cross_entropy"


@pytest.fixture(scope="session")
def weights(one_thread, tmp_path_factory):
    return small.train_weights(tmp_path_factory.mktemp("small"))


@pytest.fixture
def volumes(tmp_path):
    small.make_volumes(tmp_path / "nii", 2)
    return tmp_path / "nii"


# ------------------------------------------------------------ output contract

RUNS = [
    ("source", "N-O", "case"),
    ("bn", "N-O", "case"),
    ("bn", "N-M", "site"),
    ("tesla", "N-O", "case"),
    ("tesla", "N-O", "never"),
    ("tesla", "N-M", "site"),
    ("tesla", "N-M", "case"),
]


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def complete(request, weights, one_thread, tmp_path_factory):
    """One run with every output asked for: (method, protocol, reset), folder of images, result."""
    method, protocol, reset = request.param
    folder = tmp_path_factory.mktemp("run")
    small.make_volumes(folder / "nii", 2)
    result = small.run(
        folder / "nii",
        weights,
        folder / "out",
        method=method,
        protocol=protocol,
        reset=reset,
        seed=3,
        reports=(),
        save_probs=True,
        save_uncertainty=True,
    )
    return request.param, folder / "nii", result


def test_every_file_of_the_contract(complete):
    (method, protocol, reset), _, result = complete
    found = set(small.files_below(result.out))
    expected = {"run.json", "masks/labels.json"}
    expected |= {f"report/{name}" for name in ("metrics.csv", "calibration.json", "reliability.png")}
    expected |= {"report/predicted_dice.json"}
    expected |= {"report/report.html", ".tesla-med.lock"}
    for name in ("Case00", "Case01"):
        expected |= {f"{part}/{name}_mask.nii.gz" for part in ("masks", "source_masks")}
        expected |= {f"probs/{name}_prob.nii.gz", f"uncertainty/{name}_entropy.nii.gz", f".cases/{name}.json"}
        expected |= {f"report/slices/{name}.js"}
    if method != "source":
        names = ("Case00", "Case01") if reset == "case" else ("adapted",)
        if reset != "case" and protocol == "N-O":
            names += ("after/Case00", "after/Case01")
        expected |= {f"checkpoints/{name}.{end}" for name in names for end in ("safetensors", "json")}
    events = {name for name in found if name.startswith("tensorboard/events.out.tfevents.")}
    assert found - events == expected
    assert len(events) == 1
    assert all(path.is_file() and path.stat().st_size for path in result.files)


def test_images_open_and_lie_on_the_grid_of_the_input(complete):
    _, volumes, result = complete
    for name in ("Case00", "Case01"):
        source = nib.load(volumes / f"{name}.nii.gz")
        itk_source = sitk.ReadImage(str(volumes / f"{name}.nii.gz"))
        outputs = {
            "masks": f"masks/{name}_mask.nii.gz",
            "source": f"source_masks/{name}_mask.nii.gz",
            "entropy": f"uncertainty/{name}_entropy.nii.gz",
        }
        for kind, place in outputs.items():
            image = nib.load(result.out / place)
            assert image.shape == source.shape
            assert np.array_equal(image.affine, source.affine)
            assert image.get_data_dtype() == (np.float32 if kind == "entropy" else np.uint8)
            for code in ("qform_code", "sform_code"):
                assert image.header[code] == source.header[code]
            itk = sitk.ReadImage(str(result.out / place))
            assert itk.GetSize() == itk_source.GetSize()
            assert itk.GetOrigin() == itk_source.GetOrigin()
            assert itk.GetDirection() == itk_source.GetDirection()
        assert set(np.unique(small.labels(result.out, name))) <= {0, 1}


def test_probs_and_uncertainty(complete):
    _, _, result = complete
    for name in ("Case00", "Case01"):
        probs = np.asarray(nib.load(result.out / f"probs/{name}_prob.nii.gz").dataobj)
        entropy = np.asarray(nib.load(result.out / f"uncertainty/{name}_entropy.nii.gz").dataobj)
        assert probs.shape == (*entropy.shape, 2)
        assert probs.min() >= 0
        assert np.allclose(probs.sum(axis=-1), 1, atol=1e-5)
        assert np.array_equal(probs.argmax(axis=-1), small.labels(result.out, name))
        assert entropy.min() >= 0
        assert entropy.max() <= 1
        both = -(probs * np.log2(np.maximum(probs, 1e-12))).sum(axis=-1)
        assert np.allclose(entropy, both, atol=1e-4)


def test_metrics_csv(complete):
    (method, protocol, _), _, result = complete
    with (result.out / "report/metrics.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert tuple(rows[0]) == columns()
    assert [row["case"] for row in rows] == ["Case00", "Case01"]
    for row, item in zip(rows, result.results, strict=True):
        assert (row["site"], row["method"], row["protocol"], row["seed"]) == ("X", method, protocol, "3")
        assert row["status"] == "ok"
        assert row["used"] == ("source" if method == "source" else "adapted")
        assert float(row["dice"]) == pytest.approx(item.mean_dice, rel=1e-5)


def test_figures_are_those_of_the_files(complete):
    """The Dice of a file is that of its own column: source and adapted are never swapped."""
    _, volumes, result = complete
    for item in result.results:
        reference = np.asarray(nib.load(volumes / f"{item.case}_segmentation.nii.gz").dataobj) > 0
        score = item.scores[0]
        for part, stated, ml in (
            ("masks", score.dice, score.volume_ml),
            ("source_masks", score.dice_source, score.volume_ml_source),
        ):
            mask = small.labels(result.out, item.case, part) > 0
            overlap = 2 * (mask & reference).sum() / (mask.sum() + reference.sum())
            assert stated == pytest.approx(overlap, abs=1e-9)
            voxel = abs(np.linalg.det(nib.load(volumes / f"{item.case}.nii.gz").affine[:3, :3])) / 1000
            assert ml == pytest.approx(mask.sum() * voxel, rel=1e-5)


def test_run_json(complete, weights):
    (method, protocol, reset), volumes, result = complete
    content = small.record(result.out)
    assert content["complete"]
    assert set(content["versions"]) >= {"tesla-med", "python", "torch", "monai", "nibabel", "numpy"}
    assert content["weights_sha256"] == sha256(weights)
    assert (content["protocol"], content["reset"], content["seed"]) == (protocol, reset, 3)
    assert content["method"]["name"] == method
    assert content["device"] == "cpu"
    assert content["terms"] == "Generated data."
    assert content["settings"]["pipeline"]["preprocessing"]["size"] == [32, 32]
    assert content["settings"]["site"]["id"] == "X"
    assert [case["case"] for case in content["cases"]] == ["Case00", "Case01"]
    for case in content["cases"]:
        assert case["status"] == "ok"
        assert case["slices"] == small.SLICES
        assert case["seconds"] > 0
        assert case["input_sha256"] == sha256(volumes / f"{case['case']}.nii.gz")


def test_results_hold_no_arrays(complete):
    _, _, result = complete
    sizes = [len(item.model_dump_json()) for item in result.results]
    assert max(sizes) < 40_000
    assert not any(
        isinstance(value, np.ndarray | torch.Tensor) for item in result.results for _, value in item
    )


@pytest.fixture(scope="module")
def baseline(weights, one_thread, tmp_path_factory):
    """The source method on the cases of :func:`complete`."""
    folder = tmp_path_factory.mktemp("baseline")
    small.make_volumes(folder / "nii", 2)
    return small.run(folder / "nii", weights, folder / "out", method="source")


def test_source_masks_are_those_of_the_source_method(complete, baseline):
    (method, _, _), _, result = complete
    assert small.files_below(result.out / "source_masks") == small.files_below(baseline.out / "source_masks")
    changed = small.files_below(result.out / "masks") != small.files_below(baseline.out / "masks")
    assert changed == (method != "source")
    assert result.mean_dice_source == baseline.mean_dice


# ------------------------------------------------------------ repeatability and independence


@pytest.mark.parametrize("protocol", ["N-O", "N-M"])
def test_same_seed_same_bytes_other_seed_other_masks(protocol, volumes, weights, tmp_path):
    runs = [
        small.run(volumes, weights, tmp_path / str(index), protocol=protocol, seed=seed)
        for index, seed in enumerate((5, 5, 6))
    ]
    first, again, other = (small.masks(item.out) for item in runs)
    assert first == again
    assert first != other
    assert [item.mean_dice for item in runs[0].results] == [item.mean_dice for item in runs[1].results]


def test_global_random_state_plays_no_part(volumes, weights, tmp_path):
    torch.manual_seed(1)
    first = small.run(volumes, weights, tmp_path / "1")
    torch.manual_seed(2)
    np.random.seed(2)
    assert small.masks(small.run(volumes, weights, tmp_path / "2").out) == small.masks(first.out)


def in_turn(refs, load, count):
    """Read each case when it is wanted, on the main thread: what no worker at all would do."""
    for ref in refs:
        try:
            yield load(ref)
        except TeslaMedError as error:
            yield Failure(ref, error)


@pytest.mark.parametrize("options", [{}, {"reset": "site"}, {"protocol": "N-M"}], ids=str)
def test_reading_ahead_changes_no_byte(volumes, weights, tmp_path, monkeypatch, options):
    options = {"seed": 3, "save_probs": True} | options
    first = small.run(volumes, weights, tmp_path / "first", **options)
    monkeypatch.setattr("tesla_med.adapt.read_ahead", in_turn)
    second = small.run(volumes, weights, tmp_path / "second", **options)
    for part in ("masks", "source_masks", "probs", "checkpoints"):
        assert small.files_below(first.out / part) == small.files_below(second.out / part) != {}


@pytest.mark.parametrize(("protocol", "method"), [("N-O", "tesla"), ("N-M", "tesla"), ("N-O", "bn")])
def test_reset_case_makes_cases_independent(protocol, method, weights, tmp_path):
    small.make_volumes(tmp_path / "both", 1, seed=9, names=["Case0B"], name="hard")
    small.make_volumes(tmp_path / "both", 1, seed=1, names=["Case0Z"])
    small.make_volumes(tmp_path / "alone", 1, seed=1, names=["Case0Z"])
    options = {"protocol": protocol, "method": method, "reset": "case"}
    both = small.run(tmp_path / "both", weights, tmp_path / "1", **options)
    alone = small.run(tmp_path / "alone", weights, tmp_path / "2", **options)
    place = "masks/Case0Z_mask.nii.gz"
    assert small.masks(both.out)[place] == small.masks(alone.out)[place]
    assert both.results[1].scores == alone.results[0].scores


def test_reset_site_carries_state_on(weights, tmp_path):
    small.make_volumes(tmp_path / "both", 1, seed=9, names=["Case0B"], name="hard")
    small.make_volumes(tmp_path / "both", 1, seed=1, names=["Case0Z"])
    small.make_volumes(tmp_path / "alone", 1, seed=1, names=["Case0Z"])
    both, alone = (
        small.run(tmp_path / name, weights, tmp_path / f"{name}-out", reset="site")
        for name in ("both", "alone")
    )
    place = "masks/Case0Z_mask.nii.gz"
    assert small.masks(both.out)[place] != small.masks(alone.out)[place]


def test_references_cannot_reach_the_method(volumes, weights, tmp_path):
    first = small.run(volumes, weights, tmp_path / "1", protocol="N-M")
    rng = np.random.default_rng(0)
    for path in volumes.glob("*_segmentation.nii.gz"):
        small.copy_image(path, path, lambda mask: rng.integers(0, 2, mask.shape), dtype=np.uint8)
    garbage = small.run(volumes, weights, tmp_path / "2", protocol="N-M")
    for path in volumes.glob("*_segmentation.nii.gz"):
        path.unlink()
    without = small.run(volumes, weights, tmp_path / "3", protocol="N-M")
    assert small.masks(first.out) == small.masks(garbage.out) == small.masks(without.out)
    assert first.mean_dice > garbage.mean_dice
    assert without.mean_dice is None
    assert without.mean_dice_source is None


def test_steps_rise_over_the_whole_run(volumes, weights, tmp_path, monkeypatch):
    from tesla_med.reports.table import TableReport

    seen = []
    monkeypatch.setattr(TableReport, "step", lambda self, step, scalars: seen.append((step, dict(scalars))))
    small.run(volumes, weights, tmp_path / "out", reset="case")
    assert [step for step, _ in seen] == [0, 1, 2, 3]
    assert all(FLIPPED in scalars for _, scalars in seen)
    assert [any(tag.startswith("policy/") for tag in scalars) for _, scalars in seen] == [False, True] * 2


# ------------------------------------------------------------ exact geometry


class Threshold(Network):
    """Foreground where the scaled intensity is above one half: the mask is known beforehand."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    @classmethod
    def build(cls, params, channels, classes):
        return cls()

    @property
    def head(self):
        return self

    def logits(self, images):
        return torch.cat([-images, images], dim=1) * 50 * self.weight


@pytest.fixture
def stub(monkeypatch, tmp_path):
    """Weights of a threshold network."""
    path = tmp_path / "stub.safetensors"
    path.write_bytes(b"stub")

    def load(_, pipeline, overrides=()):
        return LoadedModel(Threshold(), pipeline, None, ())

    monkeypatch.setattr("tesla_med.models.loading.load_model", load)
    return path


def corner_phantom():
    """An L-shape off centre with a marker in one corner: no turn or flip maps it onto itself."""
    shape = np.zeros((11, 9, 5), np.int16)
    shape[2:8, 2, 1:3] = 100
    shape[2, 2:6, 1:3] = 100
    shape[0, 0, 0] = 100
    shape[8:10, 6, 4] = 100
    affine = np.diag([0.7, 0.9, 3.3, 1.0])
    affine[:3, 3] = (-12.3, 40.1, 7.7)
    return shape, affine


@pytest.mark.parametrize(("oblique", "orientation"), [(0.0, "RAS"), (20.0, "LPI"), (20.0, "ASR")])
def test_masks_are_exact_in_all_48_orientations(stub, tmp_path, oblique, orientation):
    shape, affine = corner_phantom()
    angle = np.deg2rad(oblique)
    turn = np.eye(4)
    turn[1:3, 1:3] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    expected = {}
    for axes in itertools.permutations(("LR", "PA", "IS")):
        for ends in itertools.product((0, 1), repeat=3):
            codes = "".join(axis[end] for axis, end in zip(axes, ends, strict=True))
            change = ornt_transform(io_orientation(affine), axcodes2ornt(codes))
            array = nib.apply_orientation(shape, change)
            name = f"sub/Case{codes}"
            save_image(
                tmp_path / "nii" / f"{name}.nii.gz",
                array,
                turn @ affine @ inv_ornt_aff(change, shape.shape),
                dtype=np.int16,
            )
            expected[name] = array > 0
    assert len(expected) == 48
    overrides = (
        *("preprocessing.size=null", f"preprocessing.orientation={orientation}"),
        *("reports=[]", "keep_largest=false"),
    )
    result = adapt_site(
        small.site(), tmp_path / "nii", weights=stub, out=tmp_path / "out", device="cpu",
        method="source", overrides=overrides,
    )  # fmt: skip
    assert {item.case for item in result.results} == set(expected)
    assert {item.status for item in result.results} == {"ok"}
    for name, truth in expected.items():
        assert np.array_equal(small.labels(result.out, name) > 0, truth), name


# ------------------------------------------------------------ one bad case among good ones


def run_beside_good(volumes, weights, out, **options):
    """Run, and check that Case00 and Case02 are what they are without Case01."""
    result = small.run(volumes, weights, out, **options)
    clean = out.parent / "clean"
    small.make_volumes(clean, 3)
    for path in clean.glob("Case01*"):
        path.unlink()
    alone = small.run(clean, weights, out.parent / "clean-out", **options)
    for part, name in itertools.product(("masks", "source_masks"), ("Case00", "Case02")):
        place = f"{part}/{name}_mask.nii.gz"
        assert small.masks(result.out)[place] == small.masks(alone.out)[place]
    assert [result.results[0].scores, result.results[2].scores] == [item.scores for item in alone.results]
    return result


@pytest.fixture
def three(tmp_path):
    small.make_volumes(tmp_path / "nii", 3)
    return tmp_path / "nii"


@pytest.mark.parametrize(("protocol", "reset"), [("N-O", "case"), ("N-O", "site"), ("N-M", "site")])
def test_truncated_volume(three, weights, tmp_path, protocol, reset):
    small.truncate(three / "Case01.nii.gz")
    result = run_beside_good(three, weights, tmp_path / "out", protocol=protocol, reset=reset)
    assert [item.status for item in result.results] == ["ok", "failed", "ok"]
    assert "Case01.nii.gz" in result.results[1].reason
    assert "truncated" in result.results[1].reason
    assert result.failed == (result.results[1],)
    assert not [name for name in small.masks(result.out) if "Case01" in name]
    rows = (result.out / "report/metrics.csv").read_text().splitlines()
    assert rows[2].startswith("Case01,X,tesla")
    assert ",,,,,,,,failed,,,," in rows[2]


def test_all_nan_volume(three, weights, tmp_path):
    path = three / "Case01.nii.gz"
    small.copy_image(path, path, lambda image: np.full(image.shape, np.nan), dtype=np.float32)
    result = run_beside_good(three, weights, tmp_path / "out")
    assert [item.status for item in result.results] == ["ok", "failed", "ok"]
    assert "none of its 4096 voxels is a finite number" in result.results[1].reason


@pytest.mark.parametrize("protocol", ["N-O", "N-M"])
def test_blank_volume(three, weights, tmp_path, protocol):
    path = three / "Case01.nii.gz"
    small.copy_image(path, path, lambda image: np.full(image.shape, 7))
    result = run_beside_good(three, weights, tmp_path / "out", protocol=protocol)
    blank = result.results[1]
    assert (blank.status, blank.used, blank.slices) == ("blank", "source", 0)
    assert not small.labels(result.out, "Case01").any()
    assert nib.load(result.out / "masks/Case01_mask.nii.gz").shape == (32, 32, 4)
    assert blank.mean_dice == 0
    assert not result.failed


def test_reference_on_a_shifted_grid(three, weights, tmp_path):
    path = three / "Case01_segmentation.nii.gz"
    small.copy_image(path, path, shift_mm=0.3, dtype=np.uint8)
    result = run_beside_good(three, weights, tmp_path / "out")
    case = result.results[1]
    assert case.status == "unscored"
    assert case.used == "adapted"
    assert "0.3 mm" in case.reason
    assert case.mean_dice is None
    assert case.scores[0].voxels > 0
    assert (result.out / "masks/Case01_mask.nii.gz").is_file()
    assert result.failed == (case,)


def test_reference_within_tolerance_is_scored(volumes, weights, tmp_path):
    path = volumes / "Case01_segmentation.nii.gz"
    small.copy_image(path, path, shift_mm=1e-4, dtype=np.uint8)
    assert small.run(volumes, weights, tmp_path / "out", method="source").results[1].mean_dice is not None


def layered(*layers, combine="paint"):
    return small.site(files=Files(image=("Case*.nii.gz",), masks=layers, combine=combine))


def test_reference_with_an_unknown_label(three, weights, tmp_path):
    path = three / "Case01_segmentation.nii.gz"
    small.copy_image(path, path, lambda mask: mask * 3, dtype=np.uint8)
    own = layered(MaskLayer(pattern="*_segmentation.nii.gz"))
    result = run_beside_good(three, weights, tmp_path / "out", site=own)
    assert result.results[1].status == "unscored"
    assert "label 3" in result.results[1].reason


def test_one_mask_layer_missing(volumes, weights, tmp_path):
    small.copy_image(volumes / "Case00_segmentation.nii.gz", volumes / "Case00_second.nii.gz", dtype=np.uint8)
    layers = (
        MaskLayer(pattern="*_segmentation.nii.gz", write=1),
        MaskLayer(pattern="*_second.nii.gz", write=1),
    )
    result = small.run(volumes, weights, tmp_path / "out", site=layered(*layers), method="source")
    assert [item.status for item in result.results] == ["ok", "unscored"]
    assert "*_second.nii.gz" in result.results[1].reason
    assert "Case01" in result.results[1].reason


def test_region_mask_missing(three, weights, tmp_path):
    (three / "Case01_segmentation.nii.gz").unlink()
    region = Region(kind="mask", size_mm=100, pattern="*_segmentation.nii.gz")
    result = run_beside_good(three, weights, tmp_path / "out", site=small.site(region=region))
    assert [item.status for item in result.results] == ["ok", "failed", "ok"]
    assert "region" in result.results[1].reason
    assert "Case01" in result.results[1].reason
    assert any("reference mask" in note for note in result.notes)


@pytest.mark.parametrize("error", [MemoryError("6 GiB"), RuntimeError("bug"), KeyError("bug")])
def test_any_exception_while_loading(three, weights, tmp_path, monkeypatch, error):
    original = Volumes.load

    def load(self, ref):
        if ref.name == "Case01":
            raise error
        return original(self, ref)

    monkeypatch.setattr(Volumes, "load", load)
    result = run_beside_good(three, weights, tmp_path / "out", protocol="N-M")
    assert [item.status for item in result.results] == ["ok", "failed", "ok"]
    assert "Case01.nii.gz" in result.results[1].reason
    assert ("memory" if isinstance(error, MemoryError) else type(error).__name__) in result.results[1].reason


def fail_at_update(monkeypatch, number, change):
    """Make TeSLA's update ``number`` (from 1, over the run) go through ``change``."""
    original, count = TeSLA.adapt, itertools.count(1)

    def adapt(self, images):
        scalars = original(self, images)
        return change(self, scalars) if next(count) == number else scalars

    monkeypatch.setattr(TeSLA, "adapt", adapt)


def raise_bug(method, scalars):
    raise RuntimeError("device ran out of patience")


def nan_loss(method, scalars):
    return {**scalars, FLIPPED: torch.tensor(float("nan"))}


def nan_weights(method, scalars):
    with torch.no_grad():
        for parameter in (*method.student.parameters(), *method.teacher.parameters()):
            parameter.fill_(float("nan"))
    return scalars


def without_second(three, weights, folder, reset):
    """The run as it would be if Case01 had never been there."""
    for path in three.iterdir():
        if "Case01" not in path.name:
            (folder / "two").mkdir(exist_ok=True)
            shutil.copy(path, folder / "two" / path.name)
    return small.run(folder / "two", weights, folder / "clean", reset=reset)


@pytest.mark.parametrize("reset", ["case", "site"])
def test_exception_while_adapting(three, weights, tmp_path, monkeypatch, reset):
    clean = without_second(three, weights, tmp_path, reset)
    fail_at_update(monkeypatch, 4, raise_bug)  # second of two updates of the second case
    result = small.run(three, weights, tmp_path / "out", reset=reset)
    assert [item.status for item in result.results] == ["ok", "failed", "ok"]
    assert "Case01.nii.gz" in result.results[1].reason
    assert "patience" in result.results[1].reason
    assert not [
        name for name in small.files_below(tmp_path / "out") if "Case01" in name and "cases" not in name
    ]
    place = "masks/Case02_mask.nii.gz"  # nothing of the broken case is left
    assert small.masks(result.out)[place] == small.masks(clean.out)[place]


@pytest.mark.parametrize("change", [nan_loss, nan_weights])
@pytest.mark.parametrize("reset", ["case", "site"])
def test_values_that_are_not_finite(three, weights, tmp_path, monkeypatch, change, reset):
    clean = without_second(three, weights, tmp_path, reset)
    fail_at_update(monkeypatch, 4, change)
    result = small.run(three, weights, tmp_path / "out", reset=reset)
    assert [item.status for item in result.results] == ["ok", "collapsed", "ok"]
    assert [item.used for item in result.results] == ["adapted", "source", "adapted"]
    assert "not finite" in result.results[1].reason
    masks = small.masks(result.out)
    assert masks["masks/Case01_mask.nii.gz"] == masks["source_masks/Case01_mask.nii.gz"]
    assert result.results[1].mean_dice == result.results[1].mean_dice_source
    assert masks["masks/Case02_mask.nii.gz"] == small.masks(clean.out)["masks/Case02_mask.nii.gz"]
    assert not result.failed


@pytest.mark.parametrize("reset", ["case", "site"])
def test_a_loss_that_is_not_finite_leaves_no_trace(three, weights, tmp_path, monkeypatch, reset):
    clean = without_second(three, weights, tmp_path, reset)
    original, count = losses.distillation, itertools.count()

    def loss(*arguments):  # the first of the two updates of the second case
        return original(*arguments) * (float("nan") if next(count) == 2 else 1.0)

    monkeypatch.setattr(losses, "distillation", loss)
    result = small.run(three, weights, tmp_path / "out", reset=reset)
    assert [item.status == "collapsed" for item in result.results] == [False, True, False]
    assert (result.results[1].used, result.results[1].share) == ("source", 0.0)
    assert "not finite" in result.results[1].reason
    ours, wanted = small.masks(result.out), small.masks(clean.out)
    assert ours["masks/Case01_mask.nii.gz"] == ours["source_masks/Case01_mask.nii.gz"]
    assert {name: ours[name] for name in wanted} == wanted


@pytest.mark.parametrize("change", [nan_loss, nan_weights])
def test_site_passes_that_are_not_finite(three, weights, tmp_path, monkeypatch, change):
    fail_at_update(monkeypatch, 3, change)
    result = small.run(three, weights, tmp_path / "out", protocol="N-M")
    assert {item.status for item in result.results} == {"collapsed"}
    assert small.files_below(tmp_path / "out" / "source_masks") == {
        name: data
        for name, data in small.files_below(tmp_path / "out" / "masks").items()
        if name != "labels.json"
    }
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_one_prediction_not_finite_after_site_passes(three, weights, tmp_path, monkeypatch):
    """The other cases stay adapted, and say so truthfully."""
    clean = small.run(three, weights, tmp_path / "clean", protocol="N-M")
    original, count = TeSLA.predict, itertools.count(1)

    def predict(self, images):
        probs = original(self, images)
        return probs * float("nan") if next(count) == 2 else probs

    monkeypatch.setattr(TeSLA, "predict", predict)
    result = small.run(three, weights, tmp_path / "out", protocol="N-M")
    assert [item.status for item in result.results] == ["ok", "collapsed", "ok"]
    for name in ("Case00", "Case02"):
        place = f"masks/{name}_mask.nii.gz"
        assert small.masks(result.out)[place] == small.masks(clean.out)[place]
    card = (result.out / "checkpoints/adapted.json").read_text()
    assert (
        json.loads(card)["extra"]["updates"]
        == json.loads((clean.out / "checkpoints/adapted.json").read_text())["extra"]["updates"]
    )


def test_scoring_that_breaks_leaves_the_mask(volumes, weights, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise MemoryError

    monkeypatch.setattr(scoring.metrics, "score_case", broken)
    result = small.run(volumes, weights, tmp_path / "out", method="source")
    assert [item.status for item in result.results] == ["unscored", "unscored"]
    assert "Case00.nii.gz" in result.results[0].reason
    assert small.labels(result.out, "Case00").any()


def test_empty_prediction_is_a_result(stub, tmp_path):
    small.make_volumes(tmp_path / "nii", 1)
    path = tmp_path / "nii/Case00.nii.gz"
    small.copy_image(path, path, lambda image: image * 0 + np.arange(4))
    overrides = ("preprocessing.model_range=[-9, -1]", "reports=[table]")
    result = adapt_site(
        small.site(), tmp_path / "nii", weights=stub, out=tmp_path / "out", device="cpu", method="source",
        overrides=overrides,
    )  # fmt: skip
    assert result.results[0].status == "empty"
    assert result.results[0].mean_dice == 0
    assert not small.labels(result.out, "Case00").any()


# ------------------------------------------------------------ nothing is touched where nothing can be done


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"overrides": ("methods.tesla.no_such_key=1",)}, ConfigError),
        ({"overrides": ("methods.tesla.op_set=no_such_set",)}, ConfigError),
        ({"overrides": ("reports=[no_such_report]",)}, ConfigError),
        ({"method": "bn", "overrides": ("methods.bn.target_share=7",)}, ConfigError),
        ({"reset": "sometimes"}, ConfigError),
        ({"device": "tpu"}, ConfigError),
        ({"protocol": "Y-O"}, ConfigError),
        ({"weights": "missing.safetensors"}, CheckpointError),
    ],
)
def test_an_earlier_run_survives_a_wrong_overwrite(volumes, weights, tmp_path, options, kind):
    out = tmp_path / "out"
    small.run(volumes, weights, out, method="source")
    before = small.files_below(out)
    arguments = {"weights": weights, "device": "cpu", **options}
    arguments["overrides"] = (*small.SMALL, *small.FEW, *arguments.get("overrides", ()))
    with pytest.raises(kind):
        adapt_site(small.site(), volumes, out=out, overwrite=True, **arguments)
    assert small.files_below(out) == before


def test_a_model_that_cannot_be_adapted_leaves_no_folder(volumes, tmp_path, stub):
    with pytest.raises(AdaptationError, match="batch-norm"):
        adapt_site(small.site(), volumes, weights=stub, out=tmp_path / "out", device="cpu", method="bn")
    assert not (tmp_path / "out").exists()


def test_overwriting_may_not_remove_what_the_run_reads(volumes, weights, tmp_path):
    out = tmp_path / "out"
    small.run(volumes, weights, out)
    before = small.files_below(out)
    with pytest.raises(OutputError, match="would read"):
        small.run(volumes, out / "checkpoints/Case00.safetensors", out, overwrite=True)
    with pytest.raises(OutputError, match="would read"):
        small.run(out / "masks", weights, out, overwrite=True, site=small.site(files=Files(image=("*",))))
    assert small.files_below(out) == before


def test_overwrite_leaves_nothing_of_the_earlier_run(three, weights, tmp_path):
    out = tmp_path / "out"
    small.run(three, weights, out, save_probs=True)
    (out / "notes.txt").write_text("mine")
    for path in three.glob("Case02*"):
        path.unlink()
    small.run(three, weights, out, method="source", overwrite=True)
    found = small.files_below(out)
    assert not [name for name in found if "Case02" in name or name.startswith(("probs", "checkpoints"))]
    assert found["notes.txt"] == b"mine"


# ------------------------------------------------------------ names and places


def test_odd_names_and_subfolders_are_mirrored(weights, tmp_path):
    volumes = tmp_path / "Größe 数据" / "nii"
    small.make_volumes(volumes / "Füße 1", 1, names=["Case Ä 患者"])
    small.make_volumes(volumes / "b1" / "c1", 1, names=["Case.v1.2"])
    small.make_volumes(volumes, 1, names=["Case Ä 患者"])
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    out = tmp_path / "link" / "Läufe 一"
    result = small.run(volumes, weights, out, reports=(), save_probs=True, save_uncertainty=True)
    names = ["Case Ä 患者", "Füße 1/Case Ä 患者", "b1/c1/Case.v1.2"]
    assert sorted(item.case for item in result.results) == sorted(names)
    for name in names:
        for place in (
            *(f"{part}/{name}_mask.nii.gz" for part in ("masks", "source_masks")),
            *(f"probs/{name}_prob.nii.gz", f"uncertainty/{name}_entropy.nii.gz"),
            *(f"checkpoints/{name}.safetensors", f"checkpoints/{name}.json"),
        ):
            assert (tmp_path / "real" / "Läufe 一" / place).is_file(), place
    html = (out / "report/report.html").read_text(encoding="utf-8")
    assert "Füße 1/Case Ä 患者" in html
    for name in names:
        content = read_slices(out / f"report/slices/{name}.js")
        assert len(content["slices"]) == small.SLICES
        assert content["layers"][-1] == "entropy"


def test_one_image(volumes, weights, tmp_path):
    result = small.run(volumes / "Case01.nii.gz", weights, tmp_path / "out", method="source")
    assert [item.case for item in result.results] == ["Case01"]
    assert result.mean_dice is not None


@pytest.mark.slow
def test_many_cases_hold_few_volumes(weights, tmp_path, monkeypatch):
    """What a case loads is let go: the number of live volumes does not grow with the cases."""
    import gc
    import weakref

    small.make_volumes(tmp_path / "nii", 8)
    alive: list[weakref.ref] = []
    most = []
    original = Volumes.load

    def load(self, ref):
        loaded = original(self, ref)
        alive.append(weakref.ref(loaded.content.volume))
        gc.collect()
        most.append(sum(reference() is not None for reference in alive))
        return loaded

    monkeypatch.setattr(Volumes, "load", load)
    small.run(tmp_path / "nii", weights, tmp_path / "out", method="source", reports=())
    assert len(most) == 8
    assert max(most) <= 3


def test_a_plan_can_be_run_again(volumes, weights, tmp_path):
    texts = (*small.SMALL, *small.FEW, *small.BARE)
    pipeline = load_pipeline("prostate", texts)
    request = RunRequest(
        small.site(), volumes, weights=weights, pipeline=pipeline, device="cpu", out=tmp_path / "out"
    )
    plan = make_plan(request)
    first = small.masks(run_plan(plan).out)
    assert small.masks(run_plan(plan, overwrite=True).out) == first


def test_progress_ends_complete(volumes, weights, tmp_path):
    told = []
    small.run(volumes, weights, tmp_path / "out", protocol="N-M", progress=lambda *item: told.append(item))
    assert told[-1] == ("reports", 1, 1)
    assert ("cases", 2, 2) in told
    assert ("passes over the site", 2, 2) in told
    assert all(done <= total for _, done, total in told)


def test_tiny_stack_of_one_slice(weights, tmp_path):
    small.make_volumes(tmp_path / "nii", 1, slices=1)
    result = small.run(tmp_path / "nii", weights, tmp_path / "out")
    assert result.results[0].status in ("ok", "empty")
    assert Path(result.out / "masks/Case00_mask.nii.gz").is_file()


def test_a_run_that_breaks_off_leaves_no_file_open_and_no_thread(volumes, weights, tmp_path, monkeypatch):
    import threading

    from tesla_med.tasks import volumes as volumes_module

    def full(*_):
        raise OutputError("disk full")

    small.run(volumes, weights, tmp_path / "out", reports=())
    monkeypatch.setattr(volumes_module, "encode_mask", full)
    handles = Path("/proc/self/fd")

    def held():
        return threading.active_count(), len(list(handles.iterdir())) if handles.is_dir() else 0

    before = held()
    for _ in range(3):
        with pytest.raises(OutputError, match="disk full"):
            small.run(volumes, weights, tmp_path / "out", reports=(), overwrite=True)
    assert held() == before


def test_a_run_without_any_adaptation_leaves_no_adapted_weights_behind(
    volumes, weights, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    small.run(volumes, weights, out, protocol="N-M")
    assert (out / "checkpoints/adapted.safetensors").is_file()
    fail_at_update(monkeypatch, 1, nan_loss)
    small.run(volumes, weights, out, protocol="N-M", overwrite=True)
    assert not (out / "checkpoints").exists()


# ------------------------------------------------------------ the guard in a whole run

GUARDED = ("guard.enabled=true", "keep_largest=true")


def forced(monkeypatch, *names, **changes):
    """Let the guard take these candidates, case by case."""
    given = iter(names)

    def judge(signals, config):
        name = next(given)
        change = {"reason": f"takes {name}", "collapsed": name == "source", "signals": dict(signals)}
        return replace(VERDICTS[name], **change, **changes)

    monkeypatch.setattr("tesla_med.engine.guard.judge", judge)


def test_what_was_used_and_why_is_everywhere(volumes, weights, tmp_path, monkeypatch):
    forced(monkeypatch, "half", "source")
    result = small.run(
        volumes, weights, tmp_path / "out", overrides=GUARDED, reports=("reports=[table, html]",)
    )
    first, second = result.results
    assert [(item.used, item.share, item.status) for item in (first, second)] == [
        ("partial", 0.0, "ok"),
        ("source", 0.0, "collapsed"),
    ]
    cases = small.record(result.out)["cases"]
    assert [item["used"] for item in cases] == ["partial", "source"]
    assert cases[0]["reason"] == "takes half"
    assert 0 <= cases[0]["signals"]["agreement_source_adapted"] <= 1
    rows = (result.out / "report/metrics.csv").read_text().splitlines()
    assert ",partial,ok,0,True,,takes half" in rows[1]
    assert ",source,collapsed,0,True,,takes source" in rows[2]
    page = (result.out / "report/report.html").read_text()
    assert "partly adapted, normalisation statistics only" in page
    assert "takes half" in page
    source = small.labels(result.out, "Case01", "source_masks")
    assert np.array_equal(small.labels(result.out, "Case01"), source)
    weights_files = sorted(path.name for path in (result.out / "checkpoints").iterdir())
    assert weights_files == ["Case00.json", "Case00.safetensors"]


def test_what_cannot_be_trusted_is_said_everywhere_and_the_run_ends_well(
    volumes, weights, tmp_path, monkeypatch
):
    forced(monkeypatch, "half", "adapted", trusted=False)
    result = small.run(
        volumes, weights, tmp_path / "out", overrides=GUARDED, reports=("reports=[table, html]",)
    )
    assert [item.trusted for item in result.results] == [False, False]
    assert result.complete
    assert [record["trusted"] for record in small.record(result.out)["cases"]] == [False, False]
    assert [text for _, text in result.remarks] == ["takes half", "takes adapted"]
    page = (result.out / "report/report.html").read_text()
    assert "2 not trusted" in page
    assert ",False,,takes half" in (result.out / "report/metrics.csv").read_text()


def group_norm_weights(folder):
    pipeline = load_pipeline("prostate", (*small.SMALL, "model.params.norm=group"))
    torch.manual_seed(0)
    path = folder / "group.safetensors"
    save_checkpoint(path, build_model(pipeline).eval(), make_card(pipeline, ("X0",)))
    return path


AVERAGED = ("methods.tesla.predict_views=3", "methods.tesla.neighbour_share=0.33")


@pytest.mark.parametrize(
    ("names", "texts"),
    [
        (("half", "adapted"), ()),
        (("own", "half"), ()),
        (("part", "adapted"), ()),
        (("half", "adapted"), AVERAGED),
    ],
)
def test_partial_weights_repeat_the_masks(names, texts, volumes, weights, tmp_path, monkeypatch):
    forced(monkeypatch, *names)
    out = tmp_path / "out"
    norm = ("model.params.norm=group",) if "part" in names else ()
    if norm:
        weights = group_norm_weights(tmp_path)
    small.run(volumes, weights, out, overrides=(*GUARDED, *norm, *texts))
    for name in ("Case00", "Case01"):
        checkpoint = out / f"checkpoints/{name}.safetensors"
        again = predict(
            volumes,
            checkpoint,
            site=small.site(),
            out=tmp_path / name,
            device="cpu",
            overrides=(*small.BARE, "keep_largest=true"),
        )
        assert np.array_equal(small.labels(again.out, name), small.labels(out, name))


def test_no_guard_and_guard_decide_over_the_pipeline(volumes, weights, tmp_path):
    off = small.run(volumes, weights, tmp_path / "off", overrides=GUARDED, guard=False)
    on = small.run(volumes, weights, tmp_path / "on", guard=True)
    assert all(item.share == 1.0 and not item.signals for item in off.results)
    assert all(item.signals for item in on.results)


def test_a_guarded_run_repeats_bit_for_bit(volumes, weights, tmp_path):
    for name in ("a", "b"):
        small.run(volumes, weights, tmp_path / name, overrides=GUARDED, protocol="N-M")
    assert small.masks(tmp_path / "a") == small.masks(tmp_path / "b")


def test_recalibration_changes_probabilities_and_no_mask(volumes, weights, tmp_path):
    for name, change in (("off", ()), ("on", ("recalibrate=true",))):
        small.run(volumes, weights, tmp_path / name, overrides=change, save_probs=True)
    assert small.masks(tmp_path / "off") == small.masks(tmp_path / "on")
    cases = small.record(tmp_path / "on")["cases"]
    assert all(0.5 <= item["signals"]["temperature"] <= 4 for item in cases)
    assert any(item["signals"]["temperature"] != 1 for item in cases)
    before, after = (
        np.asarray(nib.load(tmp_path / f"{name}/probs/Case00_prob.nii.gz").dataobj) for name in ("off", "on")
    )
    assert not np.allclose(before, after)
    assert np.allclose(after.sum(axis=-1), 1, atol=1e-5)
