"""Images far from what the weights were trained on are named, with the figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tesla_med.config.models import Region
from tesla_med.prepare.acquisition import Acquisition, acquisition_of, differences, united
from tesla_med.types import Volume

WHOLE = Region()


def volume(shape, spacing, *, axes=(0, 1, 2), nominal=False):
    """Make a volume whose file axis ``axes[k]`` runs along world axis k."""
    affine = np.zeros((4, 4))
    affine[3, 3] = 1
    sizes, steps = [0, 0, 0], [0.0, 0.0, 0.0]
    for world, axis in enumerate(axes):
        affine[world, axis] = -spacing[world] if world == 1 else spacing[world]
        sizes[axis], steps[axis] = shape[world], spacing[world]
    array = np.zeros((1, *sizes), np.float32)
    return Volume(array, affine, tuple(steps), None, Path("x.nii.gz"), nominal_spacing=nominal)


def test_measured_along_the_axes_of_the_model() -> None:
    expected = Acquisition(spacing_mm=((0.5, 0.5), (0.6, 0.6), (3, 3)), field_mm=((50, 50), (48, 48)))
    for axes in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        assert acquisition_of(volume((100, 80, 12), (0.5, 0.6, 3.0), axes=axes), WHOLE, "RAS") == expected
    swapped = acquisition_of(volume((100, 80, 12), (0.5, 0.6, 3.0)), WHOLE, "ARS")
    assert swapped is not None
    assert swapped.spacing_mm[:2] == ((0.6, 0.6), (0.5, 0.5))


def test_a_region_sets_the_field() -> None:
    square = acquisition_of(volume((100, 80, 12), (0.5, 0.6, 3.0)), Region(kind="square", size_mm=40), "RAS")
    assert square is not None
    assert square.field_mm == ((40, 40), (40, 40))


def test_nominal_sizes_say_nothing() -> None:
    assert acquisition_of(volume((10, 10, 4), (1, 1, 1), nominal=True), WHOLE, "RAS") is None
    assert united([]) is None
    assert differences(None, united([])) == []


@pytest.mark.parametrize(
    ("spacing", "expected"),
    [
        ((0.5, 0.5, 3.0), 0),
        ((0.7, 0.7, 4.4), 0),
        ((0.5, 0.5, 6.1), 1),
        ((0.5, 0.5, 1.9), 1),
        ((1.3, 0.5, 3.0), 2),
    ],
)
def test_far_by_more_than_half(spacing, expected) -> None:
    seen = [
        acquisition_of(volume((100, 100, 10), (step, step, 3.0 + step)), WHOLE, "RAS") for step in (0.5, 0.8)
    ]
    trained = united([item for item in seen if item is not None])
    assert trained is not None
    assert trained.spacing_mm[0] == (0.5, 0.8)
    trained = trained.model_copy(update={"spacing_mm": (*trained.spacing_mm[:2], (3.0, 4.0))})
    found = differences(acquisition_of(volume((100, 100, 10), spacing), WHOLE, "RAS"), trained)
    assert len(found) == expected
    assert all("mm" in text and "trained on" in text for text in found)


def test_a_far_image_is_noted(tmp_path) -> None:
    from tesla_med.config.files import load_pipeline, load_site
    from tesla_med.io.volumes import save_image
    from tesla_med.tasks.volumes import Volumes

    generator = np.random.default_rng(0)
    for name, step in (("Case00", 1.0), ("Case01", 4.0)):
        affine = np.diag([0.5, 0.5, step, 1.0])
        save_image(tmp_path / f"{name}.nii.gz", generator.random((40, 36, 5)), affine)
    pipeline = load_pipeline("prostate", ["preprocessing.size=[32,32]"])
    trained = Acquisition(spacing_mm=((0.4, 0.6), (0.4, 0.6), (3, 4)), field_mm=((18, 22), (18, 22)))
    site = load_site("prostate/F")
    task = Volumes(site, pipeline, trained)
    refs = task.refs(task.find(tmp_path, ()), 0, 1)
    first, second = map(task.load, refs)
    assert [note for note in first.notes if "slice axis is 1 mm" in note and "3 to 4 mm" in note]
    assert second.notes == ()
    assert Volumes(site, pipeline).load(refs[0]).notes == ()
