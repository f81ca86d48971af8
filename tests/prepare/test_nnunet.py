"""The preprocessing of nnU-Net: transposition, crop, intensities, resampling, and the way back."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from nnunet_folder import volume

from tesla_med.config.models import Preprocessing, Region
from tesla_med.config.nnunet import ChannelNorm, NnunetPreprocessing, Resampling
from tesla_med.errors import AdaptationError, ConfigError, DataError
from tesla_med.prepare.nnunet import (
    NnunetPreprocessor,
    axis_apart,
    new_shape,
    normalise,
    resample,
    slabs,
)

pytestmark = pytest.mark.usefixtures("one_thread")
PERMUTATIONS = list(itertools.permutations(range(3)))
NONE = ChannelNorm(scheme="none")


def preparer(
    spacing=(2.0, 1.0, 1.0), *, channels=(NONE,), classes=3, regions=False, scale=(0.0, 1.0), **more
):
    config = NnunetPreprocessing(spacing=spacing, channels=channels, **more)
    preprocessing = Preprocessing(nnunet=config, model_range=scale)
    return NnunetPreprocessor(preprocessing, Region(), classes, regions=regions)


def one_hot(labels, classes=3):
    """Return probabilities (L, ...) of labels."""
    return (np.arange(classes).reshape(-1, *[1] * labels.ndim) == labels).astype(np.float32)


def rng(seed=0):
    return np.random.default_rng(seed)


# ------------------------------------------------------------ axes


@pytest.mark.parametrize("transpose", PERMUTATIONS)
def test_axes_are_those_of_the_file_in_reverse_then_transposed(transpose):
    image = rng().random((4, 5, 6)).astype(np.float32) + 1
    spacing = np.array([3.0, 2.0, 1.0])[list(transpose)]  # z, y, x of the file are 3, 2, 1
    case = preparer(tuple(spacing), transpose=transpose)(volume(image[None], (1.0, 2.0, 3.0)))
    expected = image.transpose(2, 1, 0).transpose(transpose)
    assert case.images.shape == (1, 1, *expected.shape)
    assert np.array_equal(case.images[0, 0], expected)
    assert case.depth == expected.shape[0]


@pytest.mark.parametrize("transpose", PERMUTATIONS)
@pytest.mark.parametrize("regions", [False, True])
@pytest.mark.parametrize("dimensions", [2, 3])
def test_what_is_restored_lies_where_it_was(transpose, regions, dimensions):
    image = rng().random((4, 5, 6)).astype(np.float32) + 1
    spacing = tuple(np.array([3.0, 2.0, 1.0])[list(transpose)][-dimensions:])
    case = preparer(spacing, transpose=transpose, regions=regions)(volume(image[None], (1.0, 2.0, 3.0)))
    labels = rng(1).integers(0, 3, (4, 5, 6))
    probs = one_hot(labels.transpose(2, 1, 0).transpose(transpose))
    given = torch.from_numpy(probs)[None] if dimensions == 3 else torch.from_numpy(probs).movedim(0, 1)
    found = case.restore(given.contiguous())
    assert found.shape == (3, 4, 5, 6)
    assert np.array_equal(found.argmax(0), labels)
    assert np.allclose(found.sum(0), 1, atol=1e-5)


@pytest.mark.parametrize("corner", list(itertools.product((0, -1), repeat=3)))
@pytest.mark.parametrize("transpose", [(0, 1, 2), (1, 2, 0)])
def test_a_corner_is_not_one_voxel_off(corner, transpose):
    """Through a crop, another grid and back."""
    image = np.zeros((12, 11, 10), np.float32)
    image[1:-1, 1:-1, 1:-1] = 1
    inside = image[1:-1, 1:-1, 1:-1]
    spot = tuple(slice(0, 2) if end == 0 else slice(-2, None) for end in corner)
    inside[spot] = 5
    case = preparer((0.5, 0.5, 0.5), transpose=transpose)(volume(image[None], (1.0, 1.0, 1.0)))
    assert case.images.shape[2:] == tuple(2 * np.array([8, 9, 10])[list(transpose)])
    bright = case.images[0, 0].numpy() > 3
    found = case.restore(torch.from_numpy(one_hot(bright.astype(int)))[None]).argmax(0)
    assert np.array_equal(found == 1, image == 5)


@pytest.mark.parametrize("order", PERMUTATIONS)
@pytest.mark.parametrize("signs", [(1, 1, 1), (-1, 1, -1), (-1, -1, -1)])
def test_reoriented_to_right_anterior_superior(order, signs):
    import nibabel

    affine = np.zeros((4, 4))
    affine[3, 3] = 1
    for axis, (world, sign) in enumerate(zip(order, signs, strict=True)):
        affine[world, axis] = sign * (axis + 1.0)
    image = rng().random((4, 5, 6)).astype(np.float32) + 1
    turned = nibabel.as_closest_canonical(nibabel.Nifti1Image(image, affine))
    expected = np.asarray(turned.dataobj).transpose(2, 1, 0)
    spacing = tuple(float(item) for item in turned.header.get_zooms()[::-1])
    case = preparer(spacing, reorient=True)(volume(image[None], affine=affine))
    assert np.array_equal(case.images[0, 0], expected)
    labels = rng(1).integers(0, 3, image.shape)
    theirs = nibabel.as_closest_canonical(nibabel.Nifti1Image(labels.astype(np.uint8), affine))
    probs = one_hot(np.asarray(theirs.dataobj).transpose(2, 1, 0))
    assert np.array_equal(case.restore(torch.from_numpy(probs)[None]).argmax(0), labels)


def test_slices_keep_their_spacing():
    image = rng().random((8, 6, 5)).astype(np.float32) + 1
    case = preparer((0.5, 1.0), channels=(NONE,))(volume(image[None], (1.0, 1.0, 7.0)))
    assert case.images.shape == (5, 1, 12, 8)


# ------------------------------------------------------------ crop


def test_the_crop_is_the_box_of_what_is_not_zero_in_any_channel():
    image = np.zeros((2, 9, 8, 7), np.float32)
    image[0, 2, 3, 4] = 1
    image[1, 6, 5, 1] = -1
    case = preparer((2.0, 1.0, 1.0), channels=(NONE, NONE))(volume(image))
    assert case.box == (slice(1, 5), slice(3, 6), slice(2, 7))
    assert case.before == (7, 8, 9)
    assert case.images.shape == (1, 2, 4, 3, 5)
    found = case.restore(torch.from_numpy(one_hot(np.ones((4, 3, 5), int)))[None])
    assert np.array_equal(found.argmax(0)[2:7, 3:6, 1:5], np.ones((5, 3, 4)))
    assert found.argmax(0).sum() == 60
    assert (found[0][found.argmax(0) == 0] == 1).all()  # background, certain


def test_an_image_of_zeros_is_not_cropped():
    case = preparer()(volume(np.zeros((1, 4, 5, 6))))
    assert case.images.shape == (1, 1, 6, 5, 4)
    assert torch.isfinite(case.images).all()


def test_another_number_of_channels():
    with pytest.raises(DataError, match=r"image\.nii\.gz: 1 channels, the model needs 2"):
        preparer(channels=(NONE, NONE))(volume(np.ones((1, 3, 3, 3))))


# ------------------------------------------------------------ intensities


def norm(values, nonzero=None, **more):
    values = np.asarray(values, np.float32)
    return normalise(
        values, ChannelNorm(**more), np.ones(values.shape, bool) if nonzero is None else nonzero, "x"
    )


def test_zscore():
    values = rng().normal(40, 7, (5, 6, 7))
    found = norm(values)
    assert np.allclose(found, (values - values.mean()) / values.std(), atol=1e-4)


def test_zscore_inside_a_mask():
    values = rng().normal(40, 7, (5, 6, 7)).astype(np.float32)
    inside = rng(1).random((5, 6, 7)) > 0.4
    values[~inside] = 0
    found = norm(values, inside, masked=True)
    expected = (values - values[inside].mean()) / values[inside].std()
    assert np.allclose(found[inside], expected[inside], atol=1e-4)
    assert (found[~inside] == 0).all()


def test_the_mask_holds_what_it_encloses():
    """A hole of zeros inside of the body counts; what is outside does not, and stays 0."""
    image = np.zeros((9, 9, 9), np.float32)
    image[1:8, 1:8, 1:8] = rng().normal(100, 10, (7, 7, 7))
    image[4, 4, 4] = 0
    image[1, 1, 1] = 0  # a corner, open to the outside
    masked = ChannelNorm(masked=True)
    case = preparer((1.0, 1.0, 1.0), channels=(masked,))(volume(image[None], (1.0, 1.0, 1.0)))
    body = image[1:8, 1:8, 1:8].transpose(2, 1, 0)
    counted = np.ones((7, 7, 7), bool)
    counted[0, 0, 0] = False
    expected = (body - body[counted].mean()) / body[counted].std()
    assert np.allclose(case.images[0, 0].numpy()[counted], expected[counted], atol=1e-4)
    assert case.images[0, 0, 0, 0, 0] == 0


def test_a_constant_image_has_no_deviation():
    assert (norm(np.full((2, 2, 2), 7.0)) == 0).all()


def test_ct_is_clipped_then_scaled_by_the_training():
    found = norm([[[-2000.0, -100.0, 50.0, 900.0]]], scheme="ct", mean=100, std=200, lower=-500, upper=400)
    assert np.allclose(found, [[[-3.0, -1.0, -0.25, 1.5]]])
    assert np.isfinite(norm([[[1.0, 2.0]]], scheme="ct", std=0, upper=5)).all()


def test_rescaled():
    assert np.allclose(norm([[[2.0, 3.0, 6.0]]], scheme="rescale"), [[[0, 0.25, 1]]])
    assert (norm(np.full((2, 2, 2), 7.0), scheme="rescale") == 0).all()


def test_rgb():
    assert np.allclose(norm([[[0.0, 51.0, 255.0]]], scheme="rgb"), [[[0, 0.2, 1]]])
    for wrong in (-1.0, 256.0):
        with pytest.raises(DataError, match="RGB of 0 to 255"):
            norm([[[0.0, wrong]]], scheme="rgb")


def test_none_changes_nothing():
    values = rng().normal(40, 7, (2, 3, 4)).astype(np.float32)
    assert np.array_equal(norm(values, scheme="none"), values)


def test_channels_are_normalised_each_by_its_own():
    image = rng().normal(300, 50, (2, 6, 5, 4)).astype(np.float32)
    ct = ChannelNorm(scheme="ct", mean=310, std=40, lower=250, upper=350)
    case = preparer(channels=(ct, ChannelNorm()))(volume(image))
    first = (image[0].clip(250, 350) - 310) / 40
    second = (image[1] - image[1].mean()) / image[1].std()
    assert np.allclose(case.images[0, 0], first.transpose(2, 1, 0), atol=1e-5)
    assert np.allclose(case.images[0, 1], second.transpose(2, 1, 0), atol=1e-4)


def test_images_are_mapped_to_0_to_1_by_the_range_of_the_model():
    image = rng().normal(0, 1, (1, 6, 5, 4)).astype(np.float32)
    plain = preparer()(volume(image)).images
    scaled = preparer(scale=(-3.0, 5.0))(volume(image)).images
    assert torch.allclose(scaled * 8 - 3, plain, atol=1e-5)


def test_the_given_image_is_not_changed():
    image = volume(rng().normal(5, 1, (1, 6, 5, 4)))
    kept = image.array.copy()
    preparer(channels=(ChannelNorm(),))(image)
    preparer(channels=(ChannelNorm(scheme="rescale"),))(image)
    assert np.array_equal(image.array, kept)


# ------------------------------------------------------------ resampling


@pytest.mark.parametrize(
    ("shape", "spacing", "target", "expected"),
    [
        ((10, 20, 30), (2.0, 1.0, 1.0), (1.0, 1.0, 2.0), (20, 20, 15)),
        ((25, 27, 3), (1.0, 1.0, 1.0), (2.0, 2.0, 9.0), (12, 14, 1)),  # halves go to the even number
        ((7, 7, 7), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0), (7, 7, 7)),
    ],
)
def test_the_new_shape(shape, spacing, target, expected):
    assert new_shape(shape, spacing, target) == expected


def test_half_voxels_are_rounded_by_the_digits_of_the_header():
    """An affine of single precision holds 0.9 as 0.90000003 or 0.89999998."""
    image = volume(np.ones((1, 25, 4, 4)), (0.90000004, 1.0, 1.0))
    image.stated = (0.9, 1.0, 1.0)
    assert preparer((1.0, 1.0, 1.8))(image).images.shape[2:] == (4, 4, 12)
    image.stated = None
    assert preparer((1.0, 1.0, 1.8))(image).images.shape[2:] == (4, 4, 13)


def test_an_image_that_would_be_too_large():
    with pytest.raises(DataError, match=r"image\.nii\.gz: at the model's voxel size of .* is that right\?"):
        preparer((1e-4, 1e-4, 1e-4))(volume(np.ones((1, 9, 9, 9))))


AXES_APART = [
    ((3.0, 1.0, 1.0), (1.0, 1.0, 1.0), None, None),  # not more than three times
    ((3.1, 1.0, 1.0), (1.0, 1.0, 1.0), None, 0),
    ((1.0, 3.1, 1.0), (1.0, 1.0, 1.0), None, 1),
    ((1.0, 1.0, 1.0), (1.0, 1.0, 5.0), None, 2),  # of the new grid
    ((4.0, 1.0, 1.0), (1.0, 1.0, 9.0), None, 0),  # the old grid goes first
    ((1.0, 4.0, 4.0), (1.0, 1.0, 1.0), None, None),  # two axes are thick
    ((1.0, 4.0, 4.0), (9.0, 1.0, 1.0), None, None),  # and then the new grid is not asked
    ((9.0, 1.0, 1.0), (1.0, 1.0, 1.0), False, None),
    ((1.2, 1.0, 1.0), (1.0, 1.0, 1.0), True, 0),
    ((1.0, 1.0, 1.0), (9.0, 1.0, 1.0), True, None),
]


@pytest.mark.parametrize(("spacing", "target", "separate", "axis"), AXES_APART)
def test_which_axis_is_resampled_apart(spacing, target, separate, axis):
    assert axis_apart(spacing, target, separate) == axis


@pytest.mark.parametrize("order", [0, 1, 3])
def test_resampling_is_that_of_skimage(order):
    from skimage.transform import resize

    array = rng().random((2, 6, 7, 8)).astype(np.float32)
    found = resample(array, (9, 5, 8), (1, 1, 1), (1, 1, 1), Resampling(order=order))
    assert found.dtype == np.float32
    for index in range(2):
        expected = resize(array[index].astype(float), (9, 5, 8), order, mode="edge", anti_aliasing=False)
        assert np.allclose(found[index], expected, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("count", [3, 6, 11, 12])
def test_thick_slices_take_the_nearest_slice(axis, count):
    """Of six; each slice is resized by itself."""
    from scipy.ndimage import map_coordinates
    from skimage.transform import resize

    array = np.moveaxis(rng().random((6, 7, 8)), 0, axis).astype(np.float32)
    spacing = [1.0, 1.0, 1.0]
    spacing[axis] = 5.0
    shape = [9, 5]
    shape.insert(axis, count)
    found = resample(array[None], shape, spacing, (1, 1, 1), Resampling(order=3, order_z=0))[0]
    slices = [
        resize(item.astype(float), (9, 5), 3, mode="edge", anti_aliasing=False)
        for item in np.moveaxis(array, axis, 0)
    ]
    stack = np.stack(slices)
    grid = np.mgrid[:count, :9, :5].astype(float)
    grid[0] = 6 / count * (grid[0] + 0.5) - 0.5
    expected = map_coordinates(stack, grid, order=0, mode="nearest")
    assert np.allclose(np.moveaxis(found, axis, 0), expected, atol=1e-5)


def test_thick_slices_by_splines():
    from scipy.ndimage import map_coordinates

    array = rng().random((1, 6, 7, 8)).astype(np.float32)
    found = resample(array, (9, 7, 8), (5, 1, 1), (1, 1, 1), Resampling(order=1, order_z=1))[0]
    positions = 6 / 9 * (np.arange(9) + 0.5) - 0.5
    for row, column in ((0, 0), (3, 5)):
        expected = map_coordinates(
            array[0, :, row, column].astype(float), positions[None], order=1, mode="nearest"
        )
        assert np.allclose(found[:, row, column], expected, atol=1e-5)


def test_the_same_shape_is_left_alone():
    array = rng().random((1, 6, 7, 8)).astype(np.float32)
    assert np.array_equal(resample(array, (6, 7, 8), (5, 1, 1), (1, 1, 1), Resampling()), array)


@pytest.mark.parametrize("most", [1, 200, 2**24])
@pytest.mark.parametrize(
    ("shape", "spacing", "how"),
    [
        ((9, 5, 12), (1, 1, 1), Resampling(order=1)),
        ((6, 7, 8), (1, 1, 1), Resampling(order=1)),
        ((6, 9, 11), (5, 1, 1), Resampling(order=1, order_z=0)),
        ((11, 9, 8), (5, 1, 1), Resampling(order=1, order_z=0)),
        ((12, 9, 8), (5, 1, 1), Resampling(order=1, order_z=1)),
        ((9, 3, 8), (1, 5, 1), Resampling(order=1, order_z=0)),
        ((9, 7, 13), (1, 1, 5), Resampling(order=1, order_z=1)),
        ((9, 5, 12), (1, 1, 1), Resampling(order=3)),
        ((12, 9, 8), (5, 1, 1), Resampling(order=1, order_z=3)),
    ],
)
def test_parts_make_the_whole(shape, spacing, how, most):
    """The way back works part by part; each part is what resampling the whole gives there."""
    array = rng().standard_normal((3, 6, 7, 8)).astype(np.float32)
    expected = resample(array, shape, spacing, (1, 1, 1), how)
    found, parts = np.full_like(expected, np.nan), 0
    for place, values in slabs(torch.from_numpy(array), shape, spacing, (1, 1, 1), how, most):
        assert np.isnan(found[place]).all()
        found[place] = values.numpy()
        parts += 1
    assert np.allclose(found, expected, atol=1e-4)
    linear = how.order == 1 and how.order_z < 2 and shape != (6, 7, 8)
    assert (parts > 1) == (linear and most < 2**24)


@pytest.mark.parametrize("regions", [False, True])
def test_logits_are_resampled_not_probabilities(regions):
    """By the linear interpolation that the plans ask for; classes differ by a constant at each voxel."""
    from skimage.transform import resize

    image = volume(rng().random((1, 8, 8, 8)) + 1, (1.0, 1.0, 1.0))
    case = preparer((2.0, 2.0, 2.0), regions=regions)(image)
    outputs = torch.randn(1, 2 if regions else 3, 4, 4, 4, generator=torch.Generator().manual_seed(0)) * 4
    if regions:
        from tesla_med.losses import exclusive

        probs = exclusive(outputs).exp()
    else:
        probs = outputs.softmax(1)
    found = case.restore(probs)
    resized = np.stack(
        [resize(item.double().numpy(), (8, 8, 8), 1, mode="edge", anti_aliasing=False) for item in outputs[0]]
    )
    native = torch.from_numpy(resized.transpose(0, 3, 2, 1).copy())
    expected = exclusive(native[None])[0].exp() if regions else native.softmax(0)
    assert np.allclose(found, expected, atol=1e-4)


# ------------------------------------------------------------ refusals


def test_probabilities_that_cannot_be_restored():
    case = preparer()(volume(np.ones((1, 3, 4, 5))))
    with pytest.raises(AdaptationError, match="expected probabilities of shape"):
        case.restore(torch.ones(1, 2, 5, 4, 3))
    with pytest.raises(AdaptationError, match="not finite"):
        case.restore(torch.full((1, 3, 5, 4, 3), float("nan")))


def test_a_region_of_interest_means_nothing():
    config = NnunetPreprocessing(spacing=(1, 1), channels=(NONE,))
    region = Region(kind="square", size_mm=50.0)
    with pytest.raises(ConfigError, match=r"site\.region\.kind=whole"):
        NnunetPreprocessor(Preprocessing(nnunet=config), region, 2, regions=False)


def test_labels_are_refused():
    with pytest.raises(ConfigError, match="trained with nnU-Net"):
        preparer()(volume(np.ones((1, 3, 3, 3))), labels=np.zeros((3, 3, 3), int))
