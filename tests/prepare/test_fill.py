"""What is fill and what is not, and how the range is taken without it."""

import nibabel as nib
import numpy as np
import pytest
import small_site as small
import torch

from tesla_med.config.models import FillConfig, Intensity, Preprocessing, Region
from tesla_med.io.volumes import read_volume
from tesla_med.prepare.fill import find_fill, hidden, packed, unpacked
from tesla_med.prepare.stream import SiteImages
from tesla_med.prepare.transforms import Preprocessor
from tesla_med.tasks.labelled_slices import load_labelled
from tesla_med.types import Ref, Unit

ON = FillConfig(enabled=True)


def noise(shape=(32, 32, 4), low=50, high=200, seed=0):
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.float32)


def corners(shape=(32, 32, 4)):
    """Return where a round field of view leaves the corners of every slice empty."""
    i, j = np.ogrid[: shape[0], : shape[1]]
    outside = np.hypot(i - (shape[0] - 1) / 2, j - (shape[1] - 1) / 2) > 0.55 * max(shape[:2])
    return np.repeat(outside[..., None], shape[2], axis=2)


@pytest.mark.parametrize("value", [0, -2000, 4095])
def test_corners_of_one_value_are_found_to_the_voxel(value):
    array = np.where(corners(), value, noise())[None]
    assert np.array_equal(find_fill(array, ON), corners())
    assert find_fill(array, FillConfig()) is None


def test_slices_along_another_axis():
    array = np.moveaxis(np.where(corners(), 0, noise()), 2, 0)[None]
    assert np.array_equal(find_fill(array, ON, 0), np.moveaxis(corners(), 2, 0))


def test_a_hole_that_is_not_joined_to_the_border_is_no_fill():
    array = np.where(corners(), 0, noise())
    array[12:18, 12:18] = 0
    assert np.array_equal(find_fill(array[None], ON), corners())


def test_below_the_stated_size_there_is_none():
    rim = noise()
    rim[0] = 0  # a row of every slice, 1 / 32 of the volume
    assert find_fill(rim[None], ON) is None
    assert find_fill(rim[None], FillConfig(enabled=True, least_share=1 / 32)).sum() == 32 * 4
    assert find_fill(rim[None], FillConfig(enabled=True, least_share=0.032)) is None


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.6])
def test_zeros_among_noise_are_no_fill(share):
    array = noise((64, 64, 4))
    array[np.random.default_rng(1).random(array.shape) < share] = 0
    assert find_fill(array[None], ON) is None


def test_noise_and_a_constant_volume_have_none():
    assert find_fill(noise()[None], ON) is None
    assert find_fill(np.zeros((1, 8, 8, 2), np.float32), ON) is None
    assert find_fill(np.where(corners(), 0.0, 100.0)[None], ON) is None  # two values: nothing would be left


def test_channels_must_agree_each_with_its_own_value():
    one, two = np.where(corners(), 0, noise()), np.where(corners(), -7, noise(seed=2))
    assert np.array_equal(find_fill(np.stack([one, two]), ON), corners())
    assert find_fill(np.stack([one, noise(seed=3)]), ON) is None


def prepared(tmp_path, array, *, channels=None, **settings):
    path = tmp_path / "image.nii.gz"
    nib.save(nib.Nifti1Image(array, np.diag([1.0, 1.0, 3.0, 1.0])), path)
    volume = read_volume(path)
    if channels is not None:
        volume.array = np.stack([array, channels])
    return Preprocessor(Preprocessing(**settings), Region(), 2)(volume)


@pytest.mark.parametrize("channels", [None, np.where(corners(), 9, noise(seed=5))], ids=["one", "two"])
@pytest.mark.parametrize("scaling", ["minmax", "percentile", "histogram"])
@pytest.mark.parametrize("value", [-2000, 4095])
def test_the_range_is_that_of_the_rest(tmp_path, scaling, value, channels):
    """The rest is scaled as if the fill held the smallest value of the rest, which is what fill becomes."""
    array = np.where(corners(), value, noise())
    count = 1 if channels is None else 2
    quantiles = (tuple(np.linspace(0.0, 1.0, 11)),) * count if scaling == "histogram" else ()
    intensity = Intensity(scaling=scaling, lower=1, upper=99, quantiles=quantiles)
    case = prepared(tmp_path, array, channels=channels, intensity=intensity, fill=ON)
    inside = torch.from_numpy(~np.moveaxis(corners(), 2, 0))
    for index, own in enumerate((array, channels)[:count]):
        values = own[~corners()]
        images = case.images[:, index]
        if scaling != "histogram":
            low, high = (
                (values.min(), values.max()) if scaling == "minmax" else np.percentile(values, [1, 99])
            )
            want = torch.from_numpy(np.clip((np.moveaxis(own, 2, 0) - low) / (high - low), 0, 1)).float()
            assert torch.allclose(images[inside], want[inside], atol=1e-5)
        assert images[~inside].eq(0).all()
        assert images[inside].max() > 0.99
    assert torch.equal(case.hidden, ~inside)
    assert np.array_equal(case.fill, corners())
    assert sum(note.startswith(f"fill: {corners().sum()} voxels") for note in case.notes) == 1


def test_the_receive_field_is_divided_out_beside_fill(tmp_path):
    intensity = Intensity(scaling="percentile", bias_correction=True)
    case = prepared(tmp_path, np.where(corners(), -2000, noise()), intensity=intensity, fill=ON)
    assert case.images[case.hidden[:, None]].eq(0).all()
    assert case.images[~case.hidden[:, None]].std() > 0.1


@pytest.mark.parametrize("size", [None, (48, 40)])
def test_fill_comes_back_as_background(tmp_path, size):
    case = prepared(tmp_path, np.where(corners(), 0, noise()), size=size, fill=ON)
    assert case.hidden.shape == (4, *case.images.shape[2:])
    assert abs(float(case.hidden.float().mean()) - corners().mean()) < 0.02
    probs = torch.zeros(4, 2, *case.images.shape[2:])
    probs[:, 1] = 1.0
    native = case.restore(probs)
    assert np.array_equal(native[1] == 0, corners())
    assert np.allclose(native.sum(axis=0), 1)


def test_off_and_without_fill_nothing_changes(tmp_path):
    for array in (noise(), np.where(corners(), 0, noise())):
        plain = prepared(tmp_path, array, size=(24, 24))
        if not corners()[array == 0].any():
            assert torch.equal(prepared(tmp_path, array, size=(24, 24), fill=ON).images, plain.images)
        assert plain.fill is None
        assert plain.hidden is None


def test_images_and_fill_stay_together():
    images, fill = torch.rand(5, 2, 4, 4), torch.rand(5, 4, 4) < 0.3
    assert packed(images, None) is images
    assert unpacked(images, 2) == (images, None)
    order = torch.randperm(5)
    found, weight = unpacked(packed(images, fill)[order], 2)
    assert torch.equal(found, images[order])
    assert torch.equal(weight, (~fill[order]).float())
    mask = torch.ones(5, 4, 4, dtype=torch.long)
    assert torch.equal(hidden(mask, fill), (~fill).long())
    assert hidden(mask, None) is mask


def test_passes_over_a_site_keep_fill_beside_images():
    def load(ref):
        images = torch.full((3, 1, 4, 4), float(ref.content))
        return Unit(ref, images, None, fill=images[:, 0] > 0 if ref.content % 2 else None)

    site = SiteImages([Ref(str(number), (str(number),), number) for number in range(4)], load)
    assert site.channels is None
    parts = [unpacked(batch, site.channels) for batch in site.batches(2)]
    assert sum(len(images) for images, _ in parts) == 12
    for images, weight in parts:
        odd = (images % 2 == 1).all()
        assert (weight is not None) == odd
        assert weight is None or weight.eq(0).all()


def test_statistics_of_the_source_are_without_fill(tmp_path):
    """Quantiles, moments and class shares of a source with fill are those of its tissue."""
    from tesla_med.config.files import load_pipeline
    from tesla_med.models.base import build_model
    from tesla_med.training.measure import intensities, measure

    folder = tmp_path / "nii"
    for number in range(2):
        organ = np.zeros((32, 32, 4), np.int16)
        organ[12:20, 12:20] = 1
        folder.mkdir(exist_ok=True)
        for name, array in (
            ("", np.where(corners(), 0, noise(seed=number))),
            ("_segmentation", organ),
        ):
            image = nib.Nifti1Image(array.astype(np.int16), np.diag([1.0, 1.0, 3.0, 1.0]))
            nib.save(image, folder / f"Case0{number}{name}.nii.gz")
    found = {}
    for enabled in ("true", "false"):
        texts = ("preprocessing.size=null", "model.params.width=4", f"preprocessing.fill.enabled={enabled}")
        pipeline = load_pipeline("prostate", texts)
        torch.manual_seed(0)
        network = build_model(pipeline).eval()
        part = load_labelled(pipeline, [small.site()], folder).every()
        found[enabled] = measure(network, part, pipeline), intensities(part, pipeline)
    with_fill, without = found["false"], found["true"]
    inside = int((~corners()).sum())
    assert with_fill[0].class_pixels.sum() == 2 * 32 * 32 * 4
    assert without[0].class_pixels.sum() == 2 * inside
    assert without[0].class_pixels[1] == with_fill[0].class_pixels[1] == 2 * 64 * 4
    assert with_fill[1][0][10] < 0.01  # more than a tenth is fill
    assert without[1][0][10] > 0.05
