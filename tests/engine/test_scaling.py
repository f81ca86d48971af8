"""The choice of the scaling: its rules, that it repeats what is configured by hand, and whole runs."""

import nibabel as nib
import numpy as np
import pytest
import small_site as small
import torch

from tesla_med.config.models import Intensity, ScalingChoice
from tesla_med.engine.scaling import TRAINED, Chooser, nearest, steadiest
from tesla_med.models.normalisation import running_statistics
from tesla_med.models.unet import UNet
from tesla_med.tta.base import MethodContext, make_method
from tesla_med.types import Ref, Unit

CONFIG = ScalingChoice(candidates=(Intensity(scaling="percentile"),))
CHOICE = "scaling.candidates=[{scaling: minmax}, {scaling: percentile, lower: 1, upper: 95}]"
NAME = "percentiles 1 to 95"


@pytest.fixture(scope="module")
def small_weights(one_thread, tmp_path_factory):
    return small.train_weights(tmp_path_factory.mktemp("small"))


def source_of(norm="batch"):
    torch.manual_seed(0)
    model = UNet(1, 2, 4, norm).eval()
    return make_method("source", model, {}, MethodContext(torch.device("cpu"), seed=0))


@pytest.mark.parametrize(
    ("distances", "taken"),
    [
        ({TRAINED: 0.6, "a": 0.05, "b": 0.1}, "a"),
        ({TRAINED: 0.6, "a": 0.31, "b": 0.4}, ""),  # not much nearer
        ({TRAINED: 0.09, "a": 0.01, "b": 0.4}, ""),  # near enough
        ({TRAINED: 0.05, "a": 0.05, "b": 0.05}, ""),
    ],
)
def test_another_scaling_must_be_much_nearer(distances, taken):
    found = nearest(distances, CONFIG)
    assert found.name == taken
    assert found.signals == {f"scaling_distance_{name}": value for name, value in distances.items()}
    assert bool(found.reason) == bool(taken)
    if taken:
        assert f"scaled by {taken}" in found.reason
        assert "0.05 instead of 0.60" in found.reason


@pytest.mark.parametrize(("other", "taken"), [(0.9, "a"), (0.4, "")])
def test_without_batch_norm_another_scaling_must_be_much_steadier(other, taken):
    found = steadiest({TRAINED: 0.3, "a": other}, CONFIG)
    assert found.name == taken
    assert bool(found.reason) == bool(taken)


def trained_on(images):
    """A source whose running statistics are those of the images."""
    source = source_of()
    with torch.no_grad():
        for layer in source.model.modules():
            if isinstance(layer, torch.nn.BatchNorm2d):
                layer.train()
                layer.momentum = 1.0
        source.model(2 * images - 1)
        source.model.eval()
    return source


def test_the_scaling_of_the_training_is_recognised(make_images):
    images = make_images(6, 32, 32)
    source = trained_on(images)
    before = [item.clone() for pair in running_statistics(source.model) for item in pair]
    dark = images * 0.05
    assert Chooser(CONFIG, source).choose({TRAINED: images, "a": dark}).name == ""
    assert Chooser(CONFIG, source).choose({TRAINED: dark, "a": images}).name == "a"
    now = [item for pair in running_statistics(source.model) for item in pair]
    assert all(torch.equal(one, two) for one, two in zip(before, now, strict=True))


def test_the_unit_carries_what_was_chosen_and_is_chosen_for_once(make_images, monkeypatch):
    images = make_images(6, 32, 32)
    chooser = Chooser(CONFIG, trained_on(images))
    unit = Unit(Ref("x", ("x",), None), images * 0.05, None, scalings={"a": images})
    taken = chooser(unit)
    assert torch.equal(taken.images, images)
    assert (taken.scaling.name, dict(taken.scalings)) == ("a", {})
    monkeypatch.setattr(chooser, "choose", lambda _: pytest.fail("it was chosen before"))
    assert torch.equal(chooser(unit).images, images)
    nothing = Unit(Ref("y", ("y",), None), images, None)
    assert chooser(nothing) is nothing


@pytest.mark.parametrize("norm", ["instance", "group"])
def test_networks_without_batch_norm_are_asked_for_their_masks(norm, make_images):
    images = make_images(4, 32, 32)
    chooser = Chooser(CONFIG.model_copy(update={"unsteady": 1.0}), source_of(norm))
    found = chooser.choose({TRAINED: images, "a": images**2})
    assert {f"scaling_consistency_{TRAINED}", "scaling_consistency_a"} == set(found.signals)
    assert all(0 <= value <= 1 for value in found.signals.values())
    steady = Chooser(CONFIG.model_copy(update={"unsteady": 0.0}), source_of(norm))
    assert list(steady.choose({TRAINED: images, "a": images**2}).signals) == [
        f"scaling_consistency_{TRAINED}"
    ]


# ------------------------------------------------------------ whole runs


@pytest.fixture
def volumes(tmp_path):
    """Two cases; the second has a coil, some voxels that are 40 times as bright."""
    paths = small.make_volumes(tmp_path / "nii", 2, name="source")
    image = nib.load(paths[1])
    array = np.asarray(image.dataobj, dtype=np.float32)
    array[:2, :2] = 40 * array.max()
    nib.save(nib.Nifti1Image(array, image.affine), paths[1])
    return tmp_path / "nii"


@pytest.mark.parametrize(
    ("method", "protocol"), [("source", "N-O"), ("bn", "N-O"), ("tesla", "N-O"), ("tesla", "N-M")]
)
def test_every_method_starts_from_the_chosen_scaling(method, protocol, volumes, small_weights, tmp_path):
    options = {"method": method, "protocol": protocol, "reset": "case" if protocol == "N-O" else "site"}
    result = small.run(volumes, small_weights, tmp_path / "out", overrides=(CHOICE,), **options)
    first, second = result.results
    assert (first.scaling, second.scaling) == ("min-max", NAME)
    assert "scaling_distance_trained" in second.signals
    assert any(f"scaled by {NAME}" in text for text in second.notes)
    assert not any("scaled by" in text for text in first.notes)
    record = small.record(result.out)["cases"][1]
    assert record["scaling"] == NAME
    assert NAME in (result.out / "report/metrics.csv").read_text()
    if protocol == "N-O":
        named = ("preprocessing.intensity={scaling: percentile, lower: 1, upper: 95}",)
        alone = small.run(volumes, small_weights, tmp_path / "named", overrides=named, **options)
        assert np.array_equal(small.labels(alone.out, "Case01"), small.labels(result.out, "Case01"))
        assert alone.results[1].scaling == ""


def test_a_named_scaling_is_not_chosen(volumes, small_weights, tmp_path):
    named = (CHOICE, "preprocessing.intensity.scaling=minmax")
    result = small.run(volumes, small_weights, tmp_path / "out", overrides=named, method="source")
    assert {item.scaling for item in result.results} == {""}


def test_the_weights_of_a_case_remember_its_scaling(volumes, small_weights, tmp_path):
    from tesla_med.actions.predict import predict
    from tesla_med.models.checkpoint import read_card

    result = small.run(volumes, small_weights, tmp_path / "out", overrides=(CHOICE,), reset="case")
    path = result.out / "checkpoints/Case01.safetensors"
    assert read_card(path).preprocessing.intensity == Intensity(scaling="percentile", lower=1, upper=95)
    again = predict(
        volumes,
        path,
        site=small.site(),
        out=tmp_path / "again",
        device="cpu",
        overrides=(*small.BARE, CHOICE),
    )
    assert np.array_equal(small.labels(again.out, "Case01"), small.labels(result.out, "Case01"))
