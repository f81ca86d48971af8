from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as functional

from tesla_med.config.models import Preprocessing, Region
from tesla_med.errors import AdaptationError, DataError, GeometryError
from tesla_med.io.volumes import read_volume, save_image
from tesla_med.prepare.transforms import PreparedCase, Preprocessor
from tesla_med.types import Volume

Affine = npt.NDArray[np.float64]
SIGNED_AXES = [(axes, signs) for axes in permutations(range(3)) for signs in product((1, -1), repeat=3)]
SPACING = (0.7, 1.1, 3.3)


def phantom(shape: tuple[int, int, int] = (21, 17, 9)) -> npt.NDArray[np.float32]:
    """An off-centre L, brighter along its length, on a dark ground: no symmetry at all."""
    image = np.zeros(shape, np.float32)
    image[3:12, 4:7, 2:5] = 100
    image[3:6, 4:14, 2:5] = 100
    image[4:7, 5:8, 5:7] = 100
    return image


def diagonal(spacing: tuple[float, float, float] = SPACING) -> Affine:
    affine = np.diag([*spacing, 1.0])
    affine[:3, 3] = (-12.0, 7.5, 31.0)
    return affine


def turned(
    image: npt.NDArray[Any], affine: Affine, axes: tuple[int, ...], signs: tuple[int, ...]
) -> tuple[npt.NDArray[Any], Affine]:
    """Store the same scan with other axis order and signs."""
    change = np.zeros((4, 4))
    change[3, 3] = 1
    for new, (old, sign) in enumerate(zip(axes, signs, strict=True)):
        change[old, new] = sign
        change[old, 3] = 0 if sign > 0 else image.shape[old] - 1
    result = image.transpose(axes)
    result = np.flip(result, [axis for axis, sign in enumerate(signs) if sign < 0])
    return np.ascontiguousarray(result), affine @ change


def volume_of(image: npt.NDArray[Any], affine: Affine, **keys: Any) -> Volume:
    steps = np.linalg.norm(affine[:3, :3], axis=0)
    spacing = (float(steps[0]), float(steps[1]), float(steps[2]))
    return Volume(image.astype(np.float32)[None], affine, spacing, None, Path("case.nii.gz"), **keys)


def threshold(images: torch.Tensor) -> torch.Tensor:
    foreground = (images[:, :1] > 0.5).float()
    return torch.cat([1 - foreground, foreground], dim=1)


def mask_of(case: PreparedCase) -> npt.NDArray[Any]:
    return case.restore(threshold(case.images)).argmax(axis=0)


def rotation(degrees: float) -> Affine:
    angle = np.deg2rad(degrees)
    about_z = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
    about_x = np.array(
        [[1, 0, 0], [0, np.cos(angle / 2), -np.sin(angle / 2)], [0, np.sin(angle / 2), np.cos(angle / 2)]]
    )
    result = np.eye(4)
    result[:3, :3] = about_z @ about_x
    return result


@pytest.mark.parametrize("oblique", [0.0, 17.0, 45.0])
@pytest.mark.parametrize(("axes", "signs"), SIGNED_AXES)
def test_every_orientation_gives_the_reoriented_mask(
    axes: tuple[int, ...], signs: tuple[int, ...], oblique: float
) -> None:
    base = phantom()
    image, affine = turned(base, rotation(oblique) @ diagonal(), axes, signs)
    prepare = Preprocessor(Preprocessing(), Region(), 2)
    case = prepare(volume_of(image, affine))
    assert np.array_equal(mask_of(case), image > 50)
    if oblique == 0:
        expected = torch.from_numpy(base / 100).permute(2, 0, 1)[:, None]
        assert torch.equal(case.images, expected)
    resized = Preprocessor(Preprocessing(size=(48, 56)), Region(), 2)(volume_of(image, affine))
    # Compared without regard to which axes were in-plane: at most the outermost voxels may differ.
    from scipy.ndimage import binary_dilation, binary_erosion

    mask, block = mask_of(resized), np.ones((3, 3, 3), bool)
    assert not (mask & ~binary_dilation(image > 50, block)).any()
    assert not (binary_erosion(image > 50, block) & ~mask.astype(bool)).any()


@pytest.mark.parametrize("shape", [(61, 53, 11), (37, 41, 11), (40, 40, 1), (8, 9, 3)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"size": (32, 48)},
        {"size": (64, 64), "anti_aliasing": True},
        {"spacing": (1.5, 1.5, 2.0)},
        {"spacing": (1.5, 1.5, 0.0), "size": (40, 40), "orientation": "LPI"},
    ],
)
def test_constant_probabilities_come_back_constant(
    shape: tuple[int, int, int], settings: dict[str, Any]
) -> None:
    image = np.random.default_rng(0).random(shape)
    _, affine = turned(image, rotation(12) @ diagonal((0.977, 0.977, 3.3)), (1, 0, 2), (-1, 1, -1))
    case = Preprocessor(Preprocessing(**settings), Region(), 3)(volume_of(image, affine))
    probs = torch.tensor([0.5, 0.3, 0.2]).view(1, 3, 1, 1).expand(len(case.images), 3, *case.images.shape[2:])
    restored = case.restore(probs)
    assert restored.shape == (3, *shape)
    assert restored.dtype == np.float32
    for value, channel in zip((0.5, 0.3, 0.2), restored, strict=True):
        assert np.allclose(channel, value, atol=1e-5)


@pytest.mark.parametrize(
    "settings", [{"size": (96, 80)}, {"spacing": (0.5, 0.6, 2.0)}, {"spacing": (1.5, 1.5, 2.0)}]
)
def test_corner_markers_stay_within_half_a_voxel(settings: dict[str, Any]) -> None:
    """Blobs in all eight corners keep their centres of mass."""
    image = np.zeros((61, 53, 11), np.float32)
    corners = list(product((0, 1), repeat=3))
    blobs = [
        tuple(
            slice(size - 5, size) if end else slice(0, 5)
            for size, end in zip(image.shape, corner, strict=True)
        )
        for corner in corners
    ]
    for blob in blobs:
        image[blob] = 1
    affine = diagonal((0.977, 0.977, 3.3))
    case = Preprocessor(Preprocessing(**settings), Region(), 2)(volume_of(image, affine))
    foreground = case.images[:, :1]
    restored = case.restore(torch.cat([1 - foreground, foreground], 1))[1]
    assert restored.shape == image.shape
    for corner in corners:
        half = tuple(
            slice(size - size // 2, size) if end else slice(0, size // 2)
            for size, end in zip(image.shape, corner, strict=True)
        )
        grid = np.indices(image[half].shape).reshape(3, -1)
        before, after = image[half].ravel(), restored[half].ravel()
        assert np.abs(grid @ before / before.sum() - grid @ after / after.sum()).max() < 0.5


def crop(image: npt.NDArray[Any], start: tuple[int, int], size: tuple[int, int]) -> npt.NDArray[Any]:
    """Plain cut along the first two axes, filled with 0 outside."""
    result = np.zeros((*size, image.shape[2]), image.dtype)
    for row, column in product(range(size[0]), range(size[1])):
        i, j = start[0] + row, start[1] + column
        if 0 <= i < image.shape[0] and 0 <= j < image.shape[1]:
            result[row, column] = image[i, j]
    return result


def ramp(shape: tuple[int, int, int] = (21, 17, 9)) -> npt.NDArray[np.float32]:
    return np.random.default_rng(3).random(shape).astype(np.float32)


def scaled(image: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return (image - image.min()) / (image.max() - image.min())


@pytest.mark.parametrize(
    ("size_mm", "size", "start"),
    [(8.8, (13, 8), (4, 4)), (33.0, (47, 30), (-13, -7))],
    ids=["inside", "padded"],
)
def test_square_region(size_mm: float, size: tuple[int, int], start: tuple[int, int]) -> None:
    image = ramp()
    region = Region(kind="square", size_mm=size_mm)
    case = Preprocessor(Preprocessing(), region, 2)(volume_of(image, diagonal()))
    expected = crop(scaled(image), start, size)
    assert np.allclose(case.images[:, 0].permute(1, 2, 0).numpy(), expected, atol=1e-6)
    restored = case.restore(threshold(torch.ones_like(case.images)))
    inside = np.zeros(image.shape, bool)
    inside[max(0, start[0]) : start[0] + size[0], max(0, start[1]) : start[1] + size[1]] = True
    assert np.array_equal(restored[1], inside.astype(np.float32))
    assert np.array_equal(restored.sum(0), np.ones(image.shape, np.float32))


@pytest.mark.parametrize("where", [(slice(2, 5), slice(11, 15)), (slice(19, 21), slice(0, 2))])
def test_mask_region_and_slices(where: tuple[slice, slice]) -> None:
    image = ramp()
    mask = np.zeros(image.shape, bool)
    mask[(*where, slice(3, 6))] = True
    mask[(*where, 7)] = True
    labels = np.zeros(image.shape, np.int32)
    labels[mask] = 2
    region = Region(kind="mask", size_mm=7.0, pattern="*_cord", slices="mask")
    case = Preprocessor(Preprocessing(size=(32, 24)), region, 3)(volume_of(image, diagonal()), mask, labels)
    assert case.slice_index == (3, 4, 5, 7)
    assert case.depth == 9
    centre = np.argwhere(mask.any(axis=2)).mean(axis=0)
    size = (10, 6)
    start = (round(centre[0]) - 5, round(centre[1]) - 3)
    planes = torch.from_numpy(crop(scaled(image), start, size)[..., list(case.slice_index)]).permute(2, 0, 1)[
        :, None
    ]
    expected = functional.interpolate(planes, (32, 24), mode="bilinear", align_corners=False)
    assert torch.allclose(case.images, expected, atol=1e-5)
    drawn = torch.from_numpy(crop(labels, start, size)[..., list(case.slice_index)]).permute(2, 0, 1)[:, None]
    nearest = functional.interpolate(drawn.float(), (32, 24), mode="nearest")[:, 0].long()
    assert case.labels is not None
    assert case.labels.dtype == torch.int64
    assert torch.equal(case.labels, nearest)
    restored = case.restore(
        threshold(torch.ones_like(case.images)).repeat_interleave(torch.tensor([1, 2]), 1)
        / torch.tensor([1.0, 2.0, 2.0]).view(1, 3, 1, 1)
    )
    left_out = [k for k in range(9) if k not in case.slice_index]
    assert (restored[0][..., left_out] == 1).all()
    assert (restored[1:][..., left_out] == 0).all()
    assert np.allclose(restored[1:, 0 if start[0] <= 0 else start[0], max(start[1], 0), 3], 0.5)


def test_slice_counts_as_region_even_where_its_mask_leaves_the_square() -> None:
    mask = np.zeros((40, 40, 3), bool)
    mask[18:22, 18:22, 0] = True
    mask[0, 0, 2] = True
    region = Region(kind="mask", size_mm=6, pattern="*", slices="mask")
    case = Preprocessor(Preprocessing(), region, 2)(volume_of(ramp((40, 40, 3)), np.eye(4)), mask)
    assert case.slice_index == (0, 2)


@pytest.mark.parametrize(("axes", "signs"), SIGNED_AXES[::5])
def test_point_region_is_the_same_place_in_every_orientation(
    axes: tuple[int, ...], signs: tuple[int, ...]
) -> None:
    base, affine = ramp(), rotation(11) @ diagonal()
    point = tuple(float(value) for value in (affine @ [14.0, 5.0, 4.0, 1.0])[:3])
    image, changed = turned(base, affine, axes, signs)
    region = Region(kind="point", size_mm=7.0, point_mm=(point[0], point[1], point[2]))
    case = Preprocessor(Preprocessing(), region, 2)(volume_of(image, changed))
    expected = crop(scaled(base), (14 - 5, 5 - 3), (10, 6))
    assert np.allclose(case.images[:, 0].permute(1, 2, 0).numpy(), expected, atol=1e-6)


def test_regions_that_cannot_be_placed() -> None:
    volume = volume_of(ramp(), diagonal())
    prepare = Preprocessor(Preprocessing(), Region(kind="mask", size_mm=5, pattern="*"), 2)
    for mask in (None, np.zeros(volume.shape, bool)):
        with pytest.raises(DataError, match=r"site\.region\.kind=square"):
            prepare(volume, mask)
    with pytest.raises(GeometryError, match="shape"):
        prepare(volume, np.ones((3, 3, 3), bool))
    with pytest.raises(GeometryError, match="outside the image"):
        Preprocessor(Preprocessing(), Region(kind="point", size_mm=5, point_mm=(500, 0, 0)), 2)(volume)
    with pytest.raises(GeometryError, match="smaller than a voxel"):
        Preprocessor(Preprocessing(), Region(kind="square", size_mm=0.1), 2)(volume)


def test_nominal_spacing_is_noted_where_mm_are_used() -> None:
    volume = volume_of(ramp(), np.eye(4), nominal_spacing=True)
    square = Preprocessor(Preprocessing(), Region(kind="square", size_mm=9), 2)(volume)
    assert square.images.shape[2:] == (9, 9)
    assert "nominal" in " ".join(square.notes)
    assert Preprocessor(Preprocessing(), Region(), 2)(volume).notes == []


def test_intensity_is_scaled_over_the_whole_volume_before_the_crop() -> None:
    image = np.zeros((20, 20, 4), np.float32)
    image[8:12, 8:12] = 50
    image[0, 0, 0] = 200
    case = Preprocessor(Preprocessing(), Region(kind="square", size_mm=4), 2)(volume_of(image, np.eye(4)))
    assert torch.allclose(case.images, torch.tensor(0.25))


def test_percentiles_clip_and_fall_back_where_they_coincide() -> None:
    image = np.arange(1000, dtype=np.float32).reshape(10, 10, 10)
    settings = Preprocessing.model_validate(
        {"intensity": {"scaling": "percentile", "lower": 10, "upper": 90}}
    )
    case = Preprocessor(settings, Region(), 2)(volume_of(image, np.eye(4)))
    low, high = np.percentile(image, (10, 90))
    expected = np.clip((image - low) / (high - low), 0, 1)
    assert np.allclose(case.images[:, 0].permute(1, 2, 0).numpy(), expected, atol=1e-6)
    sparse = np.zeros((10, 10, 10), np.float32)
    sparse[5, 5, 5] = 7
    fallback = Preprocessor(settings, Region(), 2)(volume_of(sparse, np.eye(4)))
    assert float(fallback.images.max()) == 1.0
    assert "percentiles coincide" in fallback.notes[0]
    sparse = np.zeros((40, 40, 4), np.float32)
    sparse[:3, :3, :2] = np.arange(18).reshape(3, 3, 2) + 200
    alone = volume_of(sparse, np.eye(4))
    two = replace(alone, array=np.concatenate([alone.array, alone.array + 1]))
    for given, more in ((two, {}), (alone, {"bias_correction": True})):
        settings = Preprocessing.model_validate({"intensity": {"scaling": "percentile"} | more})
        prepared = Preprocessor(settings, Region(), 2)(given)
        assert len(prepared.images[:, 0].unique()) > 10
        assert [text for text in prepared.notes if "percentiles coincide" in text]


def test_constant_volume_gives_zeros() -> None:
    for scaling in ("minmax", "percentile"):
        settings = Preprocessing.model_validate({"intensity": {"scaling": scaling}})
        case = Preprocessor(settings, Region(), 2)(volume_of(np.full((9, 8, 3), 5.0), np.eye(4)))
        assert torch.equal(case.images, torch.zeros_like(case.images))


def test_intensities_beyond_float_range_are_refused() -> None:
    image = np.zeros((8, 8, 2), np.float32)
    image[0, 0, 0], image[1, 1, 1] = 3.3e38, -3.3e38
    with pytest.raises(DataError, match="too large"):
        Preprocessor(Preprocessing(), Region(), 2)(volume_of(image, np.eye(4)))


def test_the_volume_is_left_alone() -> None:
    volume = volume_of(ramp(), diagonal())
    before = volume.array.copy()
    case = Preprocessor(Preprocessing(size=(32, 32)), Region(), 2)(volume)
    case.images += 1
    assert np.array_equal(volume.array, before)


def test_restore_is_normalised_repeatable_and_strict() -> None:
    volume = volume_of(ramp((37, 41, 11)), diagonal())
    case = Preprocessor(Preprocessing(size=(32, 32)), Region(kind="square", size_mm=20), 3)(volume)
    probs = torch.rand((11, 3, 32, 32), generator=torch.Generator().manual_seed(1)).softmax(1)
    kept = probs.clone()
    first, second = case.restore(probs), case.restore(probs)
    assert np.array_equal(first, second)
    assert torch.equal(probs, kept)
    assert np.allclose(first.sum(0), 1, atol=1e-6)
    assert first.min() >= 0
    assert first.max() <= 1
    with pytest.raises(AdaptationError, match=r"\(11, 3, 32, 32\)"):
        case.restore(probs[:, :2])
    probs[0, 0, 0, 0] = float("nan")
    with pytest.raises(AdaptationError, match="not finite"):
        case.restore(probs)


def test_labels_never_gain_values_under_resampling() -> None:
    labels = np.zeros((20, 20, 6), np.int32)
    labels[5:10, 5:15], labels[10:15, 5:15] = 2, 4
    settings = Preprocessing(spacing=(1.3, 1.3, 1.3), size=(48, 48))
    case = Preprocessor(settings, Region(), 5)(
        volume_of(ramp((20, 20, 6)), np.diag([1, 1, 3, 1.0])), None, labels
    )
    assert case.labels is not None
    assert set(case.labels.unique().tolist()) == {0, 2, 4}
    probs = functional.one_hot(case.labels, 5).permute(0, 3, 1, 2).float()
    assert set(np.unique(case.restore(probs).argmax(0))) == {0, 2, 4}


def test_sheared_grid_is_resampled_along_its_own_axes() -> None:
    affine = diagonal((1.0, 1.0, 3.0))
    affine[0, 1] = 0.3
    image = phantom((21, 17, 9))
    case = Preprocessor(Preprocessing(spacing=(0.5, 0.5, 0.0)), Region(), 2)(volume_of(image, affine))
    assert case.depth == 9
    assert float((mask_of(case) != (image > 50)).mean()) < 0.02


def test_prepared_from_a_file(tmp_path: Path) -> None:
    save_image(tmp_path / "a.nii.gz", phantom(), rotation(20) @ diagonal())
    volume = read_volume(tmp_path / "a.nii.gz")
    case = Preprocessor(Preprocessing(size=(64, 64)), Region(), 2)(volume)
    assert mask_of(case).shape == volume.shape


@pytest.mark.shared
def test_prostate_equals_plain_code(shared: Path) -> None:
    import nibabel as nib

    path = shared / "data" / "prostate" / "UCL" / "Case26.nii.gz"
    case = Preprocessor(Preprocessing(size=(256, 256)), Region(), 2)(read_volume(path))
    plain = torch.from_numpy(nib.as_closest_canonical(nib.load(path)).get_fdata(dtype=np.float32).copy())
    plain = ((plain - plain.min()) / (plain.max() - plain.min())).permute(2, 0, 1)[:, None]
    expected = functional.interpolate(plain, (256, 256), mode="bilinear", align_corners=False)
    assert torch.allclose(case.images, expected, atol=1e-5, rtol=0)


@pytest.mark.shared
@pytest.mark.parametrize("name", ["CHUM/sub-9604", "JUN/sub-9669"])
def test_cord_equals_plain_code(shared: Path, name: str) -> None:
    import nibabel as nib

    def canonical(suffix: str) -> npt.NDArray[np.float32]:
        image = nib.load(shared / "data" / "spinal_cord" / f"{name}_T2starw{suffix}.nii.gz")
        return nib.as_closest_canonical(image).get_fdata(dtype=np.float32).copy()

    image, cord = scaled(canonical("")), canonical("_seg-manual") > 0
    volume = read_volume(shared / "data" / "spinal_cord" / f"{name}_T2starw.nii.gz")
    mask = read_volume(shared / "data" / "spinal_cord" / f"{name}_T2starw_seg-manual.nii.gz").array[0] > 0
    region = Region(kind="mask", size_mm=50, pattern="*", slices="mask")
    case = Preprocessor(Preprocessing(size=(256, 256)), region, 3)(volume, mask)
    centre = np.argwhere(cord.any(axis=2)).mean(axis=0)
    side = [round(50 / step) for step in volume.spacing[:2]]
    first = [round(centre[axis]) - side[axis] // 2 for axis in (0, 1)]
    kept = [k for k in range(cord.shape[2]) if cord[..., k].any()]
    assert case.slice_index == tuple(kept)
    cut = image[first[0] : first[0] + side[0], first[1] : first[1] + side[1], kept]
    planes = torch.from_numpy(cut).permute(2, 0, 1)[:, None]
    expected = functional.interpolate(planes, (256, 256), mode="bilinear", align_corners=False)
    assert torch.allclose(case.images, expected, atol=1e-5, rtol=0)
