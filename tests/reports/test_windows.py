"""Pictures are windowed to [0, 1] whatever the range of the image: one stated window for all panels."""

import io
import re

import numpy as np
import pytest
from made_up_runs import case, drive, run_context

from tesla_med.reports import overlays
from tesla_med.reports.base import make_reports
from tesla_med.types import CaseView

RANGES = {"Hounsfield": (-1000.0, 3000.0), "unit": (0.0, 1.0)}


def scaled(view, low, high):
    image = (view.image - view.image.min()) / np.ptp(view.image) * (high - low) + low
    return CaseView(
        image.astype(np.float32), view.source_mask, view.mask, view.reference, view.affine, view.spacing
    )


def logged(folder, low, high):
    """Return picture and text that TensorBoard is given for a case with this range."""
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = run_context(folder)
    result, view = case(run, 1)
    (report,) = make_reports(["tensorboard"], run)
    drive(report, [(result, scaled(view, low, high))], steps=0)
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0, "tensors": 0})
    found.Reload()
    (picture,) = found.Images("overlay/HK/Case01")
    (text,) = found.Tensors("overlay/HK/Case01/text_summary")
    shown = np.asarray(Image.open(io.BytesIO(picture.encoded_image_string)).convert("RGB"))
    return shown, text.tensor_proto.string_val[0].decode()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return {name: logged(tmp_path_factory.mktemp(name), *ends) for name, ends in RANGES.items()}


def test_the_same_picture_whatever_the_range(pictures):
    first, second = (pictures[name][0].astype(int) for name in RANGES)
    assert np.abs(first - second).max() <= 2
    for picture in (first, second):
        grey = picture[np.ptp(picture, axis=2) == 0]
        assert len(np.unique(grey)) > 50  # neither black nor white


def test_bright_stays_bright(tmp_path):
    """The structure is brighter than what is about it, in the picture as in the image."""
    _, view = case(run_context(tmp_path), 1, shift=0)
    low, high = overlays.display_window(view)
    shown = np.clip((view.image - low) / (high - low), 0, 1)
    assert shown[view.reference > 0].mean() > shown[view.reference == 0].mean() + 0.1


@pytest.mark.parametrize("name", RANGES)
def test_the_window_is_stated_and_is_one_for_all_panels(pictures, name):
    text = pictures[name][1]
    assert "source | adapted | reference" in text
    assert "the same for every panel" in text
    found = re.search(r"display window (\S+) to (\S+),", text)
    low, high = float(found[1]), float(found[2])
    assert RANGES[name][0] <= low < high <= RANGES[name][1]


def test_source_and_adapted_panels_show_the_same_grey(tmp_path):
    """Without any mask the two panels are the same picture."""
    _, view = case(run_context(tmp_path), 1, referenced=False, empty=True)
    nothing = np.zeros_like(view.mask)
    bare = CaseView(view.image, nothing, nothing, None, view.affine, view.spacing)
    figure = overlays.draw(bare, 2, 6, run_context(tmp_path).pipeline.classes)
    source, adapted = figure.axes[0].images
    assert source.get_clim() == adapted.get_clim() == overlays.display_window(bare)
    assert np.array_equal(source.get_array(), adapted.get_array())
